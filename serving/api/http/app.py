"""The HTTP front end: routes, and an OpenAPI document made from the very types that are parsed and sent."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from serving.api.http import ops, requests, responses
from serving.api.http.auth import OPEN_PATHS, RequireKey
from serving.api.http.chat import chat_completions
from serving.api.http.completions import completions
from serving.api.http.errors import ErrorResponse, install_handlers
from serving.api.service import Service

Endpoint = Callable[[Service, Request], Awaitable[Response]]
REF = "#/components/schemas/{model}"
ERRORS = {
    400: "A field breaks a rule; param names it",
    401: "Missing or wrong API key",
    404: "No such model",
    413: "The body is over the size limit",
    415: "The body is not JSON",
    429: "An admission limit is reached; see Retry-After",
    500: "A bug in the server",
    503: "The engine is gone or the server is shutting down",
}
WITH_BODY = (400, 404, 413, 415)


@dataclass(frozen=True, kw_only=True)
class Route:
    """One operation. `answer` is a msgspec struct, a media type, or None for an empty body."""

    method: str
    path: str
    endpoint: Endpoint
    answer: type[msgspec.Struct] | str | None
    summary: str
    body: type[BaseModel] | None = None
    streams: bool = False
    errors: tuple[int, ...] = ()

    def documented_errors(self) -> list[int]:
        codes = {*self.errors, 500, *(WITH_BODY if self.body else ())}
        return sorted(codes if self.path in OPEN_PATHS else codes | {401})


ROUTES = (
    Route(method="POST", path="/v1/completions", endpoint=completions, body=requests.CompletionRequest,
          answer=responses.CompletionResponse, streams=True, errors=(429, 503), summary="Complete prompts"),
    Route(method="POST", path="/v1/chat/completions", endpoint=chat_completions, body=requests.ChatCompletionRequest,
          answer=responses.ChatResponse, streams=True, errors=(429, 503), summary="Answer a conversation"),
    Route(method="GET", path="/v1/models", endpoint=ops.models, answer=responses.ModelList, summary="List models"),
    Route(method="GET", path="/v1/models/{model_id:path}", endpoint=ops.model, answer=responses.ModelCard,
          errors=(404,), summary="Describe a model"),
    Route(method="POST", path="/tokenize", endpoint=ops.tokenize, body=requests.TokenizeRequest,
          answer=responses.TokenizeResponse, summary="Text or messages to token ids"),
    Route(method="POST", path="/detokenize", endpoint=ops.detokenize, body=requests.DetokenizeRequest,
          answer=responses.DetokenizeResponse, summary="Token ids to text"),
    Route(method="GET", path="/health", endpoint=ops.health, answer=None, errors=(503,), summary="Is the engine alive"),
    Route(method="GET", path="/ping", endpoint=ops.health, answer=None, errors=(503,), summary="The same as /health"),
    Route(method="POST", path="/ping", endpoint=ops.health, answer=None, errors=(503,), summary="The same as /health"),
    Route(method="GET", path="/version", endpoint=ops.version, answer=responses.VersionResponse, summary="Version"),
    Route(method="GET", path="/metrics", endpoint=ops.metrics, answer="text/plain", summary="Prometheus metrics"),
    Route(method="GET", path="/load", endpoint=ops.load, answer=responses.LoadResponse, summary="Requests in progress"),
    Route(method="GET", path="/server_info", endpoint=ops.server_info, answer="application/json",
          summary="Configuration and engine"),
    Route(method="POST", path="/flush_cache", endpoint=ops.flush_cache, answer=responses.FlushResponse, errors=(503,),
          summary="Drop the prefix cache (admin)"),
    Route(method="POST", path="/reset_prefix_cache", endpoint=ops.flush_cache, answer=responses.FlushResponse,
          errors=(503,), summary="The same as /flush_cache"),
)  # fmt: skip


def _bind(route: Route, service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await route.endpoint(service, request)

    return endpoint


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(kind: type) -> dict[str, Any]:
    return {"$ref": REF.format(model=kind.__name__)}


def _operation(route: Route) -> dict[str, Any]:
    """What FastAPI cannot see, because endpoints read the body and make the response themselves."""
    success: dict[str, Any] = {"description": "Success"}
    if isinstance(route.answer, str):
        kind = "object" if route.answer == "application/json" else "string"
        success["content"] = {route.answer: {"schema": {"type": kind}}}
    elif route.answer is not None:
        success["content"] = _json(_ref(route.answer))
    if route.streams:
        success["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    answers = {"200": success}
    for code in route.documented_errors():
        answers[str(code)] = {"description": ERRORS[code], "content": _json(_ref(ErrorResponse))}
    extra: dict[str, Any] = {"responses": answers}
    if route.body is not None:
        extra["requestBody"] = {"required": True, "content": _json(_ref(route.body))}
    if "{model_id" in route.path:
        extra["parameters"] = [{"name": "model_id", "in": "path", "required": True,
                                "schema": {"type": "string", "minLength": 1}}]
    if route.path not in OPEN_PATHS:
        extra["security"] = [{"bearer": []}]
    return extra


def _schemas() -> dict[str, Any]:
    bodies = [route.body for route in ROUTES if route.body is not None]
    _, made = models_json_schema([(body, "validation") for body in bodies], ref_template=REF)
    answers = [route.answer for route in ROUTES if isinstance(route.answer, type)]
    _, structs = msgspec.json.schema_components([*answers, ErrorResponse], ref_template=REF.replace("model", "name"))
    return {**made.get("$defs", {}), **structs}


def _openapi(app: FastAPI, service: Service) -> dict[str, Any]:
    document = get_openapi(title="Pageloom", version=service.version, routes=app.routes)
    operations = {(route.path.replace(":path", ""), route.method.lower()): route for route in ROUTES}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            operation.update(_operation(operations[path, method]))
    components: dict[str, Any] = {"schemas": _schemas()}
    if service.config.api_keys or service.config.admin_api_key:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    else:
        for methods in document["paths"].values():
            for operation in methods.values():
                operation.pop("security", None)
    document["components"] = components
    return document


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="Pageloom", version=service.version, docs_url=None, redoc_url=None)
    for route in ROUTES:
        app.add_api_route(route.path, _bind(route, service), methods=[route.method], summary=route.summary,
                          name=f"{route.method} {route.path}", response_class=Response)
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(_openapi(app, service))
        return document

    app.openapi = openapi
    install_handlers(app)
    app.add_middleware(RequireKey, config=service.config)
    return app
