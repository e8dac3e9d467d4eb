"""From one sequence's text to reasoning, content and tool calls.

    parser = OutputParser(Qwen3ReasoningParser(prompt), HermesToolParser(tools))
    for text in deltas:                      # the special tokens among the parsers' markers have to be shown in it
        for part in parser.feed(text): ...   # ReasoningDelta | ContentDelta | ToolCallDelta
    for part in parser.finish(): ...

Whoever wants all of it at the end adds the same parts to a `Message`.
"""

from collections.abc import Sequence

from serving.decoding.parts import ContentDelta, Part, ToolCallDelta, join
from serving.decoding.stream_parser import StreamParser
from serving.decoding.text_source import Reading


class WithoutMarks(StreamParser):
    """Drops special tokens that were shown for the parsers before it, and meant nothing to them where they stand."""

    def __init__(self, marks: Sequence[str]) -> None:
        super().__init__()
        self._marks = tuple(marks)

    def run(self) -> Reading[None]:
        while (yield from self.source.until(self._marks, self.content)):
            pass


class OutputParser:
    """Parsers in a row, each of which reads what is content to the one before it. None at all: the text is content.

    parallel_tool_calls: False drops all calls but the first.
    num_tool_calls: calls told so far.
    """

    def __init__(self, *parsers: StreamParser, parallel_tool_calls: bool = True) -> None:
        self._parsers = parsers
        self._most_calls = None if parallel_tool_calls else 1
        self.num_tool_calls = 0

    def feed(self, text: str) -> list[Part]:
        return self._through([ContentDelta(text)], self._parsers)

    def finish(self) -> list[Part]:
        """The text has ended: what the parsers held back, each handed on to the next before that ends, too."""
        parts: list[Part] = []
        for i, parser in enumerate(self._parsers):
            parts += self._through(parser.finish(), self._parsers[i + 1 :])
        return join(parts)

    def _through(self, parts: list[Part], parsers: Sequence[StreamParser]) -> list[Part]:
        for parser in parsers:
            parts = [
                news
                for part in parts
                for news in (parser.feed(part.text) if isinstance(part, ContentDelta) else [part])
            ]
        return self._count(parts)

    def _count(self, parts: list[Part]) -> list[Part]:
        kept = []
        for part in parts:
            if isinstance(part, ToolCallDelta):
                if self._most_calls is not None and part.index >= self._most_calls:
                    continue
                self.num_tool_calls = max(self.num_tool_calls, part.index + 1)
            kept.append(part)
        return join(kept)
