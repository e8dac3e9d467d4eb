"""What a model's output is made of, once parsed: pieces of reasoning, of content and of tool calls, in their order."""

from collections.abc import Iterable
from dataclasses import dataclass, field


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


Part = ReasoningDelta | ContentDelta | ToolCallDelta


def join(parts: Iterable[Part]) -> list[Part]:
    """The same news in as few parts as possible, none of them empty."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, ToolCallDelta):
            if part.name is None and isinstance(last, ToolCallDelta) and last.index == part.index:
                joined[-1] = ToolCallDelta(part.index, last.arguments + part.arguments, last.id, last.name)
            elif part.name is not None or part.arguments:
                joined.append(part)
        elif not part.text:
            continue
        elif isinstance(part, ContentDelta) and isinstance(last, ContentDelta):
            joined[-1] = ContentDelta(last.text + part.text)
        elif isinstance(part, ReasoningDelta) and isinstance(last, ReasoningDelta):
            joined[-1] = ReasoningDelta(last.text + part.text)
        else:
            joined.append(part)
    return joined


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
