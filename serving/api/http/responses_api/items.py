"""The items of a conversation as clients send them: messages, calls of functions, their outputs, reasoning."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from serving.api.http.body import Body
from serving.api.http.requests import NotYet, Unused
from serving.api.http.tagged import by_type, known_types

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    type: Literal["input_text"]
    text: str


class OutputText(Body):
    """What a message of ours carried."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any] | None, Unused] = None


class Refusal(Body):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[OutputText, Tag("<output_text>")]
    | Annotated[Refusal, Tag("<refusal>")],
    by_type(), known_types(("input_text", "output_text", "refusal")),
]  # fmt: skip


class MessageItem(Body):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Part], Field(fail_fast=True)]
    id: Annotated[str | None, Unused] = None
    status: Annotated[Status | None, Unused] = None
    phase: NotYet = None

    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.refusal if isinstance(part, Refusal) else part.text for part in self.content)


class FunctionCallItem(Body):
    """Models make names and ids up: what was sent may be sent back."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: Annotated[str | None, Unused] = None
    status: Annotated[Status | None, Unused] = None
    namespace: NotYet = None
    caller: NotYet = None


class FunctionCallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputText], Field(fail_fast=True)]
    id: Annotated[str | None, Unused] = None
    status: Annotated[Status | None, Unused] = None

    def text(self) -> str:
        return self.output if isinstance(self.output, str) else "\n".join(part.text for part in self.output)


class SummaryText(Body):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    id: Annotated[str | None, Unused] = None
    status: Annotated[Status | None, Unused] = None
    encrypted_content: NotYet = None

    def text(self) -> str:
        """The reasoning itself where it is known, else its summary."""
        return "\n".join(part.text for part in self.content or self.summary)


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    by_type("message"), known_types(ITEM_TYPES, "message"),
]  # fmt: skip
