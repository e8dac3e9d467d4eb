"""A conversation's items as the messages of a chat, and back: what chat templates and the chat endpoint understand."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from pydantic import TypeAdapter

from serving.api.http.responses_api.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    Item,
    MessageItem,
    ReasoningItem,
)
from serving.api.http.responses_api.objects import OutputItem
from serving.errors import InvalidRequest

_ITEM: TypeAdapter[Item] = TypeAdapter(InputItem)


def input_items(given: str | Sequence[Item]) -> list[Item]:
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else list(given)


def output_as_input(output: Iterable[OutputItem]) -> list[Item]:
    """Our own answer, as a client would send it back."""
    return [_ITEM.validate_python(msgspec.to_builtins(item)) for item in output]


def to_messages(items: Iterable[Item], instructions: str | None) -> list[dict[str, Any]]:
    """What the assistant did in a row (reasoning, then text, then calls) is one message. System messages at the
    beginning are one, too: many templates know only one."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    names: dict[str, str] = {}  # of functions, by the ids of their calls
    for item in items:
        last = messages[-1] if messages else {}
        if isinstance(item, FunctionCallOutputItem):
            if item.call_id not in names:
                raise InvalidRequest(f"input has the output of call {item.call_id!r}, must have that function_call "
                                     "before it", "input")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "name": names[item.call_id],
                             "content": item.text()})
        elif isinstance(item, FunctionCallItem):
            names[item.call_id] = item.name
            if last.get("role") != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append({
                "id": item.call_id, "type": "function",
                "function": {"name": item.name, "arguments": item.arguments},
            })
        elif isinstance(item, ReasoningItem):
            messages.append({"role": "assistant", "reasoning": item.text()})
        elif item.role == "assistant" and last.keys() == {"role", "reasoning"}:
            last["content"] = item.text()
        elif item.role == "system" and len(messages) == 1 and last["role"] == "system":
            last["content"] += f"\n\n{item.text()}"
        else:
            messages.append({"role": item.role, "content": item.text()})
    return messages


def turns(items: Sequence[Item]) -> list[int]:
    """Where the user speaks: indices of items from which on a conversation makes sense without what came before."""
    return [i for i, item in enumerate(items) if isinstance(item, MessageItem) and item.role == "user"]


def without_turns_before(items: Sequence[Item], start: int) -> list[Item]:
    """The items from `start` on, and of those before it what the system and the developer said. Outputs of calls that
    are gone go, too."""
    kept = [item for item in items[:start] if isinstance(item, MessageItem) and item.role in ("system", "developer")]
    calls = {item.call_id for item in items[start:] if isinstance(item, FunctionCallItem)}
    return kept + [item for item in items[start:]
                   if not isinstance(item, FunctionCallOutputItem) or item.call_id in calls]  # fmt: skip
