"""The fields of requests that are about tools."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError

from serving.api.http.body import Body
from serving.api.http.tagged import by_type, known_types

MAX_TOOLS = 128
ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def _object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise PydanticCustomError("tool", "arguments are an object, so its type must be 'object'")
    if not isinstance(schema.get("properties", {}), dict):
        raise PydanticCustomError("tool", "its properties must be an object")
    return schema


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_object_schema)] | None = None
    strict: Annotated[bool | None, Field(description="Calls that tool_choice forces always keep to the schema")] = None


class Tool(Body):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def _different_names(tools: list[Tool]) -> list[Tool]:
    names: set[str] = set()
    for tool in tools:
        if tool.function.name in names:
            raise PydanticCustomError("tool", "two functions are called {name}", {"name": repr(tool.function.name)})
        names.add(tool.function.name)
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_different_names)]


class NamedFunction(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class SomeTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolChoice(Body):
    """Tools that are not allowed are as if not given."""

    type: Literal["allowed_tools"]
    allowed_tools: SomeTools


Choice = Annotated[
    Annotated[NamedToolChoice, Tag("<function>")] | Annotated[AllowedToolChoice, Tag("<allowed_tools>")],
    by_type(), known_types(("function", "allowed_tools")),
]  # fmt: skip
ToolChoice = Literal["none", "auto", "required"] | Choice


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(Body):
    """A call that the assistant made. Streamed ones may be sent back with their index."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """Templates want the arguments as an object; what is none (a model wrote it) stays as it is."""
        arguments = self.function.arguments or {}
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except (ValueError, RecursionError):
                parsed = arguments
            arguments = parsed if isinstance(parsed, dict) else arguments
        call: dict[str, Any] = {"type": "function", "function": {"name": self.function.name, "arguments": arguments}}
        return call if self.id is None else {"id": self.id, **call}
