"""Errors that reach a user, and the one place that says what each API answers for them.

    PageloomError
    +-- ConfigError            bad flag, mesh, model path or checkpoint: start-up ends with exit code 2
    +-- InvalidRequest         the request breaks a rule                   HTTP 400, INVALID_ARGUMENT
    +-- Unauthorized           missing or wrong API key                    HTTP 401, UNAUTHENTICATED
    +-- NotFound               no such model or resource                   HTTP 404, NOT_FOUND
    +-- TooLarge               the body is over the size limit             HTTP 413, INVALID_ARGUMENT
    +-- Overloaded             admission limit reached, retry later        HTTP 429, RESOURCE_EXHAUSTED
    +-- EngineDead             the engine core is gone or shutting down    HTTP 503, UNAVAILABLE
"""

from typing import ClassVar


class PageloomError(Exception):
    """Base of all errors meant for a user; `str(error)` is one clear line that names the value and the rule."""

    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    error_type: ClassVar[str] = "InternalServerError"


class ConfigError(PageloomError):
    """The service cannot start as configured."""


class InvalidRequest(PageloomError):
    """A request field breaks a rule. `param` is the field's name as the client sent it, where there is one."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    error_type = "BadRequestError"

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class Unauthorized(PageloomError):
    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    error_type = "AuthenticationError"


class NotFound(PageloomError):
    http_status = 404
    grpc_code = "NOT_FOUND"
    error_type = "NotFoundError"


class TooLarge(PageloomError):
    http_status = 413
    grpc_code = "INVALID_ARGUMENT"
    error_type = "RequestEntityTooLargeError"


class Overloaded(PageloomError):
    """Refused by an admission limit; `retry_after` is in seconds."""

    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    error_type = "TooManyRequestsError"

    def __init__(self, message: str, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class EngineDead(PageloomError):
    http_status = 503
    grpc_code = "UNAVAILABLE"
    error_type = "ServiceUnavailableError"
