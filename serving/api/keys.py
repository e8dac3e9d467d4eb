"""API keys, alike for HTTP headers and gRPC metadata."""

import hmac
from collections.abc import Sequence

from serving.config import ServerConfig
from serving.errors import Unauthorized


def admin_keys(config: ServerConfig) -> tuple[str, ...]:
    """The admin key where there is one, and no other."""
    return config.api_keys if config.admin_api_key is None else (config.admin_api_key,)


def check_authorization(header: str, keys: Sequence[str]) -> None:
    """Raises `Unauthorized` unless the header carries one of the keys as a bearer token. No keys: all may enter.
    Takes as long for a wrong key as for a right one."""
    if not keys:
        return
    scheme, _, given = header.partition(" ")
    presented = given.strip().encode("utf-8", "surrogateescape")
    known = [hmac.compare_digest(presented, key.encode()) for key in keys]
    if scheme.lower() != "bearer" or not any(known):
        raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY")
