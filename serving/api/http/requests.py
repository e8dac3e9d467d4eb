"""Request bodies. The JSON schemas made from these classes are the documentation, so every limit is stated here;
`serving/validation.py` checks what depends on the model.

Unknown fields are refused. A field of a later feature is declared with the only values that have an effect today
(none, empty, or the default): anything else is refused by name.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from serving import validation as rules
from serving.api.http.body import Body
from serving.api.http.format_fields import ResponseFormat, StructuredOutputsFields
from serving.api.http.tool_fields import AllowedToolChoice, MessageToolCall, ToolChoice, Tools
from serving.api.service import Service
from serving.config import MAX_LOGPROBS
from serving.decoding.parts import Frame
from serving.request import EngineRequest, SamplingParams


def _not_supported(value: Any) -> Any:
    if value is not None:
        raise PydanticCustomError("not_supported", "is not supported yet")
    return value


def _no_annotations(value: Any) -> Any:
    if value not in (None, []):
        raise PydanticCustomError("not_supported", "is not supported yet, must be empty")
    return value


def _only_false(value: bool) -> bool:
    if value:
        raise PydanticCustomError("only_false", "only false is supported")
    return value


Unused = Field(description="Accepted and not used")
# Not Literal[False]: 0 would pass as it.
OnlyFalse = Annotated[bool, Field(json_schema_extra={"const": False}), AfterValidator(_only_false)]
NotYet = Annotated[None, BeforeValidator(_not_supported)]
Empty = Annotated[list[Any], Field(max_length=0)]
# Named, so that the document can state this model's vocabulary as the limit.
TokenId = TypeAliasType("TokenId", Annotated[int, Field(ge=0, le=rules.INT32_MAX)])
# Lists of any length stop at the first bad element: an error for each of millions would take gigabytes.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=rules.MAX_STOP_STRING_CHARS)]
BadWord = Annotated[str, StringConstraints(min_length=1, max_length=rules.MAX_BAD_WORD_CHARS)]
BiasKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class StreamOptions(Body):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: OnlyFalse | None = None


class SamplerFields(Body):
    """The fields that all generating endpoints take; null means the default."""

    model: str | None = None
    min_tokens: Annotated[int, Field(ge=0, le=rules.INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=rules.INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=rules.MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=rules.MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=rules.INT64_MIN, le=rules.INT64_MAX)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(json_schema_extra={"additionalProperties": False})] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=rules.MAX_BAD_WORDS)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-rules.INT32_MAX, le=rules.INT32_MAX)] | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    user: Annotated[str | None, Unused] = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Annotated[str | None, Unused] = None
    prompt_cache_key: Annotated[str | None, Unused] = None


class SamplingFields(SamplerFields):
    """The fields that completions and chats share."""

    max_tokens: Annotated[int, Field(ge=0, le=rules.INT32_MAX)] | None = None
    n: Annotated[int, Field(ge=1, le=rules.MAX_N)] | None = None
    prompt_logprobs: LogprobCount | None = None
    truncate_prompt_tokens: Literal[-1] | Annotated[int, Field(ge=1, le=rules.INT32_MAX)] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    request_id: Annotated[str, StringConstraints(min_length=1, max_length=rules.MAX_ID_CHARS)] | None = None
    metadata: Annotated[dict[str, Any] | None, Unused] = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsFields | None = None
    kv_transfer_params: NotYet = None

    @model_validator(mode="after")
    def _one_form(self) -> "SamplingFields":
        if self.structured_outputs and self.response_format and self.response_format.type != "text":
            raise PydanticCustomError("cross_field", "response_format and structured_outputs are both given, "
                                                     "only one may be", {"param": "structured_outputs"})
        return self

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("cross_field", "stream_options needs stream to be true",
                                      {"param": "stream_options"})
        if self.stream and self.prompt_logprobs is not None:
            raise PydanticCustomError("cross_field", "prompt_logprobs cannot be combined with stream",
                                      {"param": "prompt_logprobs"})
        return self

    def to_engine(self, ids: list[int], sampling: SamplingParams, service: Service, default_max_tokens: int | None,
                  grammar_after: Frame | None = None) -> list[EngineRequest]:  # fmt: skip
        """The sequences of one prompt, as `to_engine_requests`, with what this request says of them."""
        return rules.to_engine_requests(
            ids, sampling, service.limits, service.tokenizer, request_id=self.request_id or "",
            priority=self.priority or 0, cache_salt=self.cache_salt or "", default_max_tokens=default_max_tokens,
            grammar_after=grammar_after)  # fmt: skip

    def sampling(self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """The engine's parameters: this request's values, the defaults where it has none."""
        names = set(SamplingParams.__struct_fields__) & set(SamplingFields.model_fields)
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
            if name in given:
                given[name] = tuple(given[name])
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias is not None:
            given["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        given |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        form = self.structured_outputs or self.response_format
        given["structured_outputs"] = None if form is None else form.structured_outputs()
        return SamplingParams(**given)


class CompletionRequest(SamplingFields):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=1024)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=1024)]
    )
    echo: bool | None = None
    logprobs: LogprobCount | None = None
    suffix: NotYet = None
    best_of: Annotated[int, Field(ge=1, le=rules.MAX_N, description="Must be n: all are sent")] | None = None

    @model_validator(mode="after")
    def _some_output(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise PydanticCustomError("cross_field", "best_of is {best_of}, must be n, {n}: all completions are sent",
                                      {"param": "best_of", "best_of": self.best_of, "n": self.n or 1})
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("cross_field", "max_tokens is 0, must be at least 1 unless echo is true",
                                      {"param": "max_tokens"})
        return self


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """A message of the conversation. What our own answers carry may be sent back."""

    role: Role
    type: Annotated[Literal["text"] | None, Unused] = None  # lm-eval says so
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    annotations: Annotated[Empty | None, BeforeValidator(_no_annotations)] = None
    function_call: NotYet = None
    audio: NotYet = None

    def for_template(self) -> dict[str, Any]:
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": content or ""}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
            message["content"] = content  # templates tell calls with text from calls without
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message


class ChatPrompt(Body):
    """The part of a chat request that becomes the prompt."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, StringConstraints(min_length=1, max_length=65536)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    reasoning_effort: ReasoningEffort | None = None

    @model_validator(mode="after")
    def _one_ending(self) -> "ChatPrompt":
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError("cross_field", "continue_final_message and add_generation_prompt are both true, "
                                                     "at most one may be", {"param": "continue_final_message"})
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise PydanticCustomError("cross_field", "continue_final_message needs the final message to be the "
                                                     "assistant's", {"param": "continue_final_message"})
        return self


class ChatCompletionRequest(ChatPrompt, SamplingFields):
    max_completion_tokens: Annotated[int, Field(ge=1, le=rules.INT32_MAX)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=rules.INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    store: OnlyFalse | None = None
    verbosity: Literal["medium"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("cross_field", "top_logprobs needs logprobs to be true",
                                      {"param": "top_logprobs"})
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError("cross_field", "max_tokens and max_completion_tokens differ, give only one",
                                      {"param": "max_completion_tokens"})
        return self

    @model_validator(mode="after")
    def _only_allowed_tools(self) -> "ChatCompletionRequest":
        if isinstance(self.tool_choice, AllowedToolChoice):
            some = self.tool_choice.allowed_tools
            tools = {tool.function.name: tool for tool in self.tools or ()}
            for tool in some.tools:
                if tool.function.name not in tools:
                    raise PydanticCustomError("cross_field", "tool_choice allows {name}, which is none of tools",
                                              {"param": "tool_choice", "name": repr(tool.function.name)})
            allowed = {tool.function.name for tool in some.tools}
            self.tools, self.tool_choice = [one for name, one in tools.items() if name in allowed], some.mode
        return self


class TokenizeRequest(Body):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, StringConstraints(min_length=1, max_length=65536)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    reasoning_effort: ReasoningEffort | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("cross_field", "exactly one of prompt and messages must be given",
                                      {"param": "prompt"})
        for name in ChatPrompt.model_fields:
            if self.prompt is not None and getattr(self, name) is not None:
                raise PydanticCustomError("cross_field", "{param} goes with messages, not with prompt", {"param": name})
        return self

    def chat(self) -> ChatPrompt:
        return ChatPrompt(**{name: getattr(self, name) for name in ChatPrompt.model_fields})


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
