"""A request for a response in the words of /v1/chat/completions, which knows how to prompt and to constrain."""

from collections.abc import Sequence
from typing import Any

from serving.api.http.format_fields import JsonSchemaFormat, ResponseFormat
from serving.api.http.requests import ChatCompletionRequest, ChatMessage, SamplerFields
from serving.api.http.responses_api.conversation import to_messages
from serving.api.http.responses_api.items import Item
from serving.api.http.responses_api.request import AllowedTools, FunctionName, JsonSchema, ResponsesRequest
from serving.api.http.tool_fields import Function, NamedFunction, NamedToolChoice, Tool
from serving.errors import InvalidRequest

# Of a chat's fields those that are called otherwise here.
FIELDS = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs",
          "max_completion_tokens": "max_output_tokens", "response_format": "text.format",
          "reasoning_effort": "reasoning.effort"}  # fmt: skip


def renamed(error: InvalidRequest) -> InvalidRequest:
    """A chat's error, with the name that its field has here."""
    old = error.param or ""
    top = old.split("[")[0].split(".")[0]
    if top not in FIELDS:
        return error
    message, new = str(error), FIELDS[top]
    return InvalidRequest(f"{new}{message[len(old):]}" if message.startswith(f"{old} ") else message, new)


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    form = body.text.format if body.text else None
    if form is None:
        return None
    schema = None
    if isinstance(form, JsonSchema):
        fields = {name: getattr(form, name) for name in JsonSchemaFormat.model_fields}
        schema = JsonSchemaFormat.model_construct(**fields)
    return ResponseFormat.model_construct(type=form.type, json_schema=schema)


def _tools(body: ResponsesRequest) -> dict[str, Any]:
    """The fields about tools. Tools that are not allowed are as if not given."""
    choice, tools = body.tool_choice, body.tools
    if isinstance(choice, AllowedTools):
        allowed = {tool.name for tool in choice.tools}
        choice, tools = choice.mode, [tool for tool in tools or () if tool.name in allowed]
    if isinstance(choice, FunctionName):
        choice = NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    functions = [Function.model_construct(**{name: getattr(tool, name) for name in Function.model_fields})
                 for tool in tools or ()]  # fmt: skip
    return {
        "tools": [Tool.model_construct(type="function", function=function) for function in functions] or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
    }


def to_chat(body: ResponsesRequest, items: Sequence[Item]) -> ChatCompletionRequest:
    """`items` are the conversation, which goes back further than the body where it continues a response."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in SamplerFields.model_fields}
    fields |= _tools(body)
    return ChatCompletionRequest.model_construct(
        **fields,
        messages=[ChatMessage.model_validate(message) for message in to_messages(items, body.instructions)],
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        response_format=_format(body),
        structured_outputs=body.structured_outputs,
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs,
    )
