"""How everything above talks to an engine core, in this process or another.

Front ends hold an `EngineClient`: `generate` streams one sequence's events. Leaving the iterator early (a dropped
connection, a stop string) aborts the sequence and frees its pages.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from serving.request import EngineInfo, EngineRequest, EngineStats, TokenEvent


class EngineClient(Protocol):
    info: EngineInfo
    stats: EngineStats  # newest known

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        """Submits the request and yields its events to the last, merging events that queued up meanwhile.

        Raises `Overloaded` when an admission limit refuses it, `EngineDead` when the core is gone.
        Closing the iterator aborts the request.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request with finish_reason "abort". Unknown ids are ignored: aborts race with completion."""
        ...

    async def flush_cache(self) -> bool:
        """Drops every cached page that no live sequence holds. True when the whole cache is empty afterwards."""
        ...

    def check_health(self) -> None:
        """Raises `EngineDead` unless the core is alive and answering."""
        ...

    async def shutdown(self, grace_seconds: float) -> None:
        """Stops admitting, lets live requests finish for `grace_seconds`, aborts the rest, ends the core."""
        ...
