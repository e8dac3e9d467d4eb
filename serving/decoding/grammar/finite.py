"""Whether a schema that refers to itself describes anything that ends.

`{"properties": {"next": {"$ref": "#"}}, "required": ["next"]}` does not: the output would go on until the tokens run
out. A schema is fine as soon as one way through it comes to an end, which is a least fixed point over its references.
"""

from collections.abc import Callable
from typing import Any

MOST_LOOKS = 100_000  # at schemas and parts of them; beyond it a schema passes unproven

Ends = Callable[[Any], bool]  # whether what a $ref, if it is one, refers to ends, as far as known


class _Unproven(Exception):
    pass


def endless(root: dict[str, Any]) -> str | None:
    """The place of the schema that has no end, None if all is well."""
    targets = _targets(root)
    known, order, looks = dict.fromkeys(targets, False), list(targets), 0

    def ends(ref: Any) -> bool:
        nonlocal looks
        looks += 1
        if looks > MOST_LOOKS:
            raise _Unproven
        return not isinstance(ref, str) or known.get(ref, True)

    changed = bool(known)
    try:
        while changed:
            changed = False
            order.reverse()  # chains run one way or the other
            for ref in order:
                if not known[ref] and _ends(targets[ref], ends):
                    known[ref] = changed = True
        if _ends(root, ends):
            return None
    except _Unproven:
        return None
    return next((ref.removeprefix("#") for ref, does in known.items() if not does), "")


def _targets(root: dict[str, Any]) -> dict[str, Any]:
    """Schemas that are referred to by JSON pointers. Others (anchors, ids) are left to llguidance."""
    found: dict[str, Any] = {}
    todo: list[Any] = [root]
    while todo:
        one = todo.pop()
        if isinstance(one, list):
            todo += one
        elif isinstance(one, dict):
            todo += one.values()
            ref = one.get("$ref")
            if isinstance(ref, str) and ref not in found and (schema := _follow(root, ref)) is not None:
                found[ref] = schema
    return found


def _follow(root: Any, ref: str) -> Any:
    if ref != "#" and not ref.startswith("#/"):
        return None
    for name in ref.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdigit() and int(name) < len(root):
            root = root[int(name)]
        elif isinstance(root, dict) and name in root:
            root = root[name]
        else:
            return None
    return root


def _ends(schema: Any, known: Ends) -> bool:
    if not known(schema.get("$ref") if isinstance(schema, dict) else None):
        return False
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list) and options and not any(_ends(one, known) for one in options):
            return False
    if isinstance(schema.get("allOf"), list) and not all(_ends(one, known) for one in schema["allOf"]):
        return False
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(kind in ("object", "array") for kind in kinds):
        return True  # a number, say, always ends
    return any(_object_ends(schema, known) if kind == "object" else _array_ends(schema, known) for kind in kinds)


def _object_ends(schema: dict[str, Any], known: Ends) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, dict) else {}
    others = schema.get("additionalProperties", True)
    names = required if isinstance(required, list) else []
    return all(_ends(properties.get(name, others) if isinstance(name, str) else True, known) for name in names)


def _array_ends(schema: dict[str, Any], known: Ends) -> bool:
    least, items = schema.get("minItems", 0), schema.get("items", True)
    first = schema.get("prefixItems", [])
    if isinstance(items, list):  # as until draft 2019
        first, items = items, schema.get("additionalItems", True)
    if not isinstance(least, int) or not isinstance(first, list):
        return True
    return all(_ends(one, known) for one in first[:least]) and (least <= len(first) or _ends(items, known))
