"""Masks against the plain meaning of a mask: a token is allowed if some output of the grammar goes on with it.

The languages here are finite and written down without llguidance, so that every token can be tried against every text.
"""

import itertools
import json
import random
from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest

from serving.decoding.parts import Frame
from tests.decoding.grammar.schema_cases import SCHEMAS, obj
from tests.decoding.grammar.toy import Grammars, toy_tokenizer

BOOLEANS = (True, False)


def dumps(values: Iterable[object]) -> list[str]:
    return [json.dumps(value, ensure_ascii=False) for value in values]


def objects(**choices: Iterable[object]) -> list[dict]:
    """Every object with these keys, in this order; a choice of ... leaves the key out."""
    return [{key: value for key, value in zip(choices, values, strict=True) if value is not ...}
            for values in itertools.product(*choices.values())]  # fmt: skip


LANGUAGES: dict[str, tuple[dict, list[str]]] = {
    "choice": ({"choice": ("ab", "abc", "abcx", "xy", "é", "😀!", 'a"b')},
               ["ab", "abc", "abcx", "xy", "é", "😀!", 'a"b']),
    "regex": ({"regex": r"(ab|x)[12]{1,2}y?"}, [
        f"{a}{''.join(b)}{c}" for a in ("ab", "x") for n in (1, 2) for b in itertools.product("12", repeat=n)
        for c in ("", "y")]),
    "lark": ({"grammar": 'start: "[" item ("," item){0,2} "]"\nitem: "ab" | /1[0-2]/'}, [
        f"[{','.join(items)}]" for n in (1, 2, 3) for items in itertools.product(("ab", "10", "11", "12"), repeat=n)]),
    "gbnf": ({"grammar": 'root ::= pair | "x" pair # a comment\npair ::= [ab] [01]{2}'}, [
        f"{x}{a}{b}{c}" for x in ("", "x") for a in "ab" for b in "01" for c in "01"]),
    "enum": ({"json": {"enum": ["abc", "abcd", "é", "😀", 1, 12, True, None, [1, 10], {"x": "y"}, "a\nb"]}},
             dumps(["abc", "abcd", "é", "😀", 1, 12, True, None, [1, 10], {"x": "y"}, "a\nb"])),
    "object": ({"json": obj("a", a={"enum": ["x", "xy"]}, b={"type": "boolean"}, c={"type": "null"})},
               dumps(objects(a=("x", "xy"), b=(..., *BOOLEANS), c=(..., None)))),
    "compact": ({"json": obj("a", a={"enum": ["x", "xy"]}, b={"type": "boolean"}), "disable_any_whitespace": True},
                [text.replace(" ", "") for text in dumps(objects(a=("x", "xy"), b=(..., *BOOLEANS)))]),
    "spaces by pattern": ({"json": obj(a={"type": "null"}), "whitespace_pattern": "[ \n]{1,2}"}, [
        f'{{{a}"a"{b}:{c}null{d}}}' for a, b, c, d in itertools.product(("", " ", "\n", "  ", " \n", "\n ", "\n\n"),
                                                                        repeat=4)]),
    "array": ({"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3, "minItems": 1}},
              dumps(list(values) for n in (1, 2, 3) for values in itertools.product(BOOLEANS, repeat=n))),
    "integers": ({"json": {"type": "integer", "minimum": -11, "maximum": 120}}, dumps(range(-11, 121))),
    "multiples": ({"json": {"type": "integer", "multipleOf": 6, "minimum": 5, "maximum": 100}},
                  dumps(range(6, 101, 6))),
    "strings": ({"json": {"type": "string", "pattern": "^[ab]*$", "minLength": 1, "maxLength": 3}},
                dumps("".join(s) for n in (1, 2, 3) for s in itertools.product("ab", repeat=n))),
    "any of": ({"json": {"anyOf": [obj(a={"const": 1}), obj(a={"const": 12}, b={"const": 0}), {"const": "x"}]}},
               dumps([{"a": 1}, {"a": 12, "b": 0}, "x"])),
    "all of": ({"json": {"allOf": [{"properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
                                   obj("b", a={"enum": [2, 3]}, b={"type": "boolean"})]}},
               dumps(objects(a=(2,), b=BOOLEANS))),
    "structural tag": ({"structural_tag": {"type": "structural_tag", "format": {"type": "tags_with_separator", "tags": [
        {"type": "tag", "begin": f"<{name}>", "content": {"type": "json_schema", "json_schema": {"type": "boolean"}},
         "end": "</>"} for name in ("ab", "abc")], "separator": ", ", "at_least_one": True, "stop_after_first": True}}},
        [f"<{name}>{value}</>" for name in ("ab", "abc") for value in ("true", "false")]),
}  # fmt: skip


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(toy_tokenizer())


def spellings(grammars: Grammars, text: str, rng: random.Random) -> list[int]:
    """The text in tokens as no tokenizer would cut it."""
    spelled, ids = text.encode(), []
    by_bytes = {grammars.tokenizer.token_bytes(i): i for i in range(grammars.tokenizer.vocab_size)}
    while spelled:
        size = rng.choice([n for n in range(1, 6) if spelled[:n] in by_bytes])
        ids.append(by_bytes[spelled[:size]])
        spelled = spelled[size:]
    return ids


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_token_is_allowed_if_some_output_goes_on_with_it(grammars: Grammars, name: str) -> None:
    outputs, texts = LANGUAGES[name]
    language = {text.encode() for text in texts}
    beginnings = {text[:end] for text in language for end in range(len(text) + 1)}
    tokens = {i: grammars.tokenizer.token_bytes(i) for i in range(grammars.tokenizer.vocab_size - 2)}
    rng = random.Random(name)
    for text in rng.sample(texts, min(len(texts), 12)):
        matcher, so_far = grammars.matcher(**outputs), b""
        for token in [*spellings(grammars, text, rng), None]:
            expected = {i for i, spelled in tokens.items() if so_far + spelled in beginnings}
            if so_far in language:
                expected.add(grammars.eos)
            forced = matcher.forced()
            if forced:  # one way to go on, in the tokenizer's spelling
                ahead = so_far + b"".join(tokens[i] for i in forced if i != grammars.eos)
                assert all(text.startswith(ahead) for text in language if text.startswith(so_far)), (so_far, ahead)
                assert forced[0] in expected and set(grammars.allowed(matcher)) == {forced[0]}, so_far
            else:
                assert set(grammars.allowed(matcher)) == expected, so_far
            assert (forced == [grammars.eos]) == (expected == {grammars.eos}), so_far
            if token is not None:
                matcher.accept([token])
                so_far += tokens[token]


@pytest.mark.parametrize("name", ["extraction", "recursive tree", "enum with unicode", "free object"])
def test_masks_of_a_tree_of_drafts_equal_those_of_each_path(grammars: Grammars, name: str) -> None:
    rng = random.Random(name)
    for trial in range(15):
        before = [grammars.matcher(json=SCHEMAS[name]) for _ in range(40)]
        path: list[int] = []
        for _ in range(trial):
            allowed = grammars.allowed(before[0])
            path.append(rng.choice([i for i in allowed if i != grammars.eos] or allowed))
            for matcher in before:
                matcher.accept(path[-1:])
        first = grammars.allowed(before[0])
        tokens, parents, rows = [], [], [first]
        for i in range(30):  # in no order but parents first, valid and not
            parent = rng.randrange(-1, i)
            any_id, fitting = rng.randrange(grammars.vocab_size), rows[parent + 1]
            tokens.append(rng.choice(fitting) if fitting and rng.random() < 0.7 else any_id)
            parents.append(parent)
            if tokens[i] in rows[parent + 1] and tokens[i] != grammars.eos:
                alone = before[i + 1]
                alone.accept([tokens[j] for j in ancestors(parents, i)])
                rows.append(grammars.allowed(alone))
            else:
                rows.append([])
        out = np.zeros((31, -(-grammars.vocab_size // 32)), np.int32)
        valid = before[0].masks(np.asarray(tokens, np.int32), np.asarray(parents, np.int32), out)
        bits = np.unpackbits(out.view(np.uint8), axis=1, bitorder="little")
        for i, token in enumerate(tokens):
            ok = token in rows[parents[i] + 1] and (parents[i] < 0 or bool(valid[parents[i]]))
            assert bool(valid[i]) == ok
            if ok and token != grammars.eos:
                assert np.flatnonzero(bits[i + 1]).tolist() == rows[i + 1]
        assert grammars.allowed(before[0]) == first, "the state stays"


def ancestors(parents: list[int], i: int) -> list[int]:
    path = [i]
    while (i := parents[i]) >= 0:
        path.append(i)
    return path[::-1]


@pytest.mark.parametrize("lark", ['start[stop="x"]: /[abc]*/', "start[max_tokens=2]: /[abc]+/"])
def test_drafts_where_the_parser_cannot_go_back(grammars: Grammars, lark: str) -> None:
    matcher, drafts = grammars.matcher(grammar=lark), grammars.encode("acbxb")
    rows = grammars.rows(matcher, drafts, range(-1, len(drafts) - 1))
    step = grammars.matcher(grammar=lark)
    for row, token in zip(rows, drafts, strict=False):
        assert row == grammars.allowed(step)
        if token not in row:
            break
        step.accept([token])
    matcher.accept(drafts[:1])
    assert not matcher.error and not step.error and grammars.allowed(matcher) == rows[1]


def test_a_string_of_one_code_point_may_be_outside_the_basic_plane(grammars: Grammars) -> None:
    schema = {"type": "string", "maxLength": 1}
    assert grammars.accepts(grammars.matcher(json=schema), '"\U0001f600"')
    assert grammars.accepts(grammars.matcher(json=schema), '"é"')
    assert not grammars.accepts(grammars.matcher(json=schema), '"ab"')
    assert not grammars.accepts(grammars.matcher(json=schema), '"\\ud83d\\ude00"'), "escapes stay out: one spelling"


@pytest.mark.parametrize("low, high, inside", [(0, 0.5, "0.25"), (3, 3.5, "3.1"), (-0.5, 0, "-0.25"), (0, 2, "1.5")])
def test_exclusive_bounds_are_left_out(grammars: Grammars, low: float, high: float, inside: str) -> None:
    matcher = partial(grammars.matcher, json={"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high})
    assert grammars.accepts(matcher(), inside)
    assert not any(grammars.accepts(matcher(), text) for text in (str(low), str(high), "-0"))


def test_a_key_has_one_spelling(grammars: Grammars) -> None:
    """Otherwise `{"\\u0061": 1}` would be a way around the schema of "a"."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert grammars.accepts(grammars.matcher(json=schema), '{"a": "x", "b": 1}')
    assert not grammars.accepts(grammars.matcher(json=schema), '{"\\u0061": 1}')
    assert not grammars.accepts(grammars.matcher(json=schema), '{"a": "x", "a": 1}')


def test_objects_are_closed_where_the_schema_does_not_speak_of_other_properties(grammars: Grammars) -> None:
    null = {"type": "null"}
    inner = {"type": "object", "properties": {"properties": null}}
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": inner}, "b": {"type": "object"},
                                               "c": {**inner, "additionalProperties": null}}}  # fmt: skip
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    for outputs in ({"json": schema}, {"structural_tag": tag}):
        closed = partial(grammars.matcher, **outputs, disable_additional_properties=True)
        for text, inside in (('{"a": [{"properties": null}]}', True), ('{"b": {"x": 1}}', True), ('{"x": 1}', False),
                             ('{"a": [{"x": 1}]}', False), ('{"c": {"x": null}}', True)):  # fmt: skip
            assert grammars.accepts(closed(), text) == inside, text
            assert grammars.accepts(grammars.matcher(**outputs), text)


def test_the_grammar_of_the_whole_follows_the_reasoning(grammars: Grammars) -> None:
    for text in ("Hm.</think>", "</think>\n\n", 'a < b, {"a"</thin</think>\n'):
        matcher = grammars.matcher(after=Frame("", "</think>"), choice=("ab", "xy"))
        assert not grammars.accepts(matcher, text), "it goes on"
        assert {i for i in grammars.allowed(matcher) if grammars.tokenizer.token_bytes(i)[:1] != b"\n"} == {
            grammars.encode(spelled)[0] for spelled in ("ab", "xy", "a", "x")}
        assert grammars.accepts(matcher, "xy")
    matcher = grammars.matcher(after=Frame("<think>", "<|start|>"), choice=("ab",))
    assert grammars.tokenizer.decode(matcher.forced()) == "<think>"
    matcher.accept(grammars.encode("<think>thinking"))
    assert grammars.tokenizer.special_token_ids["<|start|>"] in grammars.allowed(matcher)
    assert grammars.eos not in grammars.allowed(matcher)
    matcher.accept([grammars.tokenizer.special_token_ids["<|start|>"]])
    assert grammars.accepts(matcher, "ab")


def test_a_token_that_does_not_fit_ends_the_output_with_an_error(grammars: Grammars) -> None:
    matcher = grammars.matcher(choice=("ab",))
    matcher.accept(grammars.encode("x"))
    assert matcher.error and matcher.forced() == [grammars.eos] and grammars.allowed(matcher) == [grammars.eos]


def test_after_the_end_there_is_only_eos(grammars: Grammars) -> None:
    matcher = grammars.matcher(choice=("ab",))
    matcher.accept([*grammars.encode("ab"), grammars.eos])
    assert not matcher.error and matcher.forced() == [grammars.eos] and grammars.allowed(matcher) == [grammars.eos]
