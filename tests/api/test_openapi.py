"""The document must say what the server does."""

import json
from typing import Any

import pytest

from serving.api.http.app import ROUTES, create_app
from tests.api.conftest import Serve, client_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def document(serve: Serve) -> dict[str, Any]:
    return create_app(serve()).openapi()


def resolve(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    return document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.split('"')[0] in document["components"]["schemas"]
    assert "$defs" not in text


def test_every_route_is_documented_with_its_errors(document: dict[str, Any]) -> None:
    for route in ROUTES:
        operations = document["paths"][route.path.replace(":path", "")]
        methods = [other.methods for other in ROUTES if other.path == route.path]
        assert set(operations) == set(" ".join(methods).lower().split())
        operation = operations[route.methods.lower().split()[0]]
        assert set(operation["responses"]) == {"200", *map(str, route.documented_errors())}
        assert ("requestBody" in operation) == (route.body is not None)
        if route.streams:
            assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        if route.streams and route.body:
            assert {"400", "401", "404", "413", "429", "503"} <= set(operation["responses"])


def test_unknown_fields_are_excluded_and_limits_stated(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name in ("CompletionRequest", "ChatCompletionRequest", "TokenizeRequest", "DetokenizeRequest", "ChatMessage",
                 "ResponsesRequest", "MessageItem", "FunctionTool"):
        assert schemas[name]["additionalProperties"] is False
    properties = schemas["CompletionRequest"]["properties"]
    number = next(option for option in properties["temperature"]["anyOf"] if option["type"] == "number")
    assert (number["minimum"], number["maximum"]) == (0, 2)
    assert properties["suffix"] == {"title": "Suffix", "type": "null", "default": None}
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert schemas["TokenId"]["maximum"] == 511, "the vocabulary of the fake engine"


def matches(document: dict[str, Any], schema: dict[str, Any], value: Any) -> bool:
    """The part of JSON Schema that response schemas use."""
    schema = resolve(document, schema)
    if "anyOf" in schema:
        return any(matches(document, option, value) for option in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if "const" in schema:
        return value == schema["const"]
    kind = schema.get("type")
    if kind == "object":
        properties, extra = schema.get("properties", {}), schema.get("additionalProperties", {})
        return isinstance(value, dict) and set(schema.get("required", ())) <= set(value) and all(
            matches(document, properties.get(name, extra), one) for name, one in value.items()
        )
    if kind == "array":
        return isinstance(value, list) and all(matches(document, schema.get("items", {}), one) for one in value)
    types = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
    assert kind is None or kind in types, f"{schema} is beyond this checker"
    return kind is None or isinstance(value, types[kind])


async def test_answers_have_the_documented_form(serve: Serve, document: dict[str, Any]) -> None:
    hi = [{"role": "user", "content": "hi"}]
    calls: list[tuple[str, str, dict[str, Any] | None]] = [
        ("POST", "/v1/completions", {"prompt": "x"}),
        ("POST", "/v1/completions", {"prompt": "x", "logprobs": 2, "echo": True, "return_token_ids": True,
                                     "prompt_logprobs": 1}),
        ("POST", "/v1/chat/completions", {"messages": hi}),
        ("POST", "/v1/chat/completions", {"messages": hi, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1,
                                          "return_token_ids": True, "stop_token_ids": [5]}),
        ("POST", "/v1/responses", {"input": "x", "metadata": {"a": "b"}, "top_logprobs": 2,
                                   "include": ["message.output_text.logprobs"]}),
        ("POST", "/v1/responses", {"input": "x", "max_output_tokens": 1}), ("POST", "/v1/responses", {"input": []}),
        ("POST", "/tokenize", {"prompt": "x", "return_token_strs": True}),
        ("POST", "/detokenize", {"tokens": [64]}),
        ("GET", "/v1/models", None), ("GET", "/version", None), ("GET", "/load", None), ("GET", "/server_info", None),
        ("POST", "/flush_cache", None),
        ("POST", "/v1/completions", {"prompt": "x", "temperature": 9}), ("POST", "/v1/completions", {}),
        ("POST", "/v1/completions", {"prompt": "x", "model": "y"}),
    ]  # fmt: skip
    async with client_of(serve()) as client:
        for method, path, body in calls:
            response = await client.request(method, path, json=body)
            documented = document["paths"][path][method.lower()]["responses"][str(response.status_code)]
            schema = documented["content"][response.headers["content-type"]]["schema"]
            assert matches(document, schema, response.json()), (path, response.text)
            wrong = {**response.json(), next(iter(response.json())): object()}
            assert path == "/server_info" or not matches(document, schema, wrong), "the checker checks"
