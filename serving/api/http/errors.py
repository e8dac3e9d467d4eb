"""Every error leaves as OpenAI's error body."""

import logging

import msgspec
from fastapi import FastAPI, Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from serving.errors import InvalidRequest, Overloaded, PageloomError

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # for the log only: nobody reads it
MOST_EXPLAINED = 1000  # errors: pydantic makes a dictionary for each, if only the first is wanted
REPLACED_FIELDS = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json_object": "structured_outputs.json_object",
    "guided_decoding_backend": "structured_outputs",
    "guided_whitespace_pattern": "structured_outputs",
}
TYPES = {401: "AuthenticationError", 404: "NotFoundError", 405: "MethodNotAllowedError",
         413: "RequestEntityTooLargeError", 415: "UnsupportedMediaTypeError"}


class ErrorInfo(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(msgspec.Struct):
    error: ErrorInfo


def for_users(error: BaseException) -> PageloomError:
    """The error itself; of a bug only that it is one: the rest is for the log."""
    return error if isinstance(error, PageloomError) else PageloomError(f"internal error: {type(error).__name__}")


def error_body(error: PageloomError) -> ErrorResponse:
    param = error.param if isinstance(error, InvalidRequest) else None
    return ErrorResponse(ErrorInfo(message=str(error), type=error.error_type, param=param, code=error.http_status))


def _respond(body: ErrorResponse, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), body.error.code, headers, "application/json")


def error_response(error: PageloomError) -> Response:
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _respond(error_body(error), headers)


def _field(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` of a pydantic location, without the union branches that pydantic adds (they are types)."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in {"str", "int", "none"}:
            name += f".{part}" if name else part
    return name


def _depth(detail: ErrorDetails) -> int:
    name = _field(detail["loc"])
    return name.count("[") + name.count(".")


def _explain(detail: ErrorDetails, rules: list[str]) -> InvalidRequest:
    """`rules` are the messages of all the union's branches that failed at the same place."""
    name, kind, value = _field(detail["loc"]), detail["type"], detail.get("input")
    top = name.split(".")[0].split("[")[0]
    if kind == "extra_forbidden":
        if name in REPLACED_FIELDS:
            return InvalidRequest(f"{name} is no longer accepted, use {REPLACED_FIELDS[name]}", name)
        return InvalidRequest(f"{name} is not a known field", name)
    if kind == "missing":
        return InvalidRequest(f"{name} is missing", name)
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {detail['ctx']['error'] if 'ctx' in detail else ''}")
    if kind == "not_supported":
        return InvalidRequest(f"{name} {detail['msg']}", top)
    if kind == "cross_field":
        return InvalidRequest(detail["msg"], detail.get("ctx", {}).get("param"))
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return InvalidRequest(f"{name or 'the body'} is {shown}: {', or '.join(rules)}", name or None)


def explain(error: ValidationError) -> InvalidRequest:
    """The first field that is wrong. Of a union's branches those count that got furthest into the value."""
    if error.error_count() > MOST_EXPLAINED:
        return InvalidRequest(f"the body breaks {error.error_count()} rules, too many to say which")
    details = error.errors(include_url=False)
    same = [detail for detail in details if detail["loc"][:1] == details[0]["loc"][:1]]
    depth = max(map(_depth, same))
    deepest = [detail for detail in same if _depth(detail) == depth]
    first = deepest[0]
    place = _field(first["loc"])
    rules = dict.fromkeys(detail["msg"] for detail in deepest if _field(detail["loc"]) == place)
    return _explain(first, list(rules))


def install_handlers(app: FastAPI) -> None:
    async def known(_: Request, error: Exception) -> Response:
        assert isinstance(error, PageloomError)
        if error.http_status == 500:
            log.error("request failed: %s", error)
        return error_response(error)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, ValidationError)
        return error_response(explain(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        kind = TYPES.get(error.status_code, "BadRequestError" if error.status_code < 500 else "InternalServerError")
        return _respond(ErrorResponse(ErrorInfo(message=message, type=kind, code=error.status_code)),
                        dict(error.headers or {}))

    async def gone(_: Request, error: Exception) -> Response:
        assert isinstance(error, ClientDisconnect)  # before its body was read
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def unknown(request: Request, error: Exception) -> Response:
        log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(for_users(error))

    app.add_exception_handler(PageloomError, known)
    app.add_exception_handler(ValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, unknown)
