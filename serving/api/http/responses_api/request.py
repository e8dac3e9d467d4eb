"""The body of POST /v1/responses, with OpenAI's names; sampling fields beyond those are vLLM's.

As in `serving/api/http/requests.py` every limit is stated here, unknown fields are refused, and of a field that has
only one meaning here no other value is taken.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from serving import validation as rules
from serving.api.http.requests import Body, LogprobCount, NotYet, SamplerFields

LOGPROBS = "message.output_text.logprobs"
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
MAX_ITEMS = 4096
MAX_TOOLS = 128
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Id = Annotated[str, StringConstraints(min_length=1, max_length=rules.MAX_ID_CHARS)]
Unused = Field(description="Accepted and not used")
Status = Literal["in_progress", "completed", "incomplete"]


def _known(kinds: tuple[str, ...], default: str | None = None) -> BeforeValidator:
    """Refuses objects whose `type` is none of `kinds` in words that name it."""

    def check(value: Any) -> Any:
        kind = value.get("type", default) if isinstance(value, dict) else kinds[0]
        if kind not in kinds:
            raise PydanticCustomError("unknown_type", "type {kind} is not supported, must be {known}",
                                      {"kind": repr(kind)[:60], "known": " or ".join(map(repr, kinds))})
        return value

    return BeforeValidator(check)


def _by_type(default: str | None = None) -> Discriminator:
    def kind(value: Any) -> str:
        given = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return f"<{given or default}>"  # in brackets: not taken for a field when an error is explained

    return Discriminator(kind)


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
    _by_type(), _known(("input_text", "output_text", "refusal")),
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
    type: Literal["function_call"]
    call_id: Id
    name: Name
    arguments: str
    id: Annotated[str | None, Unused] = None
    status: Annotated[Status | None, Unused] = None
    namespace: NotYet = None
    caller: NotYet = None


class FunctionCallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: Id
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
    _by_type("message"), _known(ITEM_TYPES, "message"),
]  # fmt: skip


class FunctionTool(Body):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: NotYet = None
    allowed_callers: NotYet = None
    defer_loading: Literal[False] | None = None


class FunctionName(Body):
    type: Literal["function"]
    name: Name


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionName], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


Choice = Annotated[
    Annotated[FunctionName, Tag("<function>")] | Annotated[AllowedTools, Tag("<allowed_tools>")],
    _by_type(), _known(("function", "allowed_tools")),
]  # fmt: skip


class PlainText(Body):
    type: Literal["text"]


class JsonObject(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    type: Literal["json_schema"]
    name: Name
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


Format = Annotated[
    Annotated[PlainText, Tag("<text>")]
    | Annotated[JsonObject, Tag("<json_object>")]
    | Annotated[JsonSchema, Tag("<json_schema>")],
    _by_type(), _known(("text", "json_object", "json_schema")),
]  # fmt: skip


class TextConfig(Body):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Annotated[Literal["auto"] | None, Field(description="No summaries: reasoning is sent whole")] = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


def _cross(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("cross_field", "{message}", {"param": param, "message": message})


class ResponsesRequest(SamplerFields):
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: Id | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=rules.INT32_MAX)] | None = None
    include: Annotated[list[Includable], Field(max_length=16)] | None = None
    top_logprobs: LogprobCount | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[Annotated[FunctionTool, _known(("function",))]],
                     Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=rules.INT32_MAX, description="Of built-in tools: none")] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: Annotated[dict[Annotated[str, StringConstraints(max_length=64)],
                             Annotated[str, StringConstraints(max_length=512)]], Field(max_length=16)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Annotated[str | None, Unused] = None
    prompt_cache_key: Annotated[str | None, Unused] = None
    chat_template_kwargs: dict[str, Any] | None = None
    conversation: NotYet = None
    prompt: NotYet = None
    context_management: NotYet = None
    prompt_cache_retention: Literal["in_memory"] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def stored(self) -> bool:
        return self.store is not False

    @model_validator(mode="after")
    def _consistent(self) -> "ResponsesRequest":
        if self.top_logprobs and not self.wants_logprobs:
            raise _cross("top_logprobs", f"top_logprobs needs include to have {LOGPROBS!r}")
        if self.background and not self.stored:
            raise _cross("background", "background needs store to be true: what nobody keeps cannot be asked for")
        if self.stream_options is not None and not self.stream:
            raise _cross("stream_options", "stream_options needs stream to be true")
        most = self.max_output_tokens
        if most is not None and (self.min_tokens or 0) > most:
            raise _cross("min_tokens", f"min_tokens is {self.min_tokens}, must be at most max_output_tokens, {most}")
        return self

    @model_validator(mode="after")
    def _choice_exists(self) -> "ResponsesRequest":
        names = [tool.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise _cross("tools", "tools has a name twice, every tool must have its own")
        choice, wanted = self.tool_choice, list[str]()
        if isinstance(choice, FunctionName):
            wanted = [choice.name]
        elif isinstance(choice, AllowedTools):
            wanted = [tool.name for tool in choice.tools]
        for name in wanted:
            if name not in names:
                raise _cross("tool_choice", f"tool_choice names {name!r}, which is not in tools")
        if choice == "required" and not names:
            raise _cross("tool_choice", "tool_choice is 'required', which needs tools")
        return self




class RetrieveQuery(Body):
    """The query of GET /v1/responses/{response_id}."""

    model_config = ConfigDict(strict=False)  # all is text there

    stream: bool = False
    starting_after: Annotated[int, Field(ge=0, le=rules.INT32_MAX)] | SkipJsonSchema[None] = None
    include: Annotated[list[Includable], Field(max_length=16)] = []
    include_obfuscation: Literal["false"] | SkipJsonSchema[None] = None

    @model_validator(mode="after")
    def _consistent(self) -> "RetrieveQuery":
        for name in ("starting_after", "include_obfuscation"):
            if getattr(self, name) is not None and not self.stream:
                raise _cross(name, f"{name} needs stream to be true")
        return self
