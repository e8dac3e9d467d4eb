"""The events of a streamed response: one struct for each of `openai.types.responses`' that we send."""

import msgspec

from serving.api.http.responses_api.objects import (
    OutputItem,
    OutputTextPart,
    ReasoningTextPart,
    ResponseObject,
)


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    sequence_number: int  # from 0, without gaps


class OfResponse(Event, kw_only=True, tag="response"):
    response: ResponseObject


class Created(OfResponse, kw_only=True, tag="response.created"): ...


class Queued(OfResponse, kw_only=True, tag="response.queued"): ...


class InProgress(OfResponse, kw_only=True, tag="response.in_progress"): ...


class Completed(OfResponse, kw_only=True, tag="response.completed"): ...


class Incomplete(OfResponse, kw_only=True, tag="response.incomplete"): ...


class Failed(OfResponse, kw_only=True, tag="response.failed"): ...


class _OfItem(Event, kw_only=True, tag="item"):
    output_index: int
    item: OutputItem


class ItemAdded(_OfItem, kw_only=True, tag="response.output_item.added"): ...


class ItemDone(_OfItem, kw_only=True, tag="response.output_item.done"): ...


class _InItem(Event, kw_only=True, tag="in_item"):
    item_id: str
    output_index: int


class _InPart(_InItem, kw_only=True, tag="in_part"):
    content_index: int = 0  # an item has one part


class PartAdded(_InPart, kw_only=True, tag="response.content_part.added"):
    part: OutputTextPart | ReasoningTextPart


class PartDone(_InPart, kw_only=True, tag="response.content_part.done"):
    part: OutputTextPart | ReasoningTextPart


class DeltaTopLogprob(msgspec.Struct):
    token: str
    logprob: float


class DeltaLogprob(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[DeltaTopLogprob]


class TextDelta(_InPart, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[DeltaLogprob]


class TextDone(_InPart, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[DeltaLogprob]


class ReasoningDelta(_InPart, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_InPart, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_InItem, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_InItem, kw_only=True, tag="response.function_call_arguments.done"):
    arguments: str


def frame(event: Event) -> bytes:
    """A server-sent event with its name, as clients of this endpoint expect."""
    name = event.__struct_config__.tag
    return b"event: " + str(name).encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
