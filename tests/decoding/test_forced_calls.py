"""The grammars of calls that tool_choice forces, walked token by token."""

import numpy as np
import pytest

from serving.decoding.grammar.build import grammar_of
from serving.decoding.grammar.compiler import Compiler
from serving.decoding.grammar.tokens import vocabulary
from serving.decoding.output_format import OutputFormat
from serving.decoding.tools.base import Tool
from serving.errors import InvalidRequest
from serving.request import StructuredOutputs
from serving.tokenizer.tokenizer import Tokenizer
from tests.api.fakes import SPECIAL, VOCAB_SIZE, byte_tokenizer

MARKS = ("[TOOL_CALLS]", "[ARGS]", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>",
         "<|return|>")  # fmt: skip
ADD = Tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                   "additionalProperties": False})  # fmt: skip
ANY = Tool("any")
TREE = Tool("tree", {"type": "object", "required": ["kind"], "additionalProperties": False, "$defs": {"kind": {
    "enum": ["oak", "$ref"]}}, "properties": {"kind": {"$ref": "#/$defs/kind"}, "next": {"$ref": "#"}}})  # fmt: skip
THOUGHT = "<|channel|>analysis<|message|>Hm. [{<|end|><|start|>assistant<|channel|>final<|message|>"
OPENED, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"
BOTH = '[{"name": "add", "parameters": {"a": 1}}, {"name": "any", "parameters": {"x": [1, "y"]}}]'


def form(calls: str, *tools: Tool, reasoning: str | None = None, parallel: bool = True) -> OutputFormat:
    return OutputFormat(calls=calls, tools=tools, reasoning_parser=reasoning, parallel_tool_calls=parallel)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def compiler():
    tokenizer = byte_tokenizer(special_tokens=(*SPECIAL, *MARKS))
    compiler = Compiler(lambda: vocabulary(tokenizer, VOCAB_SIZE))
    yield compiler, tokenizer
    compiler.close()


@pytest.mark.parametrize("how, prompt, text, fits", [
    (form("named", ADD), "", '{"a": 12}', True),
    (form("named", ADD), "", '{"b', False),
    (form("named", ANY), "", '{"whatever": {"it": [1]}}', True),
    (form("required", ADD, ANY), "", BOTH, True),
    (form("required", ADD, ANY), "", "[]", False),
    (form("required", ADD, ANY), "", '[{"name": "other"', False),
    (form("required", ADD, ANY), "", '[{"name": "add", "parameters": {}', False),
    (form("required", ADD, ANY, parallel=False), "", BOTH.partition(', {')[0] + "]", True),
    (form("required", ADD, ANY, parallel=False), "", BOTH, False),
    # References in a tool's schema start from there.
    (form("named", TREE), "", '{"kind": "oak", "next": {"kind": "$ref"}}', True),
    (form("required", ADD, TREE), "",
     '[{"name": "tree", "parameters": {"kind": "oak", "next": {"kind": "oak"}}}]', True),
    (form("required", ADD, TREE), "", '[{"name": "tree", "parameters": {"kind": "elm', False),
    # Reasoning first, where there is any.
    (form("required", ADD, ANY, reasoning="qwen3"), OPENED, f"Hm. [{{\n</think>\n\n{BOTH}", True),
    (form("required", ADD, ANY, reasoning="qwen3"), OPENED, "Hm.</think>no", False),
    (form("required", ADD, ANY, reasoning="qwen3"), "", BOTH, True),
    (form("required", ADD, ANY, reasoning="qwen3"), "", f"<think>\nHm. [{{</think>\n\n{BOTH}", True),
    (form("required", ADD, ANY, reasoning="qwen3"), "", "Hm.", False),
    (form("required", ADD, ANY, reasoning="qwen3"), CLOSED, BOTH, True),
    (form("required", ADD, ANY, reasoning="qwen3"), CLOSED, "Hm.", False),
    (form("required", ADD, ANY, reasoning="gpt-oss"), "", THOUGHT + BOTH, True),
    (form("named", ADD, reasoning="gpt-oss"), "", THOUGHT + '{"a": -3}', True),
    (form("named", ADD, reasoning="gpt-oss"), "", '{"a": -3}', False),
])  # fmt: skip
def test_what_fits(compiler, how: OutputFormat, prompt: str, text: str, fits: bool) -> None:
    compiler, tokenizer = compiler
    outputs = how.structured_outputs(None, tokenizer.special_token_ids)
    assert outputs is not None
    check(compiler, tokenizer, grammar_of(outputs, tokenizer.special_token_ids, after=how.free(prompt)), text, fits)


def check(compiler: Compiler, tokenizer: Tokenizer, grammar: str, text: str, fits: bool) -> None:
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    out = np.zeros((len(ids) + 1, -(-VOCAB_SIZE // 32)), np.int32)
    valid = compiler.compile(grammar).result().masks(ids, np.arange(-1, len(ids) - 1), out)
    assert valid.all() == fits
    eos = tokenizer.eos_ids[0]
    assert not fits or out[-1, eos // 32] >> (eos % 32) & 1


ANSWER = StructuredOutputs(json={"type": "object", "properties": {"name": {"const": "Bob"}}, "required": ["name"],
                                 "additionalProperties": False}, source="response_format")  # fmt: skip


@pytest.mark.parametrize("parser, answer, text, fits", [
    ("hermes", ANSWER, '{"name": "Bob"}', True),
    ("hermes", ANSWER, '<tool_call>{"name": "add", "arguments": {}}</tool_call> and more', True),
    ("hermes", ANSWER, "Hello", False),
    ("mistral", ANSWER, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]any[ARGS]{}', True),
    ("mistral", ANSWER, '{"name": "Bob"}', True),
    ("mistral", ANSWER, "Hello[TOOL_CALLS]", False),
    ("llama3_json", ANSWER, '{"name": "add", "parameters": {"a": 1}}', True),
    ("llama3_json", ANSWER, '{"name": "Bob"}', True),
    ("llama3_json", ANSWER, '{"name": "Tom"}', False),
    ("pythonic", ANSWER, "[add(a=1)]", True),
    ("pythonic", ANSWER, "[1]", False),
    ("qwen3_coder", ANSWER, "<function=add>\n</function>", True),
    ("hermes", StructuredOutputs(json_object=True), '{"a": 1}', True),
    ("hermes", StructuredOutputs(json='{"type": "object"}'), "<tool_call>", True),
    # The client's own affair.
    ("hermes", StructuredOutputs(regex="[0-9]+"), "42", True),
    ("hermes", StructuredOutputs(regex="[0-9]+"), "<tool_call>", False),
])  # fmt: skip
def test_an_answer_of_a_form_or_calls(compiler, parser: str, answer: StructuredOutputs, text: str, fits: bool) -> None:
    compiler, tokenizer = compiler
    how = OutputFormat(calls="auto", tool_parser=parser, tools=(ADD, ANY))
    outputs = how.structured_outputs(answer, tokenizer.special_token_ids)
    assert outputs is not None
    check(compiler, tokenizer, grammar_of(outputs, tokenizer.special_token_ids), text, fits)


def test_no_form_beside_forced_calls() -> None:
    for how in (form("named", ADD), form("required", ADD)):
        with pytest.raises(InvalidRequest, match="tool_choice forces calls, which response_format rules out"):
            how.structured_outputs(ANSWER, ())
    for parser, answer in (("openai", ANSWER), ("hermes", StructuredOutputs(json={"type": "array"}))):
        with pytest.raises(InvalidRequest, match='beside tools must be .* unless tool_choice is "none"'):
            OutputFormat(calls="auto", tool_parser=parser, tools=(ADD,)).structured_outputs(answer, ())
    assert OutputFormat(tools=(ADD,)).structured_outputs(ANSWER, ()) == ANSWER
