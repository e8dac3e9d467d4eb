"""Transcripts in the formats that the models' templates and vLLM's tests show, cut at every place."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.decoding.output_parser import OutputParser, WithoutMarks
from serving.decoding.parts import Message, Part, ToolCallDelta
from serving.decoding.tools.base import Tool
from serving.decoding.tools.constrained import NamedToolParser, RequiredToolParser
from serving.decoding.tools.registry import TOOL_PARSERS

WEATHER = Tool("get_weather", {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"},
        "area": {"type": "object"}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "unit": {"enum": ["C", "F"]}, "limit": {"type": ["number", "null"]}, "odd": {"$ref": "#/$defs/odd"},
    },
})  # fmt: skip
TOOLS = [WEATHER, Tool("add"), Tool("get_time")]
PARSERS = {**TOOL_PARSERS, "required": RequiredToolParser, "named": NamedToolParser}
Calls = list[tuple[str, str]]

DS = ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
      "<｜tool▁calls▁end｜>"]  # fmt: skip
DS_WEATHER = f'{DS[1]}function{DS[2]}get_weather\n```json\n{{"city": "Tokyo"}}\n```{DS[3]}'
DS_TIME = f"{DS[1]}function{DS[2]}get_time\n```json\n{{}}\n```{DS[3]}"
HARMONY_CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Tokyo"}<|call|>'

# parser, text, content, calls
CASES: list[tuple[str, str, str, Calls]] = [
    ("hermes", "How can I help?", "How can I help?", []),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "",
     [("get_weather", '{"city": "Paris"}')]),
    ("hermes", 'Let me look.\n\n<tool_call>\n{"name": "add", "arguments": {"a": [1, {"b": "}</tool_call>\\""}]}}\n'
     '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n', "Let me look.",
     [("add", '{"a": [1, {"b": "}</tool_call>\\""}]}'), ("get_time", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"x": 1.5}, "name": "add"}</tool_call>', "", [("add", '{"x": 1.5}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("add", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "get_time"}</tool_call> Done.', "Done.", [("get_time", "{}")]),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": null}</tool_call>', "", [("get_time", "{}")]),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}', "", [("unknown", "{}")]),
    ("hermes", '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "get_time", "arguments": {}}]</tool_call>',
     "", [("add", '{"a": 1}'), ("get_time", "{}")]),
    # Malformed: content, and what follows is still read.
    ("hermes", "<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", []),
    ("hermes", '<tool_call>{"nam": "add", "arguments": {}}</tool_call>',
     '<tool_call>{"nam": "add", "arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>?<tool_call>{"name": "add", "arguments": {}}</tool_call>', "<tool_call>?", [("add", "{}")]),
    ("hermes", 'a <tool_call> {"name": "add", "argu', 'a <tool_call> {"name": "add", "argu', []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [1}}</tool_call>', "}}</tool_call>",
     [("add", '{"a": [1')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "end', "", [("add", '{"a": "end')]),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "", [("\ufffd", "{}")]),
    ("hermes", "x < y <tool", "x < y <tool", []),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "a {b} [c]"}}', "",
     [("get_weather", '{"city": "a {b} [c]"}')]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": "1"}}', "",
     [("add", '{"a": "1"}')]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}; {"name": "get_time", "arguments": {}}', "",
     [("add", '{"a": 1}'), ("get_time", "{}")]),
    ("llama3_json", 'Here: {"name": "get_time", "parameters": {}} Anything else?', "Here: Anything else?",
     [("get_time", "{}")]),
    # An answer that is JSON, but no call.
    ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3_json", '{"name": "add", "age": 3}', '{"name": "add", "age": 3}', []),
    ("llama3_json", '{"name": "add"}', '{"name": "add"}', []),
    ("llama3_json", 'f = {"a": {"b": 1}} # {', 'f = {"a": {"b": 1}} # {', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 3.5, "b": 4}}]', "", [("add", '{"a": 3.5, "b": 4}')]),
    ("mistral", 'Hello[TOOL_CALLS] [{"arguments": {"name": "John"}, "name": "add"}, {"name": "get_time", '
     '"arguments": {}}]\nmore', "Hello\nmore", [("add", '{"name": "John"}'), ("get_time", "{}")]),
    ("mistral", '[TOOL_CALLS]add{"a": 3.5}[TOOL_CALLS]get_weather{"city": "Rio"}', "",
     [("add", '{"a": 3.5}'), ("get_weather", '{"city": "Rio"}')]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS] not json at all", "[TOOL_CALLS] not json at all", []),
    ("mistral", "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
    ("pythonic", "[get_weather(city='San Francisco', unit='C')]", "",
     [("get_weather", '{"city": "San Francisco", "unit": "C"}')]),
    ("pythonic", "[add(name='John', age=37, at={'city': 'SF', 'zip': [1, -2.5]}, role=None, ok=True, no=false)]", "",
     [("add", '{"name": "John", "age": 37, "at": {"city": "SF", "zip": [1, -2.5]}, "role": null, "ok": true, '
              '"no": false}')]),
    ("pythonic", r"""[add(a='Martha\'s', b="say \"hi\"", c='C:\dir', d='))]'), get_time()]""", "",
     [("add", r'{"a": "Martha' "'" r's", "b": "say \"hi\"", "c": "C:\\dir", "d": "))]"}'), ("get_time", "{}")]),
    ("pythonic", "[add(code='a\nb'), add(code='''x'y''')]", "", [("add", '{"code": "a\\nb"}'),
                                                                  ("add", '{"code": "x\'y"}')]),
    ("pythonic", "I call [get_time()] now", "I call now", [("get_time", "{}")]),
    ("llama4_pythonic", "<|python_start|>[get_time()]<|python_end|>", "", [("get_time", "{}")]),
    ("pythonic", "[bad(x=1), get_time()]", "[bad(x=1), get_time()]", []),
    ("pythonic", "[add(x=b'z'), get_time()]", "[add(x=b'z')", [("get_time", "{}")]),
    ("pythonic", "[add(x=1e999)]", "[add(x=1e999)]", []),
    ("pythonic", "[add(1, 2)]", "[add(1, 2)]", []),
    ("pythonic", "[add(a='x 'y', b='z')]", "[add(a='x 'y', b='z')]", []),
    ("pythonic", "[add(**{'a': 1})]", "[add(**{'a': 1})]", []),
    ("pythonic", "[1, 2], [a link](http://x) and [get_time(", "[1, 2], [a link](http://x) and [get_time(", []),
    ("pythonic", "[get_time(), oops]", ", oops]", [("get_time", "{}")]),
    ("qwen3_coder", "Sure.<tool_call>\n<function=get_weather>\n<parameter=city>\nSão \"P\"\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n<parameter=area>\n{\"w\": 10,\n \"h\": 20}\n</parameter>\n</function>\n"
     "</tool_call>", "Sure.",
     [("get_weather", '{"city": "São \\"P\\"", "days": 3, "area": {"w": 10,\n "h": 20}}')]),
    ("qwen3_coder", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n"
     "<parameter=text>\n one\n\ntwo \n</parameter>\n</function>\n</tool_call>", "",
     [("get_time", "{}"), ("add", '{"text": " one\\n\\ntwo "}')]),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=exact>True</parameter><parameter=note>null</parameter>"
     "<parameter=limit>2.5</parameter><parameter=days>many</parameter><parameter=odd>[1]</parameter></function>"
     "</tool_call>", "",
     [("get_weather", '{"exact": true, "note": null, "limit": 2.5, "days": "many", "odd": [1]}')]),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=note>42</parameter><parameter=area>{'a': None}"
     "</parameter><parameter=limit>NaN</parameter><parameter=days>4.5</parameter></function></tool_call>", "",
     [("get_weather", '{"note": "42", "area": {"a": null}, "limit": "NaN", "days": "4.5"}')]),
    ("qwen3_coder", "<function=get_weather>\n<parameter=city>\nDallas\n<parameter=unit>\nF\n</function>", "",
     [("get_weather", '{"city": "Dallas", "unit": "F"}')]),
    ("qwen3_coder", "<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", []),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nDal", "",
     [("get_weather", '{"city": "Dal')]),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n", "", [("get_weather", "")]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n", "", [("add", '{"a": "1"')]),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter></tool_call>", "", [("add", '{"a": "1"}')]),
    ("qwen3_coder", "<tool_call>\n<function=get_wea", "<tool_call>\n<function=get_wea", []),
    ("deepseek_v3", f"Let me see.{DS[0]}{DS_WEATHER}\n{DS_TIME}{DS[4]}", "Let me see.",
     [("get_weather", '{"city": "Tokyo"}'), ("get_time", "{}")]),
    ("deepseek_v31", f'{DS[0]}{DS[1]}add{DS[2]}{{"a": 1}}{DS[3]}{DS[1]}function{DS[2]}{{}}{DS[3]}{DS[4]}', "",
     [("add", '{"a": 1}'), ("function", "{}")]),
    ("deepseek_v3", f"{DS[0]}function{DS[2]}get_weather\n", f"{DS[0]}function{DS[2]}get_weather\n", []),
    ("deepseek_v3", f'{DS[0]}{DS[1]}function{DS[2]}add\n```json\n{{"a": 1\n```{DS[3]}{DS[4]}', f"```{DS[3]}{DS[4]}",
     [("add", '{"a": 1\n')]),
    ("openai", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY_CALL}", "",
     [("get_weather", '{"city": "Tokyo"}')]),
    ("openai", "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions.get_time<|channel|>"
     "commentary json<|message|><|call|><|start|>assistant<|channel|>final<|message|>Done.<|return|>",
     "I will look.\nDone.", [("get_time", "{}")]),
    ("openai", '<|channel|>analysis to=add code<|message|>{"a": 1}<|call|>', "", [("add", '{"a": 1}')]),
    ("openai", "Hello there", "Hello there", []),
    ("openai", "<|channel|>final<|message|>a < b <|", "a < b <|", []),
    ("openai", "<|channel|>oops<|end|>x", "<|channel|>oops<|end|>x", []),
    ("required", ' [{"name": "add", "parameters": {"a": 1}}, {"name": "get_time", "parameters": {}}] ', "",
     [("add", '{"a": 1}'), ("get_time", "{}")]),
    # Cut.
    ("required", '[{"name": "ad', "", []),
    ("required", '[{"name": "add", "parame', "", [("add", "")]),
    ("required", '[{"name": "add", "parameters":', "", [("add", "")]),
    ("required", '[{"name": "add", "parameters": {"a": 1}}, {"name": "get_ti', "", [("add", '{"a": 1}')]),
    ("required", '[{"name": "add", "parameters": {"a": 1}}, {"name": "get_time",', "",
     [("add", '{"a": 1}'), ("get_time", "")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": ', "", [("add", "")]),
    ("deepseek_v31", f"{DS[0]}{DS[1]}add{DS[2]}", "", [("add", "")]),
    ("openai", "<|channel|>commentary to=functions.add<|message|>", "", [("add", "")]),
    ("named", '\n{"city": "Rome", "d', "", [("get_weather", '{"city": "Rome", "d')]),
    ("named", "  ", "", []),
]  # fmt: skip


def parse(parser: str, pieces: list[str]) -> list[Part]:
    output = OutputParser(PARSERS[parser](TOOLS))
    return [part for piece in pieces for part in output.feed(piece)] + output.finish()


def message_of(parts: list[Part]) -> tuple[str, str, Calls]:
    message = Message().add(parts)
    return message.reasoning, message.content, [(call.name, call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("parser, text, content, calls", CASES)
def test_a_transcript_cut_anywhere(parser: str, text: str, content: str, calls: Calls) -> None:
    whole = message_of(parse(parser, [text]))
    assert whole[1:] == (content, calls)
    assert message_of(parse(parser, list(text))) == whole
    for cut in range(1, len(text)):
        assert message_of(parse(parser, [text[:cut], text[cut:]])) == whole, cut


ENDS = {
    "hermes": ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "\n</tool_call>"),
    "deepseek_v3": (f'{DS[0]}{DS[1]}function{DS[2]}add\n```json\n{{"a": 1}}', f"\n```{DS[3]}{DS[4]}"),
    "llama4_pythonic": ("<|python_start|>[add(a=1)]", "<|python_end|>"),
    "qwen3_coder": ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>", "\n</function>\n</tool_call>"),
}


@pytest.mark.parametrize("parser", ENDS)
def test_a_call_that_breaks_off_within_its_end_leaves_no_content(parser: str) -> None:
    """`max_tokens` may cut a mark where it is no token of its own."""
    call, end = ENDS[parser]
    for cut in range(len(end) + 1):
        text = call + end[:cut]
        whole = message_of(parse(parser, [text]))
        assert whole == message_of(parse(parser, list(text)))
        assert whole[1] == "" and [name for name, _ in whole[2]] == ["add"], text
    assert message_of(parse(parser, [f"{call}{end} < b"]))[1] == "< b"


def fragments(parser: str) -> list[str]:
    """What texts of this format are made of, in pieces that may stand anywhere."""
    marks = list(PARSERS[parser].markers) or ["[", "]"]
    plain = ['{"name": "add", "arguments": {"a": [1, "\\""]}}', '"name"', "get_time", "(", ")", "a=1", "'", '"', "{",
             "}", "[", "]", ",", ":", " ", "\n", "\\", "function", "```json\n", "<function=add>", "<parameter=a>",
             "</parameter>", "</function>", " to=functions.add", "analysis", "é😀", "<", "null"]  # fmt: skip
    return marks * 3 + plain


@pytest.mark.parametrize("parser", sorted(PARSERS))
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_any_text_is_read_alike_however_it_comes_and_nothing_is_lost(parser: str, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices(fragments(parser), k=rng.randint(1, 14)))
    parts = parse(parser, [text])
    reasoning, content, calls = message_of(parts)
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert message_of(parse(parser, pieces)) == (reasoning, content, calls)
    assert message_of(parse(parser, list(text))) == (reasoning, content, calls)
    if not calls and not reasoning and parser not in ("openai", "named", "required"):
        assert content == text  # those drop what frames a message
    begun = [part for part in parts if isinstance(part, ToolCallDelta) and part.name is not None]
    assert [part.index for part in begun] == list(range(len(calls))) and all(part.id for part in begun)


def calls_of(parts: list[Part]) -> list[ToolCallDelta]:
    assert all(isinstance(part, ToolCallDelta) for part in parts)
    return [part for part in parts if isinstance(part, ToolCallDelta)]


def test_arguments_come_as_they_are_written() -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    output = OutputParser(PARSERS["hermes"](TOOLS))
    news = calls_of([part for letter in text for part in output.feed(letter)])
    assert news[0].name == "get_weather"
    assert [part.arguments for part in news] == list('{"city": "Paris"}')  # each letter at once


def test_values_of_qwen3_coder_stream_as_json() -> None:
    output = OutputParser(PARSERS["qwen3_coder"]([WEATHER]))
    text = '<function=get_weather>\n<parameter=city>\na"b'
    news = calls_of([part for letter in text for part in output.feed(letter)])
    assert [part.arguments for part in news] == ["", '{"city": "', "a", '\\"', "b"]


def test_ids() -> None:
    hermes = [part.id for part in parse("hermes", ['<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}'])
              if isinstance(part, ToolCallDelta) and part.id]
    assert len(set(hermes)) == 2 and all(id.startswith("call_") for id in hermes)
    mistral = [part.id for part in parse("mistral", ["[TOOL_CALLS]add{}[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{}"])
               if isinstance(part, ToolCallDelta) and part.id]
    assert len(mistral[0]) == 9 and mistral[0].isalnum() and mistral[1] == "a1b2c3d4e"


def test_only_one_call_where_parallel_ones_are_unwanted() -> None:
    output = OutputParser(PARSERS["hermes"](TOOLS), parallel_tool_calls=False)
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' * 3
    parts = [part for letter in text for part in output.feed(letter)] + output.finish()
    assert message_of(parts)[2] == [("add", '{"a": 1}')] and output.num_tool_calls == 1


def test_special_tokens_that_meant_nothing_stay_hidden() -> None:
    def content(*pieces: str) -> str:
        output = OutputParser(PARSERS["mistral"](TOOLS), WithoutMarks(["[ARGS]", "[TOOL_CALLS]"]))
        parts = [part for piece in pieces for part in output.feed(piece)] + output.finish()
        return message_of(parts)[1]

    text = "[TOOL_CALLS] no call [ARGS]at all ["
    assert content(text) == content(*text) == " no call at all ["


def test_long_arguments_before_the_name() -> None:
    value = json.dumps({"text": "word " * 4000})
    text = f'<tool_call>{{"arguments": {value}, "name": "add"}}</tool_call>'
    output = OutputParser(PARSERS["hermes"](TOOLS))
    parts: list[Part] = []
    for start in range(0, len(text), 4):
        parts += output.feed(text[start : start + 4])
    assert message_of(parts + output.finish())[2] == [("add", value)]
