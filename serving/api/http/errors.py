"""Every error leaves as OpenAI's error body."""

import logging
import math
from collections.abc import Sequence

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


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_branch(part: int | str) -> bool:
    """Pydantic puts the branches of unions into locations; they are types."""
    return isinstance(part, str) and (not part.isidentifier() or part in {"str", "int", "none"})


def _field(location: Sequence[int | str]) -> str:
    """`messages[0].content` of a pydantic location."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not _is_branch(part):
            name += f".{part}" if name else part
    return name


def _progress(detail: ErrorDetails) -> tuple[float, ...]:
    """How far into the value a branch of a union got before this error."""
    place = [part if isinstance(part, int) else 0 for part in detail["loc"] if not _is_branch(part)]
    return (*place, math.inf) if detail["type"] == "too_long" else tuple(place)


def _first(details: Sequence[ErrorDetails], start: int = 0) -> list[ErrorDetails]:
    """The first error; where a union's branches all failed (from part `start` of the locations on), the first ones of
    those that got furthest into the value."""
    location = details[0]["loc"]
    union = next((i for i in range(start, len(location)) if _is_branch(location[i])), None)
    if union is None:
        return [details[0]]
    branches: dict[int | str, list[ErrorDetails]] = {}
    for detail in details:
        if detail["loc"][:union] == location[:union] and _is_branch(detail["loc"][union]):
            branches.setdefault(detail["loc"][union], []).append(detail)
    firsts = [one for branch in branches.values() for one in _first(branch, union + 1)]
    furthest = max(map(_progress, firsts))
    return [one for one in firsts if _progress(one) == furthest]


def _explain(detail: ErrorDetails, rules: list[str]) -> InvalidRequest:
    """`rules` are the messages of all the union's branches that failed at the same place."""
    name, kind, value = _field(detail["loc"]), detail["type"], detail.get("input")
    top = name.split(".")[0].split("[")[0]
    if kind == "extra_forbidden":
        name = ".".join(filter(None, (_field(detail["loc"][:-1]), _short(str(detail["loc"][-1])))))
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
    return InvalidRequest(f"{name or 'the body'} is {_short(repr(value))}: {', or '.join(rules)}", name or None)


def explain(error: ValidationError) -> InvalidRequest:
    """The first field that is wrong."""
    if error.error_count() > MOST_EXPLAINED:
        return InvalidRequest(f"the body breaks {error.error_count()} rules, too many to say which")
    found = _first(error.errors(include_url=False))
    return _explain(found[0], list(dict.fromkeys(detail["msg"] for detail in found)))


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
