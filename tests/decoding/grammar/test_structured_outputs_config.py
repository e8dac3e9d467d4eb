"""--structured-outputs-config, from the flag to the grammar."""

from typing import Any

import pytest

from serving.config import StructuredOutputsConfig
from serving.errors import ConfigError, InvalidRequest
from serving.flags import parse_flags
from serving.llm import LLM
from serving.request import SamplingParams, StructuredOutputs
from serving.validation import RequestLimits, to_engine_requests
from tests.decoding.grammar.schema_cases import INT, obj
from tests.decoding.grammar.toy import toy_tokenizer

FLAG = "--structured-outputs-config"


def test_the_flag_fills_the_config() -> None:
    given = '{"backend": "guidance", "disable_any_whitespace": true, "enable_fast_forward": false}'
    assert parse_flags([FLAG, given]).engine.structured_outputs_config == StructuredOutputsConfig(
        backend="guidance", disable_any_whitespace=True, enable_fast_forward=False)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "'{' is not JSON"),
        ('{"backend": "xgrammar"}', "backend is 'xgrammar', must be one of \"auto\", \"guidance\""),
        ('{"disable_additional_properties": 1}', "disable_additional_properties is 1, must be one of true"),
        ('{"disable_any_whitespace": 1}', "disable_any_whitespace is 1, must be one of null, true, false"),
        ('{"reasoning_parser": "x"}', "unknown reasoning_parser; it may have backend"),
    ],
)
def test_mistakes_in_it(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_flags([FLAG, text])
    assert message in str(caught.value)


@pytest.mark.parametrize("options, message", [
    ({"structured_outputs_config": {"reasoning_parser": "x"}}, "unknown reasoning_parser; it may have backend"),
    ({"enable_eplb": True, "eplb_config": {"window_size": 0}}, "window_size is 0, must be a whole number"),
])  # fmt: skip
def test_mistakes_in_the_dicts_of_the_llm_class(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("no model is read", **options)


@pytest.mark.parametrize(
    "servers, requests, separator",
    [
        (None, None, '"key_separator": ": "'),
        (True, None, '"key_separator": ":"'),
        (None, True, '"key_separator": ":"'),
        (True, False, '"whitespace_flexible": true'),
    ],
)
def test_the_server_says_how_json_is_spaced_where_the_request_does_not(
    servers: bool | None, requests: bool | None, separator: str
) -> None:
    config = StructuredOutputsConfig(disable_any_whitespace=servers)
    assert separator in grammar(config, json=obj(a=INT), disable_any_whitespace=requests)


def grammar(config: StructuredOutputsConfig, **outputs: Any) -> str:
    limits = RequestLimits(max_model_len=64, vocab_size=300, structured_outputs=config)
    sampling = SamplingParams(structured_outputs=StructuredOutputs(**outputs))
    [request] = to_engine_requests([1], sampling, limits, toy_tokenizer())
    assert request.sampling.structured_outputs is None
    return request.grammar


def test_the_server_says_whether_objects_are_closed_where_the_request_does_not() -> None:
    open_object = {"type": "object", "properties": {"a": INT}}
    for servers, requests, closed in ((True, None, True), (False, True, True), (True, False, False)):
        config = StructuredOutputsConfig(disable_additional_properties=servers)
        made = grammar(config, json=open_object, disable_additional_properties=requests)
        assert ('"additionalProperties": false' in made) == closed


def test_a_pattern_of_the_request_comes_before_what_the_server_says_of_spaces() -> None:
    config = StructuredOutputsConfig(disable_any_whitespace=True)
    assert '"whitespace_pattern": " ?"' in grammar(config, json=obj(a=INT), whitespace_pattern=" ?")
    for beside in ({"json": obj(a=INT), "disable_any_whitespace": True}, {"regex": "a"}, {"choice": ("a",)}):
        with pytest.raises(InvalidRequest, match="whitespace_pattern says how JSON is spaced") as caught:
            grammar(config, whitespace_pattern=" ?", **beside)
        assert caught.value.param == "structured_outputs.whitespace_pattern"
