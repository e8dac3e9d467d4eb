"""Writes a Lark grammar with parts in other notations, as llguidance reads it (its docs/syntax.md)."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from serving.errors import InvalidRequest

TEXT = "/(?s:.*)/"  # any text; special tokens are none


def quote(text: str) -> str:
    return json.dumps(text)


def check_escapes(pattern: str, place: str, param: str) -> None:
    """llguidance passes over a last backslash."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise InvalidRequest(f"{place}: the regular expression ends in half an escape sequence, a single backslash",
                             param)


class Lark:
    """Expressions are strings that may stand in a rule; what they need besides is kept here.

    special_tokens: the tokenizer's, by their text. Where a literal spells one, it means the token.
    """

    def __init__(self, special_tokens: Mapping[str, int], eos_ids: Collection[int] = ()):
        self._special, self._eos_ids = special_tokens, eos_ids
        names = sorted(map(re.escape, special_tokens), key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(names)})") if names else None
        self._rules: list[str] = []
        self._parts: list[dict[str, Any]] = []

    def part(self, grammar: dict[str, Any]) -> str:
        """A grammar of its own, such as a JSON schema."""
        name = f"part_{len(self._parts)}"
        self._parts.append({"name": name, **grammar})
        return f"@{name}"

    def rule(self, expression: str, options: str = "") -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def terminal(self, expression: str) -> str:
        """One word for the lexer, however many alternatives it has."""
        name = f"TERMINAL_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def literal(self, text: str) -> str:
        return " ".join(f"<[{self._special[piece]}]>" if piece in self._special else quote(piece)
                        for piece in self._pieces(text)) or '""'

    def text(self, excludes: Iterable[str] = (), some: str = TEXT) -> str:
        """Any text that has none of these in it."""
        words = " | ".join(map(quote, excludes))
        return self.terminal(f"{some} & ~({TEXT} ({words}) {TEXT})") if words else some

    def until(self, text: str, excludes: Sequence[str] = ()) -> str:
        """Any text without `excludes`, up to and with the first occurrence of this one."""
        first = self._pieces(text)[0]
        if first in self._special:  # of another kind than text: no rule is needed to end the text there
            return f"{self.rule(self.text(excludes))} {self.literal(text)}"
        # What is excluded cannot come before: where the end begins with it, the rest is certain.
        head = min((one for one in excludes if first.startswith(one)), key=len, default=first)
        lazy = self.rule(f"{self.text(one for one in excludes if one != head)} {quote(head)}", "[lazy]")
        rest = text[len(head):]
        return f"{lazy} {self.literal(rest)}" if rest else lazy

    def free(self, ends: Sequence[str], excludes: Sequence[str] = ()) -> tuple[str, list[str]]:
        """(any text that none of these ends, for each of them any text up to and with its first occurrence). Where all
        begin with a special token the text may have the others, as between the messages of a conversation."""
        firsts = [self._pieces(end)[0] for end in ends]
        if not all(first in self._special for first in firsts):
            begun = [self.until(end, [one for one in excludes if one != end]) for end in ends]
            return self.rule(self.text(excludes)), begun
        others = sorted(token for one, token in self._special.items()
                        if one not in (*firsts, *excludes) and token not in self._eos_ids)
        some = self.text(excludes, "/(?s:.+)/")
        text = self.rule(f"({some} | <[{','.join(map(str, others))}]>)*" if others else f"{some}?")
        return text, [f"{text} {self.literal(end)}" for end in ends]

    def regex(self, pattern: str, place: str, param: str) -> str:
        r"""\d means ASCII digits; the rest is Rust's `regex`, much as Python's `re`. Raises InvalidRequest."""
        check_escapes(pattern, place, param)
        return f"/{regex_to_lark(pattern, 'd')}/"

    def any_of(self, expressions: Iterable[str]) -> str:
        return self.rule(" | ".join(f"({one})" for one in expressions))

    def grammar(self, start: str) -> str:
        if not self._rules and len(self._parts) == 1 and start == "@part_0":
            return json.dumps({"grammars": self._parts})
        lark = "\n".join([f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._parts]})

    def _pieces(self, text: str) -> list[str]:
        pieces = [text] if self._cut is None else self._cut.split(text)
        return [piece for piece in pieces if piece]
