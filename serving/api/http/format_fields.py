"""The fields of requests that say what form the output has."""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from serving.api.http.body import Body
from serving.decoding.grammar.build import MAX_CHOICES, MAX_REGEX_CHARS
from serving.decoding.grammar.gbnf import MAX_GRAMMAR_CHARS
from serving.request import StructuredOutputs

_STRICT = "Accepted and not used: the output keeps to the schema either way"


class JsonSchemaFormat(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Annotated[str | None, Field(description="Accepted and not used")] = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema", description="None: any object")] = None
    strict: Annotated[bool | None, Field(description=_STRICT)] = None


class ResponseFormat(Body):
    """OpenAI's, and vLLM's structural tags in either notation. Each type has the fields it needs, and no others."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fields_of_the_type(self) -> "ResponseFormat":
        wanted = {"json_schema": ("json_schema",), "structural_tag": ("structures", "triggers", "format")}
        for name in ("json_schema", "structures", "triggers", "format"):
            if getattr(self, name) is not None and name not in wanted.get(self.type, ()):
                raise _wrong(f"response_format.{name} does not go with type {self.type!r}")
        if self.type == "json_schema" and self.json_schema is None:
            raise _wrong("response_format.json_schema is missing, type 'json_schema' needs it")
        return self

    def structured_outputs(self) -> StructuredOutputs | None:
        if self.type == "json_object":
            return StructuredOutputs(json_object=True, source="response_format")
        if self.json_schema is not None:
            if self.json_schema.schema_ is None:
                return StructuredOutputs(json_object=True, source="response_format")
            return StructuredOutputs(json=self.json_schema.schema_, source="response_format")
        if self.type == "structural_tag":
            return StructuredOutputs(structural_tag=self.model_dump(exclude_none=True), source="response_format")
        return None


class StructuredOutputsFields(Body):
    """vLLM's `structured_outputs`: exactly one of the first six."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json", description="A JSON schema, or its text")] = None
    regex: Annotated[str, StringConstraints(max_length=MAX_REGEX_CHARS)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    grammar: Annotated[str, StringConstraints(max_length=MAX_GRAMMAR_CHARS)] | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def structured_outputs(self) -> StructuredOutputs:
        return StructuredOutputs(**self.model_dump(by_alias=True, exclude_none=True))


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("cross_field", message, {"param": "response_format"})  # type: ignore[arg-type]
