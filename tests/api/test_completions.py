import asyncio
import json
from typing import Any

import httpx
import pytest

from serving.api.service import Service
from tests.api.conftest import Serve, client_of
from tests.api.fakes import byte_tokenizer

pytestmark = pytest.mark.anyio
EOS = byte_tokenizer().eos_ids[0]


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of a stream's frames, whose framing is checked."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    *frames, rest = response.text.split("\n\n")
    assert rest == "" and frames.pop() == "data: [DONE]"
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


async def complete(service: Service, **body: Any) -> dict[str, Any]:
    async with client_of(service) as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(service: Service, **body: Any) -> list[dict[str, Any]]:
    async with client_of(service) as client:
        return chunks_of(await client.post("/v1/completions", json={**body, "stream": True}))


async def test_a_completion(serve: Serve) -> None:
    body = await complete(serve(), model="tiny", prompt="Hello", request_id="mine", user="u", metadata={"a": 1})
    assert body.pop("created") > 0
    assert body == {
        "id": "cmpl-mine", "object": "text_completion", "model": "tiny", "system_fingerprint": "pageloom-0.1.0",
        "choices": [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop",
                     "stop_reason": None}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4,
                  "prompt_tokens_details": {"cached_tokens": 4}},
    }  # fmt: skip


async def test_openai_default_of_16_tokens(serve: Serve) -> None:
    body = await complete(serve("a" * 40), prompt="Hello")
    assert body["usage"]["completion_tokens"] == 16 and body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "prompt, ids",
    [
        ("Hello", [[259]]),
        (["Hello", "a"], [[259], [64]]),
        ([259, 64], [[259, 64]]),
        ([[259], [64, 64]], [[259], [64, 64]]),
    ],
)
async def test_the_four_kinds_of_prompt(serve: Serve, prompt: Any, ids: list[list[int]]) -> None:
    service = serve()
    body = await complete(service, prompt=prompt, n=2, best_of=2)
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(ids)))
    assert [request.prompt_token_ids for request in service.engine.seen] == [one for one in ids for _ in range(2)]
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_streamed_and_whole_answers_agree(serve: Serve) -> None:
    fields = {"prompt": ["Hello", "ab"], "n": 2, "logprobs": 2, "echo": True, "return_token_ids": True}
    whole = await complete(serve("Hello world, DEF", per_step=2), stop="DE", **fields)
    chunks = await stream(serve("Hello world, DEF", per_step=2), stop="DE",
                          stream_options={"include_usage": True}, **fields)
    assert chunks.pop()["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for part in parts for x in part["logprobs"][key]] == choice["logprobs"][key]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"] == "DE"


async def test_usage_in_a_stream_is_null_until_the_end_or_in_every_chunk(serve: Serve) -> None:
    assert all("usage" not in chunk for chunk in await stream(serve(), prompt="Hello"))
    *chunks, last = await stream(serve(), prompt="Hello", stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks) and last["choices"] == []
    chunks = await stream(serve(), prompt="Hello", stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]


@pytest.mark.parametrize("max_tokens", [0, 1, 8])
async def test_echo_with_logprobs(serve: Serve, max_tokens: int) -> None:
    prompt = "\n1. Carol has 20"
    body = await complete(serve("€ ok"), prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens)
    [choice] = body["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    if max_tokens == 0:
        assert choice["text"] == prompt and choice["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 0


async def test_echo_leaves_out_the_bos_that_nobody_wrote(serve: Serve) -> None:
    service = serve(tokenizer=byte_tokenizer(bos=True))
    bos = service.tokenizer.bos_id
    body = await complete(service, prompt=[bos, 64], echo=True, logprobs=0, max_tokens=0)
    assert body["choices"][0]["logprobs"]["tokens"] == ["", "a"] and body["choices"][0]["text"] == "a"


async def test_prompt_logprobs(serve: Serve) -> None:
    service = serve()
    [first, second] = (await complete(service, prompt=[64, 65], prompt_logprobs=2, n=2))["choices"]
    assert first["prompt_logprobs"] == second["prompt_logprobs"]
    assert first["prompt_logprobs"][0] is None
    assert first["prompt_logprobs"][1]["65"] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    assert [r.sampling.prompt_logprobs for r in service.engine.seen] == [2, None], "computed once"


async def test_every_sampling_field_reaches_the_engine(serve: Serve) -> None:
    service = serve()
    fields = {
        "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 1.5,
        "presence_penalty": -1.5, "repetition_penalty": 1.2, "seed": -5, "ignore_eos": True, "logprobs": 3,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    }  # fmt: skip
    await complete(service, prompt="Hello", max_tokens=9, stop=["x", "y"], stop_token_ids=[5], bad_words=["bad"],
                   logit_bias={"7": -3.5}, allowed_token_ids=[1, 2], cache_salt="salt", **fields)
    [request] = service.engine.seen
    sampling = request.sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.max_tokens, sampling.stop, sampling.stop_token_ids) == (9, ("x", "y"), (5,))
    assert (sampling.logit_bias, sampling.allowed_token_ids, sampling.bad_words) == ({7: -3.5}, (1, 2), ("bad",))
    assert request.cache_salt == "salt" and request.bad_words_token_ids == ((65, 64, 67),)


async def test_null_means_the_default(serve: Serve) -> None:
    service = serve()
    await complete(service, prompt="Hello")
    nulls = {name: None for name in ("temperature", "n", "stop", "seed", "top_k", "logit_bias", "stream", "echo")}
    await complete(service, prompt="Hello", **nulls)
    first, second = (request.sampling for request in service.engine.seen)
    assert first.temperature == second.temperature == 1.0 and second.stop == () and second.top_k == 0


async def test_stop_token_is_reported(serve: Serve) -> None:
    body = await complete(serve(), prompt="Hello", stop_token_ids=[EOS])
    assert body["choices"][0]["stop_reason"] == EOS


async def test_truncated_prompt(serve: Serve) -> None:
    service = serve()
    await complete(service, prompt=[1, 2, 3, 4], truncate_prompt_tokens=2)
    assert service.engine.seen[0].prompt_token_ids == [3, 4]


async def test_two_live_requests_may_have_the_same_id(serve: Serve) -> None:
    service = serve("abc", gate=asyncio.Event())
    async with client_of(service) as client:
        body = {"prompt": "Hello", "request_id": "same"}
        answers = asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(3)))
        while len(service.engine.live) < 3:
            await asyncio.sleep(0.001)
        service.engine.gate.set()
        assert [answer.json()["choices"][0]["text"] for answer in await answers] == ["abc"] * 3


async def test_an_answer_may_have_as_many_prompts_as_allowed(serve: Serve) -> None:
    body = await complete(serve("a"), prompt=[[64]] * 200, max_tokens=1)
    assert [choice["index"] for choice in body["choices"]] == list(range(200))
