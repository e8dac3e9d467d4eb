import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.decoding.output_format import OutputFormat
from serving.decoding.output_parser import OutputParser
from serving.decoding.parts import Frame, Message, ReasoningDelta
from serving.decoding.reasoning.deepseek_r1 import DeepSeekR1ReasoningParser
from serving.decoding.reasoning.harmony import HarmonyParser
from serving.decoding.reasoning.qwen3 import Qwen3ReasoningParser
from serving.decoding.tools.base import Tool
from serving.decoding.tools.hermes import HermesToolParser

OPENED, CLOSED = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
PLAIN = "<|im_start|>assistant\n"
R1, QWEN = "deepseek_r1", "qwen3"

# parser, end of the prompt, output, reasoning, content
CASES = [
    (QWEN, PLAIN, "<think>\nOne.\n\nTwo.\n</think>\n\nHello.\n", "One.\n\nTwo.", "Hello.\n"),
    (QWEN, PLAIN, "Hello.", "", "Hello."),
    (QWEN, PLAIN, "a </think> b", "", "a </think> b"),
    (QWEN, PLAIN, "\n<think>\n\n</think>\n\nHello.", "", "Hello."),
    (QWEN, PLAIN, "<think>not done", "not done", ""),
    (QWEN, OPENED, "One.\n</think>\n\nHello.", "One.", "Hello."),
    (QWEN, OPENED, "One. < x </thin", "One. < x </thin", ""),
    (QWEN, CLOSED, "<think> is a tag", "", "<think> is a tag"),
    (R1, PLAIN, "One.</think>Hello.", "One.", "Hello."),
    (R1, PLAIN, "<think>One.</think>Hello.", "One.", "Hello."),
    (R1, PLAIN, "never ends", "never ends", ""),
    (R1, OPENED, "One.\n</think>\nHello </think>", "One.", "Hello </think>"),
    (R1, CLOSED, "Hello.", "", "Hello."),
    ("gpt-oss", "", "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two."
     "<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>", "One.\nTwo.", "Hello."),
    ("gpt-oss", "", "<|channel|>analysis<|message|>not done", "not done", ""),
    ("gpt-oss", "", "<|channel|>final<|message|>Hello.", "", "Hello."),
    # Without a parser for calls they are content.
    ("gpt-oss", "", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", "", "{}"),
]


def read(output: OutputParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    message = Message()
    for piece in pieces:
        message.add(output.feed(piece))
    message.add(output.finish())
    return message.reasoning, message.content, [(call.name, call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("name, prompt, text, reasoning, content", CASES)
def test_an_output_cut_anywhere(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    form = OutputFormat(reasoning_parser=name)
    assert read(form.parser(prompt), [text]) == (reasoning, content, [])
    assert read(form.parser(prompt), list(text)) == (reasoning, content, [])
    for cut in range(1, len(text)):
        assert read(form.parser(prompt), [text[:cut], text[cut:]]) == (reasoning, content, []), cut


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32), opens=st.booleans())
def test_any_text_is_read_alike_however_it_comes(seed: int, opens: bool) -> None:
    rng = random.Random(seed)
    call = '{"name": "f", "arguments": {}}'
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>", call, "a", " ", "\n", "<", "é"]
    text = "".join(rng.choices(marks, k=rng.randint(1, 12)))
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    form = OutputFormat(reasoning_parser="qwen3", tool_parser="hermes", calls="auto", tools=(Tool("f"),))
    prompt = OPENED if opens else PLAIN
    whole = read(form.parser(prompt), [text])
    assert read(form.parser(prompt), pieces) == read(form.parser(prompt), list(text)) == whole


def test_calls_after_reasoning_and_not_in_it() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    text = f"<think>I could write {call}.</think>\n\n{call}"
    output = OutputParser(Qwen3ReasoningParser(), HermesToolParser())
    assert read(output, list(text)) == (f"I could write {call}.", "", [("f", '{"a": 1}')])


def test_reasoning_comes_as_it_is_written() -> None:
    parser = DeepSeekR1ReasoningParser(OPENED)
    assert parser.in_reasoning
    news = [part for letter in "a\nb<c" for part in parser.feed(letter)]
    assert news == [ReasoningDelta("a"), ReasoningDelta("\nb"), ReasoningDelta("<c")]
    parser.feed("</think>")
    assert not parser.in_reasoning
    assert not Qwen3ReasoningParser(CLOSED).in_reasoning and not Qwen3ReasoningParser(PLAIN).in_reasoning


@pytest.mark.parametrize("name", [R1, QWEN])
@pytest.mark.parametrize("message, reasoning, content", [
    ("The capital of", "", " France is</think>"),
    ("<think>\nOne.\n</think>\n\nThe capital of", "", " France is</think>"),
    ("<think>\nThe capital of", " France is", ""),
])  # fmt: skip
def test_a_message_that_goes_on(name: str, message: str, reasoning: str, content: str) -> None:
    form = OutputFormat(reasoning_parser=name)
    assert read(form.parser(message, continues=True), list(" France is</think>")) == (reasoning, content, [])
    assert (form.free(message, continues=True) is None) == (reasoning == "")


def test_where_a_grammar_begins() -> None:
    """Forced calls come after the reasoning, where there is any."""
    assert OutputFormat(reasoning_parser="qwen3").free(OPENED) == Frame("", "</think>")
    assert OutputFormat(reasoning_parser="qwen3").free(PLAIN) == Frame("<think>", "</think>", optional=True)
    assert OutputFormat(reasoning_parser="deepseek_r1").free(PLAIN) == Frame("", "</think>")
    assert OutputFormat(reasoning_parser="qwen3").free(CLOSED) is None
    assert OutputFormat().free(OPENED) is None
    form = OutputFormat(reasoning_parser="qwen3", calls="required", tools=(Tool("f"),))
    text = 'One.\n</think>\n\n[{"name": "f", "parameters": {"a": 1}}]'
    assert read(form.parser(OPENED), list(text)) == ("One.", "", [("f", '{"a": 1}')])
    form = OutputFormat(reasoning_parser="gpt-oss", calls="named", tools=(Tool("f"),))
    text = '<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>{"a": 1}<|return|>'
    assert read(form.parser(), list(text)) == ("One.", "", [("f", '{"a": 1}')])


def test_both_flags_of_gpt_oss_mean_one_parser() -> None:
    tools = (Tool("f"),)
    text = "<|channel|>analysis<|message|>One.<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}"
    for form in (OutputFormat(tool_parser="openai", calls="auto", tools=tools),
                 OutputFormat(reasoning_parser="gpt-oss", tool_parser="openai", calls="auto", tools=tools)):
        assert read(form.parser(), list(text)) == ("One.", "", [("f", "{}")])
        assert form.markers == frozenset(HarmonyParser.markers)
