"""API keys."""

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from serving.api.http.errors import error_response
from serving.config import ServerConfig
from serving.errors import Unauthorized

OPEN_PATHS = frozenset(("/health", "/ping", "/metrics", "/version"))
ADMIN_PATHS = frozenset(("/flush_cache", "/reset_prefix_cache"))


def is_known_key(given: str, keys: Sequence[str]) -> bool:
    """Takes as long for a wrong key as for a right one."""
    presented = given.encode("utf-8", "surrogateescape")
    return any([hmac.compare_digest(presented, key.encode()) for key in keys])


def check_authorization(header: str, keys: Sequence[str]) -> None:
    """Raises `Unauthorized` unless the header carries one of the keys as a bearer token. No keys: all may enter."""
    if not keys:
        return
    scheme, _, given = header.partition(" ")
    if scheme.lower() != "bearer" or not is_known_key(given.strip(), keys):
        raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY")


class RequireKey:
    """ASGI middleware. The admin endpoints take the admin key where there is one, and no other."""

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app = app
        self._keys = config.api_keys
        self._admin_keys = config.api_keys if config.admin_api_key is None else (config.admin_api_key,)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            keys = self._admin_keys if scope["path"].rstrip("/") in ADMIN_PATHS else self._keys
            try:
                check_authorization(header.decode("latin-1"), keys)
            except Unauthorized as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
