"""The HTTP front end: its routes, and an OpenAPI document made from the very types that are parsed and sent."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from serving.api.http import ops, requests, responses
from serving.api.http.auth import OPEN_PATHS, RequireKey
from serving.api.http.chat import chat_completions
from serving.api.http.completions import completions
from serving.api.http.errors import ErrorResponse, install_handlers
from serving.api.http.responses_api import endpoints as responses_api
from serving.api.http.responses_api.objects import DeletedResponse, ResponseObject
from serving.api.http.responses_api.request import ResponsesRequest, RetrieveQuery
from serving.api.http.responses_api.store import ResponseStore
from serving.api.service import Service

Endpoint = Callable[[Service, Request], Awaitable[Response]]
PATH_PARAMETER = re.compile(r"{(\w+)")
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
    """One resource. `answer` is a msgspec struct, a media type, or None for an empty body."""

    methods: str  # separated by spaces
    path: str
    endpoint: Endpoint
    answer: type[msgspec.Struct] | str | None
    summary: str
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    streams: bool = False
    errors: tuple[int, ...] = ()

    def documented_errors(self) -> list[int]:
        codes = {*self.errors, 500, *(WITH_BODY if self.body else ())}
        return sorted(codes if self.path in OPEN_PATHS else codes | {401})


ROUTES = (
    Route(methods="POST", path="/v1/completions", endpoint=completions, body=requests.CompletionRequest,
          answer=responses.CompletionResponse, streams=True, errors=(429, 503), summary="Complete prompts"),
    Route(methods="POST", path="/v1/chat/completions", endpoint=chat_completions, body=requests.ChatCompletionRequest,
          answer=responses.ChatResponse, streams=True, errors=(429, 503), summary="Answer a conversation"),
    Route(methods="POST", path="/v1/responses", endpoint=responses_api.create, body=ResponsesRequest,
          answer=ResponseObject, streams=True, errors=(429, 503), summary="Answer a conversation, with state"),
    Route(methods="GET", path="/v1/responses/{response_id}", endpoint=responses_api.retrieve, query=RetrieveQuery,
          answer=ResponseObject, streams=True, errors=(400, 404), summary="A response that was stored"),
    Route(methods="DELETE", path="/v1/responses/{response_id}", endpoint=responses_api.delete, answer=DeletedResponse,
          errors=(404,), summary="Forget a response"),
    Route(methods="POST", path="/v1/responses/{response_id}/cancel", endpoint=responses_api.cancel,
          answer=ResponseObject, errors=(400, 404), summary="End a response that is made in the background"),
    Route(methods="GET", path="/v1/models", endpoint=ops.models, answer=responses.ModelList, summary="List models"),
    Route(methods="GET", path="/v1/models/{model_id:path}", endpoint=ops.model, answer=responses.ModelCard,
          errors=(404,), summary="Describe a model"),
    Route(methods="POST", path="/tokenize", endpoint=ops.tokenize, body=requests.TokenizeRequest,
          answer=responses.TokenizeResponse, summary="Text or messages to token ids"),
    Route(methods="POST", path="/detokenize", endpoint=ops.detokenize, body=requests.DetokenizeRequest,
          answer=responses.DetokenizeResponse, summary="Token ids to text"),
    Route(methods="GET", path="/health", endpoint=ops.health, answer=None, errors=(503,), summary="Engine is alive"),
    Route(methods="GET POST", path="/ping", endpoint=ops.health, answer=None, errors=(503,),
          summary="The same as /health"),
    Route(methods="GET", path="/version", endpoint=ops.version, answer=responses.VersionResponse, summary="Version"),
    Route(methods="GET", path="/metrics", endpoint=ops.metrics, answer="text/plain", summary="Prometheus metrics"),
    Route(methods="GET", path="/load", endpoint=ops.load, answer=responses.LoadResponse, summary="Live requests"),
    Route(methods="GET", path="/server_info", endpoint=ops.server_info, answer="application/json",
          summary="Configuration and engine"),
    Route(methods="POST", path="/flush_cache", endpoint=ops.flush_cache, answer=responses.FlushResponse, errors=(503,),
          summary="Drop the prefix cache (admin)"),
    Route(methods="POST", path="/reset_prefix_cache", endpoint=ops.flush_cache, answer=responses.FlushResponse,
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


def _operation(route: Route, keys: bool) -> dict[str, Any]:
    """Written here, not by FastAPI, which cannot see what endpoints read and send by themselves."""
    success: dict[str, Any] = {"description": "Success"}
    if isinstance(route.answer, str):
        kind = "object" if route.answer == "application/json" else "string"
        success["content"] = {route.answer: {"schema": {"type": kind}}}
    elif route.answer is not None:
        success["content"] = _json(_ref(route.answer))
    if route.streams:
        success["content"]["text/event-stream"] = {}  # OpenAPI 3.1 cannot describe the events one by one
    answers = {"200": success}
    for code in route.documented_errors():
        answers[str(code)] = {"description": ERRORS[code], "content": _json(_ref(ErrorResponse))}
    operation: dict[str, Any] = {"summary": route.summary, "responses": answers}
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(_ref(route.body))}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in PATH_PARAMETER.findall(route.path)
    ]
    if route.query is not None:
        properties = route.query.model_json_schema()["properties"]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]
    if parameters:
        operation["parameters"] = parameters
    if keys and route.path not in OPEN_PATHS:
        operation["security"] = [{"bearer": []}]
    return operation


def _schemas() -> dict[str, Any]:
    bodies = [route.body for route in ROUTES if route.body is not None]
    _, made = models_json_schema([(body, "validation") for body in bodies], ref_template=REF)
    answers = [route.answer for route in ROUTES if isinstance(route.answer, type)]
    _, structs = msgspec.json.schema_components([*answers, ErrorResponse], ref_template=REF.replace("model", "name"))
    defined = made.get("$defs", {})
    assert not defined.keys() & structs.keys(), f"two types of one name: {defined.keys() & structs.keys()}"
    return {**defined, **structs}


def _openapi(service: Service) -> dict[str, Any]:
    keys = bool(service.config.api_keys or service.config.admin_api_key)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        path = route.path.replace(":path", "")
        name = path.strip("/").replace("/", "_").replace("{", "").replace("}", "")
        for method in route.methods.lower().split():
            paths.setdefault(path, {})[method] = {"operationId": f"{method}_{name}", **_operation(route, keys)}
    components: dict[str, Any] = {"schemas": _schemas()}
    components["schemas"]["TokenId"]["maximum"] = service.engine.info.vocab_size - 1
    if keys:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    info = {"title": "Pageloom", "version": service.version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="Pageloom", version=service.version, docs_url=None, redoc_url=None)
    app.state.responses = ResponseStore()
    for route in ROUTES:
        methods = route.methods.replace("GET", "GET HEAD").split()  # load balancers ask for the head alone
        app.add_api_route(route.path, _bind(route, service), methods=methods, include_in_schema=False)
    document = _openapi(service)
    app.openapi = lambda: document
    install_handlers(app)
    app.add_middleware(RequireKey, config=service.config)
    return app
