"""Free text with parts that follow a schema, in both notations."""

import json
from typing import Any

import pytest

from tests.api.fakes import SPECIAL, byte_tokenizer
from tests.decoding.grammar.schema_cases import INT, obj
from tests.decoding.grammar.toy import Grammars, toy_tokenizer

CALL = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": obj(x=INT)}, "end": "</f>"}
OTHER = {"type": "tag", "begin": "<f=b>", "content": {"type": "regex", "pattern": "[xy]+"}, "end": ["</f>", ";"]}
TEXT = {"type": "any_text", "excludes": ["</v>", "<t>"]}
OLD = {"type": "structural_tag", "triggers": ["<f="],
       "structures": [{"begin": "<f=a>", "schema": obj(x=INT), "end": "</f>"}]}  # fmt: skip


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(toy_tokenizer())


def triggered(**options: bool) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL, OTHER], **options}


@pytest.mark.parametrize(
    "form, good, bad",
    [
        (OLD, ["", "free text", 'x <f=a>{"x": 1}</f> y', '<f=a>{"x": 1}</f><f=a>{"x": 2}</f>', "<f", "a <f>"],
         ["<f=b>", '<f=a>{"y": 1}</f>', '<f=a>{"x": 1}', "<f=a>x</f>"]),
        (triggered(), ["", "t", 'x <f=a>{"x": 1}</f> y<f=b>xy;', "<f=b>x</f>"], ["<f=c>", "<f=b>;", "<f=b>x"]),
        (triggered(at_least_one=True), ['<f=a>{"x": 1}</f>', "<f=b>x; and", "<f=b>x;and <f=b>y;"],
         ["", "t", "t<f=b>x;"]),
        (triggered(stop_after_first=True), ["", "text", "text <f=b>x;"], ["<f=b>x; ", "<f=b>x;<f=b>x;"]),
        (triggered(at_least_one=True, stop_after_first=True), ["<f=b>x;"], ["", "t", "<f=b>x; "]),
        ({"type": "tags_with_separator", "tags": [CALL, OTHER], "separator": ", "},
         ["", "<f=b>x;", '<f=b>x;, <f=a>{"x": 1}</f>'], ["t", "<f=b>x;,", "<f=b>x;<f=b>x;"]),
        ({"type": "tags_with_separator", "tags": [OTHER], "separator": "", "at_least_one": True},
         ["<f=b>x;<f=b>y</f>"], ["", "<f=b>x; "]),
        ({"type": "sequence", "elements": [
            {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
            {"type": "or", "elements": [CALL, {"type": "const_string", "value": "no"}]}]},
         ["<think>a < b</think>no", '<think></think><f=a>{"x": 1}</f>'], ["no", "<think></think>", "<think>no"]),
        ({"type": "sequence", "elements": [TEXT, {"type": "const_string", "value": "</v>;"},
                                           {"type": "star", "content": {"type": "const_string", "value": "ab"}},
                                           {"type": "optional", "content": OTHER}]},
         ["</v>;", "a < b</</v>;", "x</v>;abab", "x</v>;ab<f=b>x;"],
         ["", "x", "x</v>", "x<t></v>;", "x</v>y</v>;", "x</v>;aba", "</v>;<f=b>x;<f=b>x;"]),
        ({"type": "tag", "begin": "<v>", "content": TEXT, "end": "</v>"}, ["<v>a</v>", "<v></v>"],
         ["<v>a<t></v>", "<v>a"]),
        ({"type": "sequence", "elements": [{"type": "any_text", "excludes": ["<|"]},
                                           {"type": "const_string", "value": "<|start|>x"}]},
         ["<|start|>x", "a <<|start|>x"], ["a<|b<|start|>x", "a<|start|>y"]),
        ({"type": "sequence", "elements": [{"type": "any_text", "excludes": ["<f=", "</f>"]},
                                           triggered(at_least_one=True, stop_after_first=True)]},
         ["<f=b>x;", "Hm.</think>\n<f=b>x;", "<f <f=b>x;"], ["", "Hm.", "a</f> <f=b>x;", "<f=c>", "<f=b>x; "]),
        ({"type": "sequence", "elements": [{"type": "any_text", "excludes": ["<|start|>", "b"]}, {
            "type": "triggered_tags", "triggers": ["<|start|>"], "at_least_one": True, "tags": [
                {"begin": "<|start|>x", "content": {"type": "const_string", "value": "y"}, "end": ""}]}]},
         ["<|start|>xy", "a<|start|>xy", "<|start|>xy b<|start|>xy"], ["a", "b<|start|>xy", "<|start|>y"]),
        ({"type": "plus", "content": {"type": "regex", "pattern": "a|b"}}, ["a", "ab", "bbb"], ["", "c"]),
        (TEXT, ["", "a <", "<v>"], ["a</v>b", "<t>"]),
        ({"type": "grammar", "grammar": 'start: "a" | "b" start'}, ["a", "bba"], ["b", "c"]),
        ({"type": "sequence", "elements": [{"type": "const_string", "value": "ab<|start|>"},
                                           {"type": "json_schema", "json_schema": {"type": "null"}}]},
         ["ab<|start|>null"], ["abnull", "ab<null"]),
        ({"type": "triggered_tags", "triggers": ["<|start|>"], "tags": [
            {"type": "tag", "begin": "<|start|>x", "content": {"type": "any_text"}, "end": "<|start|>"}]},
         ["text", "a <|start|>x any <|start|> b"], ["<|start|>y", "<|start|>x"]),
    ],
)  # fmt: skip
def test_tags(grammars: Grammars, form: dict, good: list[str], bad: list[str]) -> None:
    tag = form if form["type"] == "structural_tag" else {"type": "structural_tag", "format": form}
    for text in good:
        assert grammars.accepts(grammars.matcher(structural_tag=tag), text), text
    for text in bad:
        assert not grammars.accepts(grammars.matcher(structural_tag=tag), text), text


def test_what_the_gateway_forces_calls_with(grammars: Grammars) -> None:
    """smg 1.13 with --tool-call-parser mistral: no type at the top."""
    tag = {"format": {"type": "triggered_tags", "triggers": ["[TOOL_CALLS]"], "at_least_one": True, "tags": [{
        "begin": "[TOOL_CALLS] [", "end": "]", "content": {
            "type": "tags_with_separator", "separator": ", ", "at_least_one": True, "tags": [
                {"begin": '{"name": "f", "arguments": ', "end": "}",
                 "content": {"type": "json_schema", "json_schema": obj(x=INT)}}]}}]}}  # fmt: skip
    call = '{"name": "f", "arguments": {"x": 1}}'
    for text in (f"[TOOL_CALLS] [{call}]", f"[TOOL_CALLS] [{call}, {call}]"):
        assert grammars.accepts(grammars.matcher(structural_tag=json.dumps(tag)), text)
    assert not grammars.accepts(grammars.matcher(structural_tag=json.dumps(tag)), "[TOOL_CALLS] []")


def test_special_tokens_stand_in_free_text_where_triggers_are_some() -> None:
    """What the gateway forces JSON of gpt-oss with: a message in the one channel, then the answer in the other."""
    grammars = Grammars(byte_tokenizer(special_tokens=(*SPECIAL, "<|channel|>", "<|message|>", "<|end|>")))
    json_schema = {"type": "json_schema", "json_schema": obj(x=INT)}
    tag = {"format": {"type": "triggered_tags", "triggers": ["<|channel|>analysis", "<|channel|>final"], "tags": [
        {"begin": "<|channel|>analysis<|message|>", "content": {"type": "any_text"}, "end": "<|end|>"},
        {"begin": "<|channel|>final<|message|>", "content": json_schema, "end": ""},
    ], "at_least_one": True}}  # fmt: skip
    answer = '<|im_start|>assistant<|channel|>final<|message|>{"x": 1}'
    for text, fits in ((f"<|channel|>analysis<|message|>Hm.<|end|>{answer}", True), (answer, False),
                       (f"<|channel|>analysis<|message|>Hm.<|end|>{answer[:-1]}", False),
                       ("<|channel|>analysis<|message|>Hm.<|end|><|im_start|>x<|channel|>other", False)):
        assert grammars.accepts(grammars.matcher(structural_tag=tag), text) == fits, text


def test_once_triggered_the_rest_of_the_begin_is_forced(grammars: Grammars) -> None:
    matcher = grammars.matcher(structural_tag=OLD)
    matcher.accept(grammars.encode("I look it up: <f="))
    assert grammars.tokenizer.decode(matcher.forced()) == 'a>{"x": '
