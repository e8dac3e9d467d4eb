import asyncio
from typing import Any

import pytest

from serving.api.service import Service
from tests.api.conftest import SECONDS, Serve, client_of
from tests.api.test_completions import EOS, chunks_of

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def chat(service: Service, **body: Any) -> dict[str, Any]:
    async with client_of(service) as client:
        response = await client.post("/v1/chat/completions", json={"messages": HI, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(service: Service, **body: Any) -> list[dict[str, Any]]:
    async with client_of(service) as client:
        body = {"messages": HI, **body, "stream": True}
        return chunks_of(await client.post("/v1/chat/completions", json=body))


def prompt_of(service: Service) -> str:
    return service.tokenizer.decode(service.engine.seen[-1].prompt_token_ids, skip_special_tokens=False)


async def test_a_chat(serve: Serve) -> None:
    service = serve()
    body = await chat(service)
    assert prompt_of(service) == PROMPT
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == "Hello world"
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 3


async def test_without_max_tokens_the_context_is_the_limit(serve: Serve) -> None:
    service = serve()
    await chat(service)
    request = service.engine.seen[0]
    assert request.sampling.max_tokens == service.engine.info.max_model_len - len(request.prompt_token_ids)


async def test_a_streamed_chat(serve: Serve) -> None:
    chunks = await stream(serve(), stream_options={"include_usage": True}, n=2)
    usage = chunks.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    for index in (0, 1):
        deltas = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(delta["delta"]["content"] for delta in deltas) == "Hello world"
        assert all("role" not in delta["delta"] for delta in deltas[1:])
        assert [d["finish_reason"] for d in deltas if d["finish_reason"]] == ["stop"]


async def test_logprobs(serve: Serve) -> None:
    [choice] = (await chat(serve("a€"), logprobs=True, top_logprobs=2, return_token_ids=True))["choices"]
    content = choice["logprobs"]["content"]
    assert bytes(b for token in content[:-1] for b in token["bytes"]).decode() == "a€"
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    assert len(content) == len(choice["token_ids"])
    [choice] = (await chat(serve(), logprobs=True))["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    chunks = await stream(serve("a€"), logprobs=True, top_logprobs=2)
    assert [token for c in chunks for token in (c["choices"][0]["logprobs"] or {"content": []})["content"]] == content


async def test_content_in_parts(serve: Serve) -> None:
    service = serve()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await chat(service, messages=[{"role": "user", "content": parts}])
    assert "one\ntwo" in prompt_of(service)


async def test_a_message_may_say_that_it_is_text(serve: Serve) -> None:
    """As lm-eval's local-chat-completions does."""
    service = serve()
    for message in ({"role": "user", "content": "x"}, {"role": "user", "content": "x", "type": "text"}):
        await chat(service, messages=[message])
    assert len({tuple(request.prompt_token_ids) for request in service.engine.seen}) == 1  # type: ignore[attr-defined]


async def test_our_answers_may_be_sent_back(serve: Serve) -> None:
    service = serve()
    answer = (await chat(service))["choices"][0]["message"]
    await chat(service, messages=[*HI, {**answer, "tool_calls": None, "annotations": []}, *HI])
    assert "assistant\nHello world<|im_end|>" in prompt_of(service)


@pytest.mark.parametrize(
    "fields, prompt",
    [
        ({"add_generation_prompt": False}, "<|im_start|>user\nhi<|im_end|>\n"),
        ({"chat_template": "{{ messages[0].content }}!"}, "hi!"),
        ({"chat_template": "{{ mood }}", "chat_template_kwargs": {"mood": "calm"}}, "calm"),
        ({"chat_template": "{{ documents[0].text }}", "documents": [{"text": "a page"}]}, "a page"),
    ],
)
async def test_template_fields(serve: Serve, fields: dict[str, Any], prompt: str) -> None:
    service = serve()
    await chat(service, **fields)
    assert prompt_of(service) == prompt


async def test_the_final_message_can_be_continued(serve: Serve) -> None:
    service = serve()
    await chat(service, messages=[*HI, {"role": "assistant", "content": "The capital is"}], continue_final_message=True)
    assert prompt_of(service).endswith("assistant\nThe capital is")


async def test_the_servers_own_template(serve: Serve) -> None:
    service = serve(config={"chat_template": "Q: {{ messages[0].content }}"})
    await chat(service)
    assert prompt_of(service) == "Q: hi"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit(serve: Serve, field: str) -> None:
    body = await chat(serve(), **{field: 2})
    assert body["usage"]["completion_tokens"] == 2 and body["choices"][0]["finish_reason"] == "length"


async def test_prompt_fields_of_the_answer(serve: Serve) -> None:
    body = await chat(serve(), prompt_logprobs=0, return_token_ids=True)
    assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"]) and body["prompt_logprobs"][0] is None
    assert body["choices"][0]["token_ids"][-1] == EOS
    chunks = await stream(serve(), return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"] and "prompt_token_ids" not in chunks[1]


async def test_neutral_values_of_later_features_are_taken(serve: Serve) -> None:
    await chat(serve(), tools=[], tool_choice="auto", response_format={"type": "text"}, parallel_tool_calls=True,
               structured_outputs=None, reasoning_effort=None, service_tier="auto", store=False, verbosity="medium",
               safety_identifier="x", prompt_cache_key="x", modalities=["text"])
    await stream(serve(), stream_options={"include_obfuscation": False})


async def test_endless_templates_hold_up_nobody_else(serve: Serve) -> None:
    loop = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    service = serve()
    async with client_of(service) as client:
        endless = [
            asyncio.ensure_future(client.post("/v1/chat/completions", json={"messages": HI, "chat_template": loop}))
            for _ in range(12)
        ]
        await asyncio.sleep(0.3)
        long = {"prompt": "Hello" * 20_000}  # tokenized in a thread
        answer = await asyncio.wait_for(client.post("/tokenize", json=long), SECONDS)
        assert answer.json()["count"] >= 20_000 and not any(one.done() for one in endless)
        for one in endless[2:]:
            one.cancel()
        for response in await asyncio.gather(*endless[:2]):
            assert response.status_code == 400 and "needs more than 2 s" in response.text
