"""JSON schemas: what is checked before llguidance sees one, and how the JSON is spaced."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from serving.decoding.grammar.explain import subschemas
from serving.decoding.grammar.finite import endless
from serving.decoding.grammar.lark import check_escapes
from serving.errors import InvalidRequest

MAX_SCHEMA_BYTES = 256 * 1024
MAX_DEPTH = 100  # llguidance reads 128 levels, of which the grammar around the schema takes some
MAX_MULTIPLE_OF = 100_000  # in units of its last decimal: an automaton has this many states
# llguidance reads bounds as float64 and counts with int64, whose least number it recurses on without end: this is the
# largest that is both.
MAX_BOUND = 2**63 - 1024
INWARD = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
EXACT = ("const", "enum")
# Free whitespace would be a trap: small models, once in it, go on with spaces and line ends until they run out of
# tokens. So JSON is spaced as Python's json.dumps does, which models write most, and which leaves no choice.
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
FREE = {"whitespace_flexible": True}
# Text is written as it is; only what JSON cannot hold otherwise is escaped. With \\u a key could be spelled in ways
# that the schema's rules for it do not see.
ESCAPES = 'nrbtf\\"'
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class JsonForm(NamedTuple):
    """What a request says of its JSON beside the schema. closed: objects have no properties but those it names, where
    it names some and does not speak of others."""

    spacing: dict[str, Any]
    closed: bool = False


def schema_part(schema: Any, form: JsonForm, param: str) -> dict[str, Any]:
    """The llguidance grammar of JSON that a schema (or its text) describes. Raises InvalidRequest."""
    if isinstance(schema, str):
        schema = _parse(schema, param)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{param} is a {type(schema).__name__}, must be a JSON schema: an object", param)
    _check_depth(schema, param)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param) from error
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"{param} has {size} bytes of JSON, at most {MAX_SCHEMA_BYTES} are allowed", param)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if "x-guidance" in schema:
        raise InvalidRequest(f"{param} has x-guidance, which is the server's to set", param)
    _check_keywords(schema, param)
    schema = _mapped(schema, _modern)
    if form.closed:
        schema = _mapped(schema, _closed)
    check_bounds(schema, param)
    check_multiples(schema, param, param)
    if (place := endless(schema)) is not None:
        raise InvalidRequest(f"{param} at {place or 'its root'}: every value would have to contain another "
                             "one, without end", param)
    options = form.spacing if "\\u00" in text else {**form.spacing, "json_allowed_escapes": ESCAPES}
    return {"json_schema": {**schema, "x-guidance": options}}


def _parse(text: str, param: str) -> Any:
    if len(text) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"{param} has {len(text)} characters, at most {MAX_SCHEMA_BYTES} are allowed", param)
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidRequest(f"{param} is nested more than {MAX_DEPTH} levels deep", param) from None
    except ValueError as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param) from error


def _check_depth(schema: Any, param: str) -> None:
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{param} is nested more than {MAX_DEPTH} levels deep", param)
        inner = [list(one.values() if isinstance(one, dict) else one) for one in level if isinstance(one, dict | list)]
        level = [one for ones in inner for one in ones]


def _check_keywords(schema: dict[str, Any], param: str, place: str = "") -> None:
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and _units(multiple) > MAX_MULTIPLE_OF:
        raise InvalidRequest(f"{param} at {place or 'its root'}: multipleOf is {multiple}, must be at most "
                             f"{MAX_MULTIPLE_OF} in units of its last decimal", param)
    if isinstance(pattern := schema.get("pattern"), str):
        check_escapes(pattern, f"{param} at {place or 'its root'}", param)
    if schema.get("type") == []:
        raise InvalidRequest(f"{param} at {place or 'its root'}: type is [], must have at least one type", param)
    for name, inner in subschemas(schema):
        _check_keywords(inner, param, f"{place}/{name}")


def _units(multiple: float) -> float:
    """In its last decimal; beyond the limit something larger than it."""
    units = abs(multiple)
    while units != int(units) and units < MAX_MULTIPLE_OF:
        units = round(units * 10, 9)
    return units


def check_multiples(value: Any, param: str, where: str) -> None:
    """That all of them together are compiled in seconds. Raises InvalidRequest."""
    total = sum(map(_units, set(_multiples(value))))
    if total > MAX_MULTIPLE_OF:
        raise InvalidRequest(f"{where}: the numbers that multipleOf has add up to {total:g} units of their last "
                             f"decimals, at most {MAX_MULTIPLE_OF} are allowed", param)


def _multiples(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        multiple = value.get("multipleOf")
        if isinstance(multiple, int | float):
            yield multiple
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from _multiples(one)


def check_bounds(value: Any, param: str, where: str = "") -> None:
    """Wherever they stand, for a `$ref` may point anywhere. Those of a schema are within the range by now, where that
    says the same. where: of the parameter, for the message. Raises InvalidRequest."""
    where = where or param
    if isinstance(value, dict):
        for key in INWARD:
            bound = value.get(key)
            if isinstance(bound, int | float) and abs(bound) > MAX_BOUND:
                raise InvalidRequest(f"{where}: {key} is {bound}, must be from {-MAX_BOUND} to {MAX_BOUND}", param)
        for key in EXACT:
            _check_exact(value.get(key), f"{where}: {key}", param)
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        check_bounds(one, param, where)


def _check_exact(value: Any, where: str, param: str) -> None:
    """What is to be written as it stands. Whole numbers beyond 64 bits would come out rounded."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inner:
        _check_exact(one, where, param)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidRequest(f"{where} has {value}, whole numbers must be within 64 bits", param)


def _readable(bound: Any, inward: int) -> Any:
    """The nearest bound, no wider, that llguidance reads as it is written. One that is too far in stays, to be
    refused."""
    if not isinstance(bound, int | float) or isinstance(bound, bool) or bound * inward > MAX_BOUND:
        return bound
    if bound * inward < -MAX_BOUND:
        return -MAX_BOUND * inward
    near = float(bound)
    if near != bound:
        near = int(near if (near > bound) == (inward > 0) else math.nextafter(near, inward * math.inf))
    return near if isinstance(near, int) else bound


def _shut(schema: dict[str, Any], exclusive: str, inclusive: str, others: tuple[str, str]) -> None:
    """llguidance lets a whole exclusive bound itself pass where the other bound is less than 1 away: then the bound
    becomes the next number that is as good as another one."""
    numbers = {key: value for key, value in schema.items() if key in INWARD and isinstance(value, int | float)}
    bound, inward = numbers.get(exclusive), INWARD[exclusive]
    if bound is None or bound != int(bound) or not any(0 < (numbers[key] - bound) * inward < 1
                                                       for key in others if key in numbers):  # fmt: skip
        return
    del schema[exclusive]
    near = bound + inward * max(1e-9, math.ulp(bound))
    schema[inclusive] = near if inclusive not in numbers else sorted((near, numbers[inclusive]))[inward > 0]


def _modern(schema: dict[str, Any]) -> dict[str, Any]:
    """Draft 4's exclusive bounds, which were flags, a keyword that says nothing, and bounds beyond what is read."""
    for bound, flag in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(flag), bool) and schema.pop(flag) and bound in schema:
            schema[flag] = schema.pop(bound)
    for key, inward in INWARD.items():
        if key in schema:
            schema[key] = _readable(schema[key], inward)
    _shut(schema, "exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"))
    _shut(schema, "exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"))
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    return schema


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    if "properties" in schema or "patternProperties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema


def _mapped(schema: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """A copy with each schema in it, and last itself, changed."""
    return change({key: _mapped_value(key, value, change) for key, value in schema.items()})


def _mapped_value(key: str, value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if key in ("const", "enum", "default", "examples"):
        return value
    if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
        return {name: _mapped(one, change) if isinstance(one, dict) else one for name, one in value.items()}
    if isinstance(value, dict):
        return _mapped(value, change)
    if isinstance(value, list):
        return [_mapped(one, change) if isinstance(one, dict) else one for one in value]
    return value
