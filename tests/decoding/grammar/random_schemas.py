"""JSON schemas drawn at random from what is supported, put together in ways that nobody thinks of."""

from random import Random
from typing import Any

VALUES = ["a", "ab", 1, 2, None, True, "é", [1], {"a": 1}, 1.5]
PATTERNS = ["^[ab]{1,3}$", "^x|y$", "[0-9]{2}", "^(ab)*$"]


def random_schema(rng: Random, depth: int) -> dict[str, Any]:
    """Not all of them can be satisfied."""
    schema = _compound(rng, depth) if depth and rng.random() < 0.6 else _simple(rng)
    return schema | _compound(rng, 1) if depth and rng.random() < 0.15 else schema


def _simple(rng: Random) -> dict[str, Any]:
    low, span = rng.randrange(-200, 200), rng.randrange(300)
    some = rng.randrange(4)
    return rng.choice([
        {"type": "string", "minLength": some, "maxLength": some + rng.randrange(5)},
        {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 8},
        {"type": ["string", "null"], "maxLength": 4},
        {"type": "integer", "minimum": low, "maximum": low + span},
        {"type": "integer", "multipleOf": rng.choice([2, 3, 7]), "minimum": 0, "maximum": 50},
        {"type": "number", "minimum": low / 40, "maximum": low / 40 + rng.choice([0.5, 1, 10.25])},
        {"enum": rng.sample(VALUES, rng.randrange(1, 5))},
        {"const": rng.choice(VALUES)},
        {"type": "boolean"},
    ])  # fmt: skip


def _compound(rng: Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(["object", "object", "array", "anyOf", "oneOf", "allOf"])
    if kind == "object":
        names = rng.sample("abcd", rng.randrange(1, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": rng.sample([*names, "z"], rng.randrange(len(names) + 1)),
            "additionalProperties": rng.choice([False, True, {"type": "integer", "minimum": 0, "maximum": 9}]),
        }
    if kind == "array":
        least = rng.randrange(3)
        schema = {"type": "array", "items": random_schema(rng, depth - 1), "minItems": least,
                  "maxItems": least + rng.randrange(3)}  # fmt: skip
        if rng.random() < 0.3:
            schema["prefixItems"] = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
        return schema
    return {kind: [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]}
