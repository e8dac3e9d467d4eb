"""Unions of objects that their `type` tells apart: an error is of the one that is meant."""

from typing import Any

from pydantic import BeforeValidator, Discriminator
from pydantic_core import PydanticCustomError


def known_types(kinds: tuple[str, ...], default: str | None = None) -> BeforeValidator:
    """Refuses objects whose `type` is none of `kinds` in words that name it."""

    def check(value: Any) -> Any:
        kind = value.get("type", default) if isinstance(value, dict) else kinds[0]
        if kind not in kinds:
            raise PydanticCustomError("unknown_type", "type {kind} is not supported, must be {known}",
                                      {"kind": repr(kind)[:60], "known": " or ".join(map(repr, kinds))})
        return value

    return BeforeValidator(check)


def by_type(default: str | None = None) -> Discriminator:
    def kind(value: Any) -> str:
        given = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return f"<{given or default}>"  # in brackets: not taken for a field when an error is explained

    return Discriminator(kind)
