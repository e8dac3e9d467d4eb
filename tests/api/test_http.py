"""What is refused and how; who may ask; the endpoints beside generation."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import ValidationError

from serving.api.http.errors import explain
from serving.api.http.requests import CompletionRequest
from serving.decoding.grammar.build import grammar_of
from serving.request import StructuredOutputs
from tests.api.conftest import Serve, client_of

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def assert_error(response: Any, status: int, param: str | None, *words: str) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    assert error["param"] == param
    for word in words:
        assert word in error["message"]


@pytest.mark.parametrize(
    "path, body, param, word",
    [
        (TEXT, {"temperature": 2.5}, "temperature", "2.5"),
        (TEXT, {"temperature": "1"}, "temperature", "valid number"),
        (TEXT, {"n": 0}, "n", "0"),
        (TEXT, {"n": True}, "n", "integer"),
        (TEXT, {"n": 1 << 70}, "n", "128"),
        (TEXT, {"top_p": 0}, "top_p", "greater than 0"),
        (TEXT, {"logprobs": 1000000}, "logprobs", "20"),
        (CHAT, {"logprobs": True, "top_logprobs": 1000000}, "top_logprobs", "20"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (TEXT, {"logit_bias": {"191222": -100}}, "logit_bias", "191222"),
        (TEXT, {"logit_bias": {"x": 1}}, "logit_bias.x", "pattern"),
        (TEXT, {"stop_token_ids": [99999]}, "stop_token_ids", "99999"),
        (TEXT, {"allowed_token_ids": [99999]}, "allowed_token_ids", "99999"),
        (TEXT, {"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
        (TEXT, {"stop": ["a"] * 17}, "stop", "at most 16"),
        (TEXT, {"stop": [""]}, "stop[0]", "at least 1"),
        (TEXT, {"bad_words": ["a"] * 129}, "bad_words", "at most 128"),
        (TEXT, {"seed": 1 << 63}, "seed", "9223372036854775807"),
        (TEXT, {"max_tokens": 0}, "max_tokens", "echo"),
        (TEXT, {"max_tokens": 300}, "max_tokens", "256"),
        (TEXT, {"min_tokens": 3, "max_tokens": 2}, "min_tokens", "max_tokens"),
        (TEXT, {"prompt": [""]}, "prompt", "no tokens"),
        (TEXT, {"prompt": []}, "prompt", "at least 1"),
        (TEXT, {"prompt": [[]]}, "prompt[0]", "at least 1"),
        (TEXT, {"prompt": ["a", 1]}, "prompt[1]", "valid string"),
        (TEXT, {"prompt": [5, 6, -1]}, "prompt[2]", "prompt[2] is -1: Input should be greater than or equal to 0"),
        (TEXT, {"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
        (TEXT, {"top-p": 1}, "top-p", "top-p is not a known field"),
        (TEXT, {"x" * 1000: 1}, "x" * 57 + "...", "not a known field"),
        (TEXT, {"prompt": [99999]}, "prompt", "99999"),
        (TEXT, {"prompt": "a" * 300}, "prompt", "300 tokens"),
        (TEXT, {"prompt": None}, "prompt", "None"),
        (TEXT, {"prompt": [[1]] * 100, "n": 41}, "n", "4096"),
        (TEXT, {"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        (TEXT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        (TEXT, {"priority": 1}, "priority", "scheduling-policy"),
        (TEXT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
        (TEXT, {"suffix": "x"}, "suffix", "not supported yet"),
        (TEXT, {"structured_outputs": {}}, "structured_outputs", "exactly one"),
        (CHAT, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
        (TEXT, {"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        (TEXT, {"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml", "not a known field"),
        (TEXT, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        (TEXT, {"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        (TEXT, {"response_format": {"type": "json_schema"}}, "response_format", "json_schema is missing"),
        (TEXT, {"response_format": {"type": "text", "json_schema": {"name": "a"}}}, "response_format", "does not go"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name",
         "missing"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
         "response_format.json_schema.name", "a b"),
        (CHAT, {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["x"]}}, "response_format",
         "tags is empty"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}},
         "response_format", "without end"),
        (CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs",
         "both given"),
        (TEXT, {"kv_transfer_params": {}}, "kv_transfer_params", "not supported yet"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort", "chat template"),
        (CHAT, {"documents": [{"text": "x"}]}, "documents", "chat template"),
        (CHAT, {"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "differ"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"store": True}, "store", "only false"),
        (CHAT, {"modalities": ["audio"]}, "modalities[0]", "'text'"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type",
         "text"),
        (CHAT, {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", "user"),
        (CHAT, {"chat_template": "{{ raise_exception('no') }}"}, "chat_template", "no"),
        (CHAT, {"chat_template": "{% if"}, "chat_template", "template"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        (CHAT, {"continue_final_message": True}, "continue_final_message", "assistant"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "both"),
        (TEXT, {"guided_json": {}}, "guided_json", "structured_outputs.json"),
        (CHAT, {"guided_regex": "a"}, "guided_regex", "structured_outputs.regex"),
        (TEXT, {"guided_choice": ["a"]}, "guided_choice", "structured_outputs.choice"),
        (TEXT, {"guided_grammar": "a"}, "guided_grammar", "structured_outputs.grammar"),
        (TEXT, {"best_off": 2}, "best_off", "not a known field"),
        (TEXT, {"best_of": 2}, "best_of", "must be n, 1"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "not a known field"),
        ("/tokenize", {"messages": HI}, "prompt", "exactly one"),
        ("/tokenize", {"add_generation_prompt": False}, "add_generation_prompt", "goes with messages"),
        (CHAT, {"max_completion_tokens": 300}, "max_completion_tokens", "at most"),
        (CHAT, {"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens", "at most max_completion_tokens, 2"),
        ("/detokenize", {"tokens": [1 << 63]}, "tokens[0]", "9223372036854775808"),
        ("/detokenize", {"tokens": [511, 512]}, "tokens", "512"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "-1"),
    ],
)  # fmt: skip
async def test_a_broken_rule_is_named(serve: Serve, path: str, body: dict[str, Any], param: str, word: str) -> None:
    base = {TEXT: {"prompt": "Hello"}, CHAT: {"messages": HI}, "/tokenize": {"prompt": "x"}, "/detokenize": {}}[path]
    async with client_of(serve()) as client:
        assert_error(await client.post(path, json={**base, **body}), 400, param, word, param.split("[")[0])


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}


@pytest.mark.parametrize(
    "fields, same_as",
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
         StructuredOutputs(json=SCHEMA)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "description": "d"}}},
         StructuredOutputs(json_object=True)),
        ({"response_format": {"type": "structural_tag", **TAG}},
         StructuredOutputs(structural_tag={"type": "structural_tag", **TAG})),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "whitespace_pattern": " ?"}},
         StructuredOutputs(json=SCHEMA, whitespace_pattern=" ?")),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}, "response_format": {"type": "text"}},
         StructuredOutputs(choice=("a", "b"))),
        ({"response_format": {"type": "text"}}, None),
    ],
)
@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_the_form_of_the_output_becomes_a_grammar(serve: Serve, path: str, fields: dict[str, Any],
                                                         same_as: StructuredOutputs | None) -> None:
    service = serve()
    base = {TEXT: {"prompt": "Hello"}, CHAT: {"messages": HI}}[path]
    async with client_of(service) as client:
        assert (await client.post(path, json={**base, "n": 2, **fields})).status_code == 200
    special = service.tokenizer.special_token_ids
    expected = grammar_of(same_as, special) if same_as else ""
    assert [request.grammar for request in service.engine.seen] == [expected] * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "metadata": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}",
    ],
)  # fmt: skip
async def test_bodies_that_are_no_requests(serve: Serve, content: bytes) -> None:
    async with client_of(serve()) as client:
        for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
            response = await client.post(path, content=content, headers={"content-type": "application/json"})
            assert_error(response, 400, response.json()["error"]["param"])


@pytest.mark.parametrize("body", [
    {"prompt": [1.5] * 20_000}, {"prompt": [[-1]] * 20_000}, {"prompt": "x", "allowed_token_ids": [-1] * 20_000},
    {"prompt": "x", "logit_bias": {f"x{i}": 1 for i in range(20_000)}}, {f"x{i}": 1 for i in range(20_000)},
], ids=lambda body: str(list(body)[:2]))  # fmt: skip
def test_of_many_errors_few_are_made(body: dict[str, Any]) -> None:
    """32 MB can break a rule 8 million times; an error for each would take gigabytes."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate_json(json.dumps(body))
    message = str(explain(caught.value))
    assert caught.value.error_count() < 10 or "too many" in message
    assert len(message) < 200


async def test_status_codes_of_the_protocol(serve: Serve) -> None:
    async with client_of(serve()) as client:
        assert_error(await client.get("/nothing"), 404, None, "/nothing")
        assert_error(await client.get(TEXT), 405, None, "GET")
        assert_error(await client.delete("/v1/models"), 405, None)
        assert_error(await client.post(TEXT, data={"prompt": "x"}), 415, None, "application/json")
        assert_error(await client.post(TEXT, json={"prompt": "x", "model": "other"}), 404, None, "other", "tiny")
        assert_error(await client.get("/v1/models/other"), 404, None, "other")


async def test_a_body_over_the_limit_is_refused_before_it_is_read(serve: Serve) -> None:
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield b" " * 100

    async with client_of(serve(config={"max_body_bytes": 1000})) as client:
        assert_error(await client.post(TEXT, json={"prompt": "x" * 1000}), 413, None, "1000 bytes")
        response = await client.post(TEXT, content=body(), headers={"content-type": "application/json"})
        assert_error(response, 413, None, "1000 bytes")
        assert sent < 20


async def test_api_key(serve: Serve) -> None:
    async with client_of(serve(config={"api_keys": ("one", "two"), "admin_api_key": "root"})) as client:
        for path in ("/health", "/ping", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200
        for value in ("", "Bearer", "Bearer three", "Basic one", "Bearer root", "Bearer \xe9"):
            response = await client.get("/v1/models", headers={"authorization": value.encode("latin-1")})
            assert_error(response, 401, None, "API key")
            assert response.headers["www-authenticate"] == "Bearer"
        for key in ("one", "two"):
            assert (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code == 200
        for path in ("/flush_cache", "/reset_prefix_cache", "/flush_cache/"):
            assert (await client.post(path, headers={"authorization": "Bearer one"})).status_code == 401
        assert (await client.post("/flush_cache", headers={"authorization": "Bearer root"})).json() == {"success": True}


async def test_overload_and_death(serve: Serve) -> None:
    service = serve(room=0)
    for stream in (False, True):
        body = {"prompt": "x", "stream": stream}
        async with client_of(service) as client:
            response = await client.post(TEXT, json=body)
            assert_error(response, 429, None, "waiting")
            assert response.headers["retry-after"] == "3"
            service.engine.dead = True
            assert_error(await client.post(TEXT, json=body), 503, None, "engine")
            assert_error(await client.get("/health"), 503, None)
            assert_error(await client.post("/flush_cache"), 503, None)
            service.engine.dead = False


async def test_a_draining_server_takes_nothing_new(serve: Serve) -> None:
    service = serve()
    service.lifecycle.draining = True
    async with client_of(service) as client:
        assert_error(await client.post(CHAT, json={"messages": HI}), 503, None, "shutting down")
        assert (await client.get("/metrics")).status_code == 200


async def test_the_other_endpoints(serve: Serve) -> None:
    service = serve(config={"api_keys": (), "admin_api_key": None})
    async with client_of(service) as client:
        [card] = (await client.get("/v1/models")).json()["data"]
        assert card == (await client.get("/v1/models/tiny")).json()
        assert card["id"] == "tiny" and card["owned_by"] == "vllm" and card["max_model_len"] == 256
        assert (await client.get("/health")).content == b""
        assert (await client.head("/health")).status_code == 200
        assert (await client.get("/version")).json() == {"version": "0.1.0"}
        assert (await client.get("/load")).json() == {"server_load": 0}
        info = (await client.get("/server_info")).json()
        assert info["engine"]["num_pages"] == 100 and "api_keys" not in info["config"]
        assert (await client.post("/reset_prefix_cache")).json() == {"success": True} and service.engine.flushed == 1


async def test_a_model_of_several_names(serve: Serve) -> None:
    async with client_of(serve(config={"served_model_aliases": ("other",)})) as client:
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["tiny", "other"]
        assert (await client.get("/v1/models/other")).json()["id"] == "other"
        for name in ("tiny", "other"):
            answer = await client.post(TEXT, json={"prompt": "x", "model": name})
            assert answer.status_code == 200 and answer.json()["model"] == "tiny"
        assert_error(await client.post(TEXT, json={"prompt": "x", "model": "third"}), 404, None, "'tiny' or 'other'")


async def test_tokenize_and_detokenize(serve: Serve) -> None:
    async with client_of(serve()) as client:
        answer = (await client.post("/tokenize", json={"prompt": "Hello world", "return_token_strs": True})).json()
        assert answer == {"count": 2, "max_model_len": 256, "tokens": [259, 264], "token_strs": ["Hello", " world"]}
        assert (await client.post("/detokenize", json={"tokens": [259, 264]})).json() == {"prompt": "Hello world"}
        answer = (await client.post("/tokenize", json={"messages": HI, "add_generation_prompt": False})).json()
        text = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()["prompt"]
        assert text == "<|im_start|>user\nhi<|im_end|>\n"
        assert (await client.post("/tokenize", json={"prompt": ""})).json()["count"] == 0
