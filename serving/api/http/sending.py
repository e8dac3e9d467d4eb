"""The two ways to answer: at once, and as server-sent events. Either ends the work when the client goes away."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.api.http.errors import CLIENT_CLOSED_REQUEST, error_body, for_users
from serving.errors import PageloomError

log = logging.getLogger(__name__)

Result = TypeVar("Result")
SSE_DONE = b"data: [DONE]\n\n"


def json_response(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def json_when_done(request: Request, work: Coroutine[Any, Any, Any]) -> Response:
    """The result of `work`, unless the client goes away before."""
    result = await unless_disconnected(request.receive, work)
    return json_response(result) if result is not None else Response(status_code=CLIENT_CLOSED_REQUEST)


def sse(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`; None after the client went away, which cancels it."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Sends frames as they come. The generator is closed at the end, and at once when the client goes away, also while
    no frame is due. `first` is a frame that was taken from it already."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, frames: AsyncGenerator[bytes]):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first, self._frames = first, frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_frames(send))
        finally:
            await self._frames.aclose()

    async def _send_frames(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def with_error_frames(frames: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """After the first frame an error can only be told as a frame."""
    started = False
    async with aclosing(frames):
        try:
            async for frame in frames:
                started = True
                yield frame
        except Exception as error:
            if not started:
                raise
            if not isinstance(error, PageloomError):
                log.exception("a stream failed", exc_info=error)
            yield sse(error_body(for_users(error)))
            yield SSE_DONE


async def event_stream(request: Request, frames: AsyncGenerator[bytes]) -> Response:
    """Waits for the first frame, so that a refusal still gets its status code."""
    guarded = with_error_frames(frames)
    first = await unless_disconnected(request.receive, anext(guarded))
    return EventStream(first, guarded) if first is not None else Response(status_code=CLIENT_CLOSED_REQUEST)
