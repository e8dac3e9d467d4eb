"""What a response is made of, as msgspec structs; field by field the types of `openai.types.responses`."""

from typing import Any, Literal

import msgspec

from serving.api.http.errors import for_users
from serving.errors import InvalidRequest, Overloaded

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class OutputLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[OutputTopLogprob]


class Annotation(msgspec.Struct):
    """Nothing annotates: the list that holds these is always empty."""


class OutputTextPart(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Annotation] = []
    logprobs: list[OutputLogprob] | None = None


class ReasoningTextPart(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryPart(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    """No summaries are made."""

    text: str


class MessageOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputTextPart]


class ReasoningOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[SummaryPart] = []
    content: list[ReasoningTextPart]
    encrypted_content: None = None


class FunctionCallOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = MessageOutput | ReasoningOutput | FunctionCallOutput


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0  # a notion of billing


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """Its status, output and usage change while it is made."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None

    @property
    def is_over(self) -> bool:
        return self.status not in ("queued", "in_progress")


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


def response_error(error: BaseException) -> ResponseError:
    """What a response that failed says."""
    if isinstance(error, Overloaded):
        return ResponseError("rate_limit_exceeded", str(error))
    if isinstance(error, InvalidRequest):
        return ResponseError("invalid_prompt", str(error))
    return ResponseError("server_error", str(for_users(error)))
