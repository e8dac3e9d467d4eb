"""Responses that can be asked for again, in this process' memory: the oldest go when there are too many."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from serving.api.http.responses_api.items import Item
from serving.api.http.responses_api.objects import ResponseObject
from serving.errors import NotFound, Overloaded

MAX_RESPONSES = 10_000
MAX_BYTES = 256 << 20


class EventLog:
    """Frames of a streamed response, which may be read from any of them on, by any number of readers, also before the
    last has come."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []  # by sequence number
        self.over = False
        self._news = asyncio.Event()

    def add(self, frame: bytes) -> None:
        self.frames.append(frame)
        self._tell()

    def end(self) -> None:
        self.over = True
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, start: int = 0) -> AsyncGenerator[bytes]:
        """All frames from number `start` on."""
        while True:
            for frame in self.frames[start:]:
                start += 1
                yield frame
            if start == len(self.frames):
                if self.over:
                    return
                await self._news.wait()


@dataclass(kw_only=True, eq=False)
class Stored:
    """A response that is over, or is made in the background by `task`."""

    response: ResponseObject
    conversation: Sequence[Item]  # all of it that a response after this one goes on from
    num_bytes: int  # about what it holds
    has_logprobs: bool
    log: EventLog | None = None  # of one that is made in the background and streamed
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def is_over(self) -> bool:
        return self.task is None or self.task.done()


class ResponseStore:
    """Bounded by their number and by what they hold. Those that are still made do not go.

    coming: ids of responses that are streamed to a client and stored at the end; the endpoints add and discard them.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0
        self.coming: set[str] = set()

    def __len__(self) -> int:
        return len(self._stored)

    def get(self, response_id: str) -> Stored:
        stored = self._stored.get(response_id)
        if stored is None:
            raise NotFound(f"The response {response_id!r} does not exist: it was not stored, was deleted, or had to go "
                           f"for newer ones (at most {self._max_responses} are kept, until the server ends)")
        return stored

    def add(self, stored: Stored) -> None:
        """Raises `Overloaded` where all others are still being made."""
        if self._is_full(stored):
            for response_id in [one.response.id for one in self._stored.values() if one.is_over]:
                self.remove(response_id)
                if not self._is_full(stored):
                    break
        if len(self) >= self._max_responses:
            raise Overloaded(f"{len(self)} responses are being made in the background, at most {self._max_responses} "
                             "may be")
        self._stored[stored.response.id] = stored
        self._bytes += stored.num_bytes

    def _is_full(self, one_more: Stored) -> bool:
        return len(self) >= self._max_responses or self._bytes + one_more.num_bytes > self._max_bytes

    def grow(self, stored: Stored, num_bytes: int) -> None:
        """It holds more than before."""
        stored.num_bytes += num_bytes
        if self._stored.get(stored.response.id) is stored:
            self._bytes += num_bytes

    def remove(self, response_id: str) -> Stored:
        stored = self.get(response_id)
        del self._stored[response_id]
        self._bytes -= stored.num_bytes
        return stored
