"""From one sequence's text to reasoning, content and tool calls.

    parser = OutputParser(Qwen3ReasoningParser(prompt), HermesToolParser(tools))
    for text in deltas:                      # special tokens in parser.markers have to be shown in it
        for part in parser.feed(text): ...   # ReasoningDelta | ContentDelta | ToolCallDelta
    for part in parser.finish(): ...

Whoever wants all of it at the end adds the same parts to a `Message`.
"""

from serving.decoding.parts import ContentDelta, Part, ToolCallDelta, join
from serving.decoding.stream_parser import StreamParser


class OutputParser:
    """A reasoning parser and then, on what is content to it, a tool parser; either may be missing.

    parallel_tool_calls: False drops all calls but the first.
    num_tool_calls: calls told so far.
    """

    def __init__(self, reasoning: StreamParser | None = None, tools: StreamParser | None = None, *,
                 parallel_tool_calls: bool = True) -> None:
        self._reasoning, self._tools = reasoning, tools
        self._most_calls = None if parallel_tool_calls else 1
        self.num_tool_calls = 0

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = [ContentDelta(text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._count(self._with_tools(parts))

    def finish(self) -> list[Part]:
        parts = [] if self._reasoning is None else self._reasoning.finish()
        parts = self._with_tools(parts)
        return self._count(parts + (self._tools.finish() if self._tools else []))

    def _with_tools(self, parts: list[Part]) -> list[Part]:
        if self._tools is None:
            return parts
        result: list[Part] = []
        for part in parts:
            result += self._tools.feed(part.text) if isinstance(part, ContentDelta) else [part]
        return result

    def _count(self, parts: list[Part]) -> list[Part]:
        kept = []
        for part in parts:
            if isinstance(part, ToolCallDelta):
                if self._most_calls is not None and part.index >= self._most_calls:
                    continue
                self.num_tool_calls = max(self.num_tool_calls, part.index + 1)
            kept.append(part)
        return join(kept)
