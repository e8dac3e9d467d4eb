"""Text that comes in pieces, read as if it were all there.

A parser is a generator that reads with `yield from`; every read yields (nothing) for as long as its answer depends on
text that has not come yet. So an answer depends on the text alone, never on how it was cut into pieces, and a parser
made of these reads is exact at every split.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], None]

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r"[\s\w:,.+-]*")  # of a JSON value, between strings and brackets
_IN_STRING = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.\w]*")
_CLOSING = {"{": "}", "[": "]"}


@lru_cache(maxsize=256)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True)))


@lru_cache(maxsize=256)
def _prefixes(markers: tuple[str, ...]) -> tuple[int, frozenset[str]]:
    """All proper beginnings of the markers, and the length of the longest."""
    found = frozenset(marker[:n] for marker in markers for n in range(1, len(marker)))
    return max(map(len, found), default=0), found


def whole_characters(text: str) -> str:
    """Without halves of surrogate pairs, which escapes may spell and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class TextSource:
    """`add` and `end` are the writer's; all else is the reader's."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._ended = False

    def add(self, text: str) -> None:
        start = self._at if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._at -= start
        self._mark = None if self._mark is None else 0

    def end(self) -> None:
        self._ended = True

    def mark(self, back: int = 0) -> None:
        """From here on, and `back` characters before (of the last read), text is kept for `since_mark`."""
        self._mark = self._at - back

    def release(self) -> None:
        self._mark = None

    def since_mark(self) -> str:
        """What was read since the mark, which is gone now; "" if it was released."""
        text = "" if self._mark is None else self._text[self._mark : self._at]
        self._mark = None
        return text

    def peek(self) -> Reading[str]:
        """The next character, not read yet; "" at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def accept(self, marker: str) -> Reading[bool]:
        """Reads `marker` if it is next."""
        while not self._text.startswith(marker, self._at):
            rest = self._text[self._at : self._at + len(marker)]
            if self._ended or not marker.startswith(rest):
                return False
            yield
        self._at += len(marker)
        return True

    def close(self, marker: str) -> Reading[bool]:
        """As `accept`. A text that ends within the marker has read it so far: what ends a call is no content."""
        whole = yield from self.accept(marker)
        if not whole and marker.startswith(self._text[self._at :]):
            self._at = len(self._text)
        return whole

    def take(self, pattern: re.Pattern[str], sink: Sink | None = None) -> Reading[str]:
        """Reads all characters of a class: `pattern` is `[...]*`. They go to `sink` as they come, or are returned."""
        taken = ""
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if sink is not None:
                sink(match.group())
            else:
                taken += match.group()
            if self._at < len(self._text) or self._ended:
                return taken
            yield

    def space(self) -> Reading[str]:
        return self.take(_SPACE)

    def rest(self, sink: Sink) -> Reading[None]:
        """All that comes goes to `sink`."""
        while True:
            text, self._at = self._text[self._at :], len(self._text)
            sink(text)
            if self._ended:
                return
            yield

    def until(self, markers: Sequence[str], sink: Sink) -> Reading[str]:
        """Text before the first marker goes to `sink`, the marker is read and returned; "" at the end of the text.
        Of markers that begin together the longest counts."""
        markers = tuple(markers)
        pattern, (longest, beginnings) = _any_of(markers), _prefixes(markers)
        while True:
            text, at = self._text, self._at
            held = len(text)  # where a marker may have begun that is not complete
            if not self._ended:
                for start in range(max(at, len(text) - longest), len(text)):
                    if text[start:] in beginnings:
                        held = start
                        break
            match = pattern.search(text, at)
            if match is not None and match.start() < held:
                self._at = match.end()
                sink(text[at : match.start()])
                return match.group()
            self._at = held
            sink(text[at:held])
            if self._ended:
                return ""
            yield

    # JSON, loosely: strings and brackets have to be in order, what stands between them is not judged.

    def json_string(self, sink: Sink | None = None) -> Reading[str | None]:
        """Reads a string with its quotes and returns what it says; None if there is none or it does not end (what was
        read of it is read). With a `sink`, it gets the raw text as it comes."""
        raw: list[str] = []
        put = sink or raw.append
        if not (yield from self.accept('"')):
            return None
        put('"')
        while True:
            yield from self.take(_IN_STRING, put)
            letter = yield from self.letter()
            put(letter)
            if letter == '"':
                break
            escaped = yield from self.letter()
            put(escaped)
            if not escaped:
                return None
        if sink is not None:
            return ""
        try:
            text = json.loads("".join(raw), strict=False)
        except ValueError:
            return None
        return whole_characters(text)

    def json_value(self, sink: Sink) -> Reading[bool]:
        """Reads one value; its raw text goes to `sink` as it comes. False: it is none, or does not end."""
        first = yield from self.peek()
        if first == '"':
            return (yield from self.json_string(sink)) is not None
        if first not in _CLOSING:
            scalar = yield from self.take(_SCALAR)
            sink(scalar)
            return bool(scalar)
        open_brackets: list[str] = []
        while True:
            yield from self.take(_PLAIN, sink)
            letter = yield from self.peek()
            if letter == '"':
                if (yield from self.json_string(sink)) is None:
                    return False
                continue
            if letter in _CLOSING:
                open_brackets.append(_CLOSING[letter])
            elif not letter or letter not in "]}" or open_brackets[-1] != letter:
                return False
            else:
                open_brackets.pop()
            self._at += 1
            sink(letter)
            if not open_brackets:
                return True

    def letter(self) -> Reading[str]:
        """Reads the next character; "" at the end."""
        letter = yield from self.peek()
        self._at += len(letter)
        return letter
