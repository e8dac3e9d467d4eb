"""What a model's output is made of, once parsed: pieces of reasoning, of content and of tool calls, in their order."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The first one of a call has its `id` and `name`; `arguments` of all of them, joined, are its arguments as JSON.
    Calls do not overlap: once `index` grows, the call before is complete."""

    index: int  # 0, 1, ...: which call of the sequence
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class Frame(NamedTuple):
    """What reasoning begins and ends with, at least. optional: the output may have none."""

    begin: str
    end: str
    optional: bool = False


Part = ReasoningDelta | ContentDelta | ToolCallDelta


def join(parts: Iterable[Part]) -> list[Part]:
    """The same news in as few parts as possible, none of them empty."""
    told = [part for part in parts if _says_something(part)]
    return told if len(told) < 2 else [_one(list(run)) for _, run in groupby(told, _Kind())]


def _says_something(part: Part) -> bool:
    return bool(part.arguments or part.name) if isinstance(part, ToolCallDelta) else bool(part.text)


class _Kind:
    """Parts that go on from one another have the same key: the number of the run."""

    def __init__(self) -> None:
        self._last: tuple[type[Part], int] | None = None
        self._run = 0

    def __call__(self, part: Part) -> int:
        is_call = isinstance(part, ToolCallDelta)
        kind = (type(part), part.index if is_call else 0)
        self._run += kind != self._last or (is_call and part.name is not None)
        self._last = kind
        return self._run


def _one(run: list[Part]) -> Part:
    first = run[0]
    if len(run) == 1:
        return first
    text = "".join(part.arguments if isinstance(part, ToolCallDelta) else part.text for part in run)
    return replace(first, arguments=text) if isinstance(first, ToolCallDelta) else replace(first, text=text)


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Message:
    """All parts of one sequence, put together."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> "Message":
        for part in parts:
            if isinstance(part, ReasoningDelta):
                self.reasoning += part.text
            elif isinstance(part, ContentDelta):
                self.content += part.text
            elif part.name is not None:
                self.tool_calls.append(ToolCall(part.id or "", part.name, part.arguments))
            else:
                self.tool_calls[part.index].arguments += part.arguments
        return self
