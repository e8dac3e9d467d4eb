"""What front ends and the core send each other, encoded with MessagePack when a socket lies between them."""

import msgspec

from serving.errors import EngineDead, InvalidRequest, Overloaded, PageloomError
from serving.request import EngineInfo, EngineRequest, StepOutput


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Attaches a front end; answered by `Ready`."""


class Add(msgspec.Struct, frozen=True, tag=True):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Answered by `CacheFlushed`, in order."""


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """Detaches the front end and aborts its requests."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    grace_seconds: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class Refused(msgspec.Struct, frozen=True, tag=True):
    """An `Add` that was not accepted, and the error to raise for it."""

    request_id: str
    error: str  # a key of REFUSALS
    message: str
    param: str | None = None

    @classmethod
    def of(cls, request_id: str, error: PageloomError) -> "Refused":
        return cls(request_id, type(error).__name__, str(error), getattr(error, "param", None))

    def exception(self) -> PageloomError:
        if self.error == InvalidRequest.__name__:
            return InvalidRequest(self.message, self.param)
        return REFUSALS[self.error](self.message)


class CacheFlushed(msgspec.Struct, frozen=True, tag=True):
    empty: bool


Command = Hello | Add | Abort | FlushCache | Goodbye | Shutdown
Reply = Ready | StepOutput | Refused | CacheFlushed

REFUSALS: dict[str, type[PageloomError]] = {error.__name__: error for error in (InvalidRequest, Overloaded, EngineDead)}
