"""The body of POST /v1/responses, with OpenAI's names; sampling fields beyond those are vLLM's.

As in `serving/api/http/requests.py` every limit is stated here, unknown fields are refused, and of a field that has
only one meaning here no other value is taken.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from serving import validation as rules
from serving.api.http.body import Body
from serving.api.http.format_fields import JsonSchemaFormat, StructuredOutputsFields
from serving.api.http.requests import LogprobCount, NotYet, OnlyFalse, ReasoningEffort, SamplerFields
from serving.api.http.responses_api.items import InputItem
from serving.api.http.tagged import by_type, known_types
from serving.api.http.tool_fields import MAX_TOOLS, Function, ToolName

LOGPROBS = "message.output_text.logprobs"
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
MAX_ITEMS = 4096


class FunctionTool(Function):
    type: Literal["function"]
    output_schema: NotYet = None
    allowed_callers: NotYet = None
    defer_loading: OnlyFalse | None = None


class FunctionName(Body):
    type: Literal["function"]
    name: ToolName


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionName], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


Choice = Annotated[
    Annotated[FunctionName, Tag("<function>")] | Annotated[AllowedTools, Tag("<allowed_tools>")],
    by_type(), known_types(("function", "allowed_tools")),
]  # fmt: skip


class PlainText(Body):
    type: Literal["text"]


class JsonObject(Body):
    type: Literal["json_object"]


class JsonSchema(JsonSchemaFormat):
    type: Literal["json_schema"]


Format = Annotated[
    Annotated[PlainText, Tag("<text>")]
    | Annotated[JsonObject, Tag("<json_object>")]
    | Annotated[JsonSchema, Tag("<json_schema>")],
    by_type(), known_types(("text", "json_object", "json_schema")),
]  # fmt: skip


class TextConfig(Body):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Body):
    effort: ReasoningEffort | None = None
    summary: Annotated[Literal["auto"] | None, Field(description="No summaries: reasoning is sent whole")] = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: OnlyFalse | None = None


def _cross(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("cross_field", "{message}", {"param": param, "message": message})


class ResponsesRequest(SamplerFields):
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: Annotated[str, StringConstraints(min_length=1, max_length=rules.MAX_ID_CHARS)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=rules.INT32_MAX)] | None = None
    include: Annotated[list[Includable], Field(max_length=16)] | None = None
    top_logprobs: LogprobCount | None = None
    text: TextConfig | None = None
    structured_outputs: StructuredOutputsFields | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[Annotated[FunctionTool, known_types(("function",))]],
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
        if self.structured_outputs and self.text and not isinstance(self.text.format, PlainText | None):
            raise _cross("structured_outputs", "text.format and structured_outputs are both given, only one may be")
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
