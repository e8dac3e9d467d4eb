"""What cannot be served is refused in one line that says what and where."""

import json
import time

import pytest

from serving.decoding.grammar import finite
from serving.decoding.grammar.build import MAX_CHOICES
from serving.decoding.grammar.finite import endless
from serving.decoding.grammar.json_schema import MAX_SCHEMA_BYTES
from serving.errors import InvalidRequest
from tests.decoding.grammar.schema_cases import INT, STR, obj
from tests.decoding.grammar.toy import Grammars, toy_tokenizer

DEEP = json.loads("[" * 120 + "]" * 120)
MANY = {"allOf": [{"anyOf": [obj(**{f"p{i}_{j}": STR}, more=True) for j in range(6)]} for i in range(8)]}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(toy_tokenizer())


def refusal(grammars: Grammars, **outputs: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        grammars.matcher(**outputs)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert caught.value.param is not None and caught.value.param.startswith("structured_outputs")
    return caught.value


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"not": STR}, "at its root: not is not supported"),
        (obj(a=obj(**{"b/c": {"type": "array", "uniqueItems": True}})),
         "at /properties/a/properties/b~1c: uniqueItems is not supported"),
        (obj(a={"anyOf": [STR, {"if": STR, "then": STR}]}), "at /properties/a/anyOf/1: if, then are not supported"),
        (obj(a={"type": "array", "contains": INT}), "at /properties/a: contains is not supported"),
        (obj(a={"$ref": "#/$defs/nope"}), "at /properties/a: Pointer '/$defs/nope' does not exist"),
        ({"$ref": "https://example.com/s"}, "$ref may only point into the schema itself"),
        ({"$defs": {"x": {"type": "string", "pattern": "a("}}, "$ref": "#/$defs/x"},
         "at /$defs/x: the regular expression 'a(' is wrong at character 1: unclosed group"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "a\\b"}, "look-around, \\b and anchors"),
        ({"type": "string", "format": "regex"}, "format 'regex' is not supported"),
        (obj(a={"type": "string", "pattern": "a\\"}), "at /properties/a: the regular expression ends in half an"),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": []}, "at its root: type is [], must have at least one type"),
        ({"type": "string", "minLength": "3"}, "minLength"),
        ({"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]}, "oneOf"),
        (obj(a={"type": "integer", "multipleOf": 1000003}), "at /properties/a: multipleOf is 1000003, must be at most"),
        ({"type": "integer", "minimum": 10**40}, "minimum is 1"),
        ({"$ref": "#/const", "const": {"type": "integer", "minimum": -(2**63), "maximum": 0}}, "minimum is -9"),
        ('{"const": NaN}', "is not JSON: Out of range float"),
        (obj(**{f"p{i}": {"type": "integer", "multipleOf": 99991 - i} for i in range(2)}), "add up to 199981 units"),
        ({"enum": [{"a": 2**64}]}, "enum has 18446744073709551616, whole numbers must be within 64 bits"),
        ({"const": 1e999}, "is not JSON: Out of range float"),
        ({"type": "object", "properties": {"a": STR, "b": STR}, "minProperties": 2}, "min/maxProperties"),
        (MANY, "too large"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"enum": [DEEP]}, "nested more than 100 levels"),
        ("[" * 100_000, "nested more than 100 levels"),
        ({"enum": ["x" * MAX_SCHEMA_BYTES]}, "bytes of JSON"),
        ('{"type": "string"', "is not JSON"),
        ("3", "is a int, must be a JSON schema"),
    ],
)
def test_bad_and_unsupported_schemas(grammars: Grammars, schema: object, message: str) -> None:
    assert message in str(refusal(grammars, json=schema))


@pytest.mark.parametrize(
    "schema, message",
    [
        (False, "leaves no choice"),
        ({"enum": []}, "leaves no choice"),
        (obj(a=obj(b={"type": "integer", "minimum": 3, "maximum": 1})),
         "at /properties/a/properties/b: minimum (3) is greater than maximum"),
        ({"type": "integer", "minimum": 8, "maximum": 13, "multipleOf": 7, "enum": [9]}, "at its root"),
        ({"allOf": [STR, INT]}, "incompatible types"),
        ({"type": "string", "format": "date", "maxLength": 3}, "no string has this pattern, format and length"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "required property 'a' is unsatisfiable"),
        ({"$ref": "#"}, "without end"),
        (obj(next={"$ref": "#"}), "every value would have to contain another one, without end"),
        ({"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 1},
                    "b": obj(a={"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]})}, "$ref": "#/$defs/a"},
         "without end"),
    ],
)  # fmt: skip
def test_schemas_that_nothing_satisfies(grammars: Grammars, schema: object, message: str) -> None:
    assert message in str(refusal(grammars, json=schema))


def test_a_schema_that_comes_to_an_end_somewhere_is_fine(grammars: Grammars) -> None:
    tree = {"$defs": {"t": {"anyOf": [{"$ref": "#/$defs/u"}, INT]}, "u": obj(l={"$ref": "#/$defs/t"},
            r={"type": "array", "items": {"$ref": "#/$defs/u"}})}, "$ref": "#/$defs/u"}  # fmt: skip
    assert grammars.accepts(grammars.matcher(json=tree), '{"l": {"l": 1, "r": []}, "r": []}')


@pytest.mark.parametrize("step", [1, -1, 7])
def test_many_references_are_followed_quickly(step: int) -> None:
    """In whatever order they stand; what takes too long to prove passes."""
    links = {f"s{i}": obj(x={"$ref": f"#/$defs/s{i + 1}"}) for i in range(1500)} | {"s1500": {"type": "null"}}
    names = sorted(links, key=lambda name: int(name[1:]) * step % 1501)
    schema = {"$defs": {name: links[name] for name in names}, "$ref": "#/$defs/s0"}
    began = time.process_time()
    assert endless(schema) is None and time.process_time() - began < 2
    del schema["$defs"]["s1500"]
    schema["$defs"]["s1499"] = {"$ref": "#/$defs/s0"}
    assert endless(schema) is not None or step == 7


def test_what_stands_before_a_reference_counts_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = 0, finite._ends

    def counted(schema: object, known: finite.Ends) -> bool:
        nonlocal looks
        looks += 1
        return look(schema, known)

    monkeypatch.setattr(finite, "_ends", counted)
    links = {f"{i}": {"allOf": [{"anyOf": [True] * 1000}, {"allOf": [{}] * 1000}, {"$ref": f"#/$defs/{i + 1}"}]}
             for i in range(300)}  # fmt: skip
    names = sorted(links, key=lambda name: int(name) * 7 % 300)
    assert endless({"$defs": {name: links[name] for name in names}, "$ref": "#/$defs/0"}) is None
    assert looks <= finite.MOST_LOOKS + 1


@pytest.mark.parametrize(
    "outputs, message",
    [
        ({}, "has no constraint, must have exactly one of json, regex"),
        ({"regex": "a", "choice": ("b",)}, "has regex and choice, must have exactly one"),
        ({"json_object": False}, "json_object is false"),
        ({"regex": "a("}, "the regular expression 'a(' is wrong at character 1: unclosed group"),
        ({"regex": "(a)\\1"}, "backreferences are not supported"),
        ({"regex": "a\\\\\\"}, "regex: the regular expression ends in half an escape sequence"),
        ({"regex": "[^\\s\\S]"}, "nothing satisfies it"),
        ({"regex": "a" * 20_000}, "at most 16384 are allowed"),
        ({"choice": ()}, "must be a list of strings, at least one"),
        ({"choice": ("a",) * (MAX_CHOICES + 1)}, "4097 entries"),
        ({"grammar": "start: foo"}, 'line 1 column 8: unknown name: "foo"'),
        ({"grammar": "start: ("}, "line 1 column 9"),
        ({"grammar": "foo: \"a\""}, "no start rule"),
        ({"grammar": "start: b\nb: b"}, "nothing satisfies it"),
        ({"grammar": " "}, "is empty"),
        ({"grammar": 'start: %json {"minimum": -9223372036854775808, "maximum": 0}'}, "%json: minimum is -9"),
        ({"grammar": 'start: %json {"type": "integer", "multipleOf": 9999991}'}, "%json: the numbers that multipleOf"),
        ({"grammar": "start: %json " + '{"a":' * 900 + "1" + "}" * 900}, "deep"),
        ({"grammar": "start: %json {"}, "what follows %json is not JSON"),
        ({"regex": "\ud800"}, "half of a surrogate pair"),
        ({"choice": ("\ud800",)}, "half of a surrogate pair"),
        ({"grammar": "root ::= foo"}, "is not GBNF: Rule 'foo' not found"),
        ({"grammar": 'root ::= ("a"\nfoo ::= "b"'}, "is not GBNF: Expected ')' at line 2"),
        ({"grammar": "root ::= " + "(" * 5000}, "is nested too deeply"),
        ({"grammar": "root ::= " + '"a" ' * 5000}, "20009 characters of GBNF, at most 16384 are allowed"),
        ({"grammar": "start: " + "(" * 5000}, "too deeply nested"),
        ({"json_object": True, "whitespace_pattern": "("}, "unclosed group"),
        ({"structural_tag": "{"}, "is not JSON"),
        ({"structural_tag": {"type": "x"}}, "must be an object whose type is 'structural_tag'"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "magic"}}}, "format.type is 'magic'"),
        ({"structural_tag": {"type": "structural_tag", "structures": [{"begin": "a", "schema": {}, "end": "b"}],
                             "triggers": ["x"]}}, "tags[0].begin is 'a', must begin with one of the triggers, 'x'"),
        ({"structural_tag": {"type": "structural_tag", "structures": [], "triggers": ["x"]}}, "tags is empty"),
        ({"structural_tag": {"type": "structural_tag", "structures": [{"begin": "x", "schema": {"not": {}}, "end": ""}],
                             "triggers": ["x"]}}, "the JSON schema at its root: not is not supported"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "sequence", "elements": [
            {"type": "any_text"}, {"type": "any_text"}]}}}, "elements[0] is any_text, which has no end"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "a", "x": 1}}},
         "format has 'x', which is not one of type, value"),
    ],
)  # fmt: skip
def test_other_constraints(grammars: Grammars, outputs: dict, message: str) -> None:
    assert message in str(refusal(grammars, **outputs))


def test_the_field_is_named_as_the_client_knows_it(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match="response_format is not JSON") as caught:
        grammars.matcher(json="{", source="response_format")
    assert caught.value.param == "response_format"
