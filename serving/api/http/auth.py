"""Who may call what."""

from starlette.types import ASGIApp, Receive, Scope, Send

from serving.api.http.errors import error_response
from serving.api.keys import admin_keys, check_authorization
from serving.config import ServerConfig
from serving.errors import Unauthorized

OPEN_PATHS = frozenset(("/health", "/ping", "/metrics", "/version"))
ADMIN_PATHS = frozenset(("/flush_cache", "/reset_prefix_cache"))


class RequireKey:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app = app
        self._keys, self._admin_keys = config.api_keys, admin_keys(config)

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
