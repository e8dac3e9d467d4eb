"""How one request's output has to be read, and what it must be where calls are forced."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from serving.decoding.grammar.build import source_of
from serving.decoding.output_parser import OutputParser, WithoutMarks
from serving.decoding.parts import Frame
from serving.decoding.reasoning.base import ReasoningParser
from serving.decoding.reasoning.harmony import HarmonyParser
from serving.decoding.reasoning.registry import REASONING_PARSERS
from serving.decoding.stream_parser import StreamParser
from serving.decoding.tools.base import Tool, ToolParser, arguments_schema
from serving.decoding.tools.beside_answer import answer_or_calls
from serving.decoding.tools.constrained import (
    NamedToolParser,
    RequiredToolParser,
    required_schema,
)
from serving.decoding.tools.registry import TOOL_PARSERS
from serving.errors import InvalidRequest
from serving.request import StructuredOutputs

Calls = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """One of a request, shared by its sequences; each of those needs a `parser` of its own.

    calls: "none": a call would be content. "auto": as the model writes them, read by `tool_parser`. "required" and
    "named" (of the one tool there is then): `structured_outputs` forces them.
    """

    reasoning_parser: str | None = None  # a name in the registry; None: reasoning would be content
    tool_parser: str | None = None
    calls: Calls = "none"
    tools: tuple[Tool, ...] = ()
    parallel_tool_calls: bool = True

    @property
    def markers(self) -> frozenset[str]:
        """What the text has to show even if it is a special token."""
        return frozenset(marker for parser in self._parsers("") for marker in parser.markers)

    def structured_outputs(self, answer: StructuredOutputs | None,
                           special: Collection[str]) -> StructuredOutputs | None:
        """What the output has to be; `answer`: what it has to be if it calls nothing. special: the model's special
        tokens. Raises InvalidRequest where there can be no such answer."""
        if answer is not None and self.calls != "none":
            tools = self._calls()
            if self.calls != "auto" or tools is None:
                raise InvalidRequest(f"tool_choice forces calls, which {source_of(answer)} rules out: it must be "
                                     '"none" or "auto"', "tool_choice")
            return answer_or_calls(answer, tools, special)
        if self.calls == "named":
            return StructuredOutputs(json=arguments_schema(self.tools[0]), source="tools")
        if self.calls == "required":
            return StructuredOutputs(json=required_schema(self.tools, self.parallel_tool_calls), source="tools")
        return answer

    def parser(self, prompt: str = "", hidden: Collection[str] = (), *, continues: bool = False) -> OutputParser:
        """prompt: its end, as text with special tokens; if the output continues a message: all of that. hidden: the
        markers that may not come out as content."""
        parsers = self._parsers(prompt, continues)
        if parsers and hidden:
            parsers.append(WithoutMarks(sorted(hidden)))
        return OutputParser(*parsers, parallel_tool_calls=self.parallel_tool_calls)

    def free(self, prompt: str, *, continues: bool = False) -> Frame | None:
        """Of the reasoning, in which no grammar holds; None if there is none."""
        parser = self._reasoning(prompt, continues)
        return None if parser is None else parser.frame

    def _parsers(self, prompt: str, continues: bool = False) -> list[StreamParser]:
        reasoning = self._reasoning(prompt, continues)
        tools = self._calls()
        if isinstance(tools, HarmonyParser):
            return [tools]
        return [parser for parser in (reasoning, tools) if parser is not None]

    def _reasoning(self, prompt: str, continues: bool) -> ReasoningParser | HarmonyParser | None:
        if self.reasoning_parser is None:
            return None
        parser = REASONING_PARSERS[self.reasoning_parser]
        return parser(prompt, continues) if issubclass(parser, ReasoningParser) else parser(takes_calls=False)

    def _calls(self) -> ToolParser | None:
        match self.calls:
            case "required":
                return RequiredToolParser(self.tools)
            case "named":
                return NamedToolParser(self.tools)
            case "auto" if self.tool_parser is not None:
                return TOOL_PARSERS[self.tool_parser](self.tools)
        return None
