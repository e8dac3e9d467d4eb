"""The client side that is the same whether the core is in this process or another: requests, their events, their ends.

Only `_send` and how replies reach `_receive` differ. `_receive` may be called from another thread than the consumers'.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable

from serving.engine.messages import Abort, Add, CacheFlushed, Command, FlushCache, Refused, Reply
from serving.errors import EngineDead, InvalidRequest
from serving.request import EngineInfo, EngineRequest, EngineStats, StepOutput, TokenEvent

Resume = Callable[[], object]


class EventStream:
    """One request's events on their way to its consumer. What comes in while nobody looks is merged into one event."""

    def __init__(self, wake: Callable[[Resume], object]):
        self._wake = wake  # runs a callback in the consumer's event loop
        self._arrived: deque[TokenEvent | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: TokenEvent | Exception) -> None:
        """From any thread. An exception ends the stream."""
        self._arrived.append(item)
        if self._waiter is not None:
            self._wake(self._resume)

    async def get(self) -> TokenEvent:
        """Everything since the last call. Raises the exception that ended the stream."""
        while not self._arrived:  # a wake-up for what the last call took may come late
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                if not self._arrived:  # not even since the waiter became visible to `put`
                    await self._waiter
            finally:
                self._waiter = None
        merged: TokenEvent | None = None
        while self._arrived:
            item = self._arrived[0]
            if isinstance(item, Exception):
                if merged is not None:
                    break
                raise item
            self._arrived.popleft()
            merged = item if merged is None else merge(merged, item)
        assert merged is not None
        return merged

    def _resume(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(first: TokenEvent, second: TokenEvent) -> TokenEvent:
    """One event that says what both say in turn."""
    first.new_token_ids = first.new_token_ids + second.new_token_ids
    if second.logprobs is not None:
        first.logprobs = (first.logprobs or []) + second.logprobs
    if second.prompt_logprobs is not None:
        first.prompt_logprobs = second.prompt_logprobs
    first.finish_reason, first.stop_token_id = second.finish_reason, second.stop_token_id
    first.error, first.error_param = second.error, second.error_param
    return first


class StreamingClient(ABC):
    """Implements `EngineClient` but for the transport."""

    info: EngineInfo

    def __init__(self) -> None:
        self.stats = EngineStats()
        self._streams: dict[str, EventStream] = {}  # until the core's last word, also when nobody listens any more
        self._flushes: deque[tuple[Callable[[Resume], object], asyncio.Future[bool]]] = deque()
        self._dead: EngineDead | None = None

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        self.check_health()
        if request.request_id in self._streams:
            raise InvalidRequest(f"a request with id {request.request_id!r} is already live", "request_id")
        stream = self._streams[request.request_id] = EventStream(self._waker())
        ended = False
        try:
            self._send(Add(request))
            self.check_health()  # the core may have died since the stream became known to it
            while not ended:
                try:
                    event = await stream.get()
                except Exception:
                    ended = True  # the core refused the request, or is gone
                    raise
                ended = event.finish_reason is not None
                yield event
        finally:
            if not ended and self._dead is None:
                self._send(Abort(request.request_id))

    async def abort(self, request_id: str) -> None:
        if self._dead is None:
            self._send(Abort(request_id))

    async def flush_cache(self) -> bool:
        self.check_health()
        flushed = asyncio.get_running_loop().create_future()
        self._flushes.append((self._waker(), flushed))
        self._send(FlushCache())
        return await flushed

    def check_health(self) -> None:
        if self._dead is not None:
            raise EngineDead(str(self._dead))

    @abstractmethod
    async def shutdown(self, grace_seconds: float) -> None: ...

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Never blocks; what is sent to a core that is gone is lost."""

    @abstractmethod
    def _waker(self) -> Callable[[Resume], object]:
        """Runs a callback in the event loop that is running now, from wherever `_receive` is called."""

    def _receive(self, reply: Reply) -> None:
        match reply:
            case StepOutput(events=events, stats=stats):
                self.stats = stats
                for event in events:
                    stream = self._streams[event.request_id]
                    if event.finish_reason is not None:
                        del self._streams[event.request_id]
                    stream.put(event)
            case Refused(request_id=request_id):
                self._streams.pop(request_id).put(reply.exception())
            case CacheFlushed(empty):
                wake, flushed = self._flushes.popleft()
                wake(lambda: flushed.done() or flushed.set_result(empty))

    def _died(self, reason: str) -> None:
        """From now on every call raises `EngineDead`, those under way too."""
        if self._dead is not None:
            return
        self._dead = error = EngineDead(reason)
        while self._streams:
            self._streams.popitem()[1].put(error)
        while self._flushes:
            wake, flushed = self._flushes.popleft()
            wake(lambda flushed=flushed: flushed.done() or flushed.set_exception(error))
