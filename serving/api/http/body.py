"""Reading a request's body: size, media type and form are checked before anything else looks at it."""

from typing import TypeVar

from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import Request

from serving.errors import TooLarge

Model = TypeVar("Model", bound=BaseModel)


class Body(BaseModel):
    """All bodies and their parts: unknown fields are refused, and nothing is taken for another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, regex_engine="rust-regex")


async def _read(request: Request, limit: int) -> bytes:
    rule = f"the body must have at most {limit} bytes"
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise TooLarge(f"{rule}, Content-Length says {length}")
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise TooLarge(rule)
        chunks.append(chunk)
    return b"".join(chunks)


async def read_body(request: Request, model: type[Model], limit: int) -> Model:
    """Raises `TooLarge` without reading further, HTTP 415 for another media type, pydantic's `ValidationError` for
    anything else that is wrong, from malformed JSON to a value out of range."""
    media_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise HTTPException(415, f"Content-Type is {media_type!r}, must be application/json")
    return model.model_validate_json(await _read(request, limit))
