"""The base of all parsers of model output: text comes in with `feed`, parts come out as soon as they are certain."""

from abc import ABC, abstractmethod

from serving.decoding.parts import ContentDelta, Part, ReasoningDelta, join
from serving.decoding.text_source import Reading, TextSource


class StreamParser(ABC):
    """One sequence's parser. `feed` it the text as it comes and `finish` it at the end: the parts they return, joined,
    are the same however the text was cut.

    A subclass writes `run`, a generator that reads `self.source` and calls `self.emit`. If it returns before the text
    ends, the rest is content.

    markers: special tokens that `run` looks for. The detokenizer has to show these, whatever `skip_special_tokens` is.
    """

    markers: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.source = TextSource()
        self._parts: list[Part] = []
        self._running = self._all()
        self._done = False

    def feed(self, text: str) -> list[Part]:
        self.source.add(text)
        return self._go_on()

    def finish(self) -> list[Part]:
        """The text has ended: what was held back. Nothing may be fed after it."""
        self.source.end()
        parts = self._go_on()
        assert self._done, "a parser has to come to its end with the text"
        return parts

    @abstractmethod
    def run(self) -> Reading[None]: ...

    def emit(self, part: Part) -> None:
        self._parts.append(part)

    def content(self, text: str) -> None:
        self.emit(ContentDelta(text))

    def reasoning(self, text: str) -> None:
        self.emit(ReasoningDelta(text))

    def _all(self) -> Reading[None]:
        yield from self.run()
        yield from self.source.rest(self.content)

    def _go_on(self) -> list[Part]:
        if not self._done:
            try:
                next(self._running)
            except StopIteration:
                self._done = True
        parts, self._parts = join(self._parts), []
        return parts
