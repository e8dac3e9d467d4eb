"""JSON schemas of every kind that requests bring, by what is hard about them."""

import json
from typing import Any

import jsonschema

FORMATS = jsonschema.FormatChecker(["ipv4", "email", "uuid"])
STR, INT, NUM, BOOL = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}


def obj(*required: str, more: Any = False, **properties: Any) -> dict[str, Any]:
    """All properties are required unless some are named."""
    return {"type": "object", "properties": properties, "required": list(required or properties),
            "additionalProperties": more}


TREE = {"$defs": {"node": {
    "type": "object",
    "properties": {"value": {"enum": [1, 2]}, "left": {"$ref": "#/$defs/node"}, "right": {"$ref": "#/$defs/node"}},
    "required": ["value"], "additionalProperties": False}}, "$ref": "#/$defs/node"}  # fmt: skip

SCHEMAS: dict[str, Any] = {
    "flat": obj(name=STR, age=INT, score=NUM, alive=BOOL),
    "nothing required": {"type": "object", "properties": {"a": INT, "b": BOOL}, "additionalProperties": False},
    "some required": obj("b", "d", a=INT, b=BOOL, c={"type": "null"}, d={"const": "x"}),
    "required in another order": {"type": "object", "properties": {"b": BOOL, "a": INT}, "required": ["a", "b"],
                                  "additionalProperties": False},
    "required without a schema": {"type": "object", "properties": {"a": BOOL}, "required": ["a", "z"]},
    "nested": obj(person=obj(name=obj(first=STR, last=STR),
                             homes={"type": "array", "items": obj(city=STR), "maxItems": 3})),
    "deeply nested": obj(a=obj(b=obj(c=obj(d=obj(e=obj(f=obj(g=obj(h={
        "type": "array", "maxItems": 2, "items": {
            "type": "array", "maxItems": 2, "items": {"type": "array", "maxItems": 2, "items": BOOL}}})))))))),
    "free object": {"type": "object"},
    "map": {"type": "object", "additionalProperties": INT},
    "map with a rest": obj("id", id=INT, more=STR),
    "pattern properties": {"type": "object", "patternProperties": {"^x_[a-z]{1,5}$": INT},
                           "additionalProperties": False},
    "at most one property": {"type": "object", "additionalProperties": BOOL, "maxProperties": 1},
    "one of several properties": {"type": "object", "properties": {"a": INT, "b": BOOL}, "minProperties": 1,
                                  "additionalProperties": False},
    "recursive tree": TREE,
    "recursive list": {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
                       "required": ["next"], "additionalProperties": False},
    "mutually recursive": {
        "$defs": {"even": {"type": "array", "items": {"$ref": "#/$defs/odd"}, "maxItems": 2},
                  "odd": obj(items={"$ref": "#/$defs/even"})}, "$ref": "#/$defs/even"},
    "recursive expression": {"$defs": {"e": {"anyOf": [
        {"type": "integer", "minimum": 0, "maximum": 9},
        obj(op={"enum": ["+", "*"]}, args={"type": "array", "items": {"$ref": "#/$defs/e"}, "minItems": 2,
                                           "maxItems": 2})]}}, "$ref": "#/$defs/e"},
    "definitions of draft 7": {"$schema": "http://json-schema.org/draft-07/schema#",
                               "definitions": {"p/q": obj(a=BOOL)}, "type": "array", "maxItems": 2,
                               "items": {"$ref": "#/definitions/p~1q"}},
    "any of": {"anyOf": [obj(a=STR), obj(b=INT), {"type": "null"}]},
    "one of, told apart by a key": {"oneOf": [obj(kind={"const": "circle"}, radius=NUM),
                                              obj(kind={"const": "square"}, side=NUM)]},
    "one of types": {"oneOf": [STR, INT, {"type": "array", "items": BOOL, "maxItems": 2}]},
    "all of": {"allOf": [{"type": "object", "properties": {"a": INT}, "required": ["a"]},
                         {"type": "object", "properties": {"b": BOOL}, "required": ["b"]}]},
    "all of with bounds": {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 40}]},
    "reference with siblings": {"$defs": {"s": {"type": "string", "maxLength": 9}}, "$ref": "#/$defs/s",
                                "minLength": 3},
    "type list": {"type": ["string", "null", "integer"]},
    "anything": {},
    "enum": {"enum": ["red", "green", "blue", 1, None, True, [1, "a"], {"k": "v"}]},
    "enum with unicode": {"enum": ["naïve", "日本語", "😀", "e\u0301", "\u00e9", 'quo"te', "back\\slash", "tab\t"]},
    "const with a control character": {"const": "a\u0001b\u001f"},
    "enum with common prefixes": {"enum": ["order", "orderId", "orderName", "orderNameLong"]},
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{2,5}-[0-9]{3}$"},
    "pattern anywhere": {"type": "string", "pattern": "[0-9]{2}", "maxLength": 8},
    "pattern with alternatives": {"type": "string", "pattern": "^(foo|ba[rz]+|q(u|x)?)$"},
    "pattern with unicode": {"type": "string", "pattern": "^[α-ω]{1,4}€$"},
    "pattern with escapes": {"type": "string", "pattern": '^\\\\"[\\t /]{1,3}$'},
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "one code point": {"type": "string", "minLength": 1, "maxLength": 1},
    "empty string": {"type": "string", "maxLength": 0},
    "integer bounds": {"type": "integer", "minimum": -7, "maximum": 130},
    "integer bounds of 64 bits": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "integer bounds beyond float64": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 5},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12},
    "number bounds": {"type": "number", "minimum": -0.5, "maximum": 2.25},
    "exclusive number bounds": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "bounds of draft 4": {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 5,
                          "exclusiveMinimum": True, "maximum": 9},
    "multiple of": {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 100},
    "multiple of a half": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 20},
    "array bounds": {"type": "array", "items": INT, "minItems": 2, "maxItems": 4},
    "empty array": {"type": "array", "maxItems": 0},
    "tuple": {"type": "array", "prefixItems": [STR, INT], "items": False, "minItems": 2},
    "tuple and rest": {"type": "array", "prefixItems": [BOOL], "items": INT, "minItems": 1, "maxItems": 4},
    "tuple of draft 7": {"type": "array", "items": [BOOL, INT], "additionalItems": False, "minItems": 1},
    "array of objects": {"type": "array", "items": obj(id=INT, tags={"type": "array", "items": {"enum": ["a", "b"]}}),
                         "maxItems": 2},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "format": "email"},
    "hostname": {"type": "string", "format": "hostname"},
    "keys to escape": obj(**{'a"b': INT, "c\\d": BOOL, "é": STR, "": BOOL, "new\nline": BOOL}),
    "annotations": {"title": "T", "description": "d", "default": 1, "examples": [2], "$comment": "c",
                    "deprecated": True, "type": "integer", "minimum": 0, "maximum": 9, "uniqueItems": False},
    "extraction": obj(name=STR, email={"type": "string", "format": "email"}, age={"type": "integer", "minimum": 0,
                      "maximum": 150}, skills={"type": "array", "items": {"enum": ["python", "rust", "go"]},
                                               "maxItems": 3},
                      address=obj(street=STR, city=STR, zip={"type": "string", "pattern": "^[0-9]{5}$"})),
}  # fmt: skip


def check(schema: Any, text: str) -> Any:
    """The value, after it was parsed strictly and validated."""

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    value = json.loads(text, parse_constant=no_constant)
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    if isinstance(schema, dict) and isinstance(schema.get("items"), list):
        kind = jsonschema.Draft7Validator
    kind(schema, format_checker=FORMATS).validate(value)
    return value
