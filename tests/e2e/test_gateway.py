"""The SMG gateway, unmodified, routes to the server over gRPC and gets the tokenizer from it."""

import asyncio
import json

import httpx
import openai

from tests.e2e.servers import Gateway, Server, wait_until

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
LONG = {"messages": [{"role": "user", "content": "Write a long story."}], "temperature": 0, "max_tokens": 900,
        "ignore_eos": True, "stream": True}  # fmt: skip


def model_of(gateway: Gateway) -> str:
    return httpx.get(f"{gateway.url}/v1/models", timeout=60).json()["data"][0]["id"]


def test_chat(gateway: Gateway, server: Server):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        before = server.metrics()["vllm:generation_tokens_total"]
        answer = client.chat.completions.create(model=model_of(gateway), messages=FRANCE, temperature=0)
        assert answer.choices[0].message.content == "The capital of France is Paris."
        assert answer.choices[0].finish_reason == "stop"
        chunks = list(client.chat.completions.create(model=model_of(gateway), messages=FRANCE, temperature=0,
                                                     stream=True))  # fmt: skip
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(parts) == "The capital of France is Paris."
        assert sum(map(bool, parts)) > 1, "a busy processor makes some tokens share a chunk"
    assert server.metrics()["vllm:generation_tokens_total"] == before + 16


def test_sampling_fields_arrive(gateway: Gateway, server: Server):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        model = model_of(gateway)

        def ask(**fields) -> str | None:
            return client.chat.completions.create(model=model, messages=FRANCE, **fields).choices[0].message.content

        assert ask(temperature=0, max_completion_tokens=3) == "The capital of"
        assert ask(temperature=0, stop=["France"]) == "The capital of "
        assert ask(temperature=1, seed=3, max_tokens=8) == ask(temperature=1, seed=3, max_tokens=8)
        logprobs = client.chat.completions.create(model=model, messages=FRANCE, temperature=0, logprobs=True,
                                                  top_logprobs=2).choices[0].logprobs  # fmt: skip
    assert logprobs is not None and logprobs.content is not None
    body = {"messages": FRANCE, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    direct = server.post("/v1/chat/completions", body)
    expected = [token["logprob"] for token in direct.json()["choices"][0]["logprobs"]["content"]]
    ours = [token.logprob for token in logprobs.content]
    assert all(abs(a - b) < 1e-3 for a, b in zip(ours, expected, strict=False))


def test_calls_are_forced(gateway: Gateway):
    """With a structural tag, for the gateway reads Mistral's format here. How many there are is the model's choice."""
    unit = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"],
            "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": unit}}]
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", timeout=120, json={
        "model": model_of(gateway), "messages": FRANCE, "temperature": 0, "max_tokens": 40, "tools": tools,
        "tool_choice": "required"})  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert "get_weather" in json.dumps(answer.json()["choices"][0]["message"])


def test_two_at_once(gateway: Gateway):
    async def both() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as client:
            def ask(country: str):
                question = f"What is the capital of {country}?"
                return client.post("/v1/chat/completions", json={
                    "model": model_of(gateway), "messages": [{"role": "user", "content": question}], "temperature": 0})

            return await asyncio.gather(ask("France"), ask("Germany"))

    answers = [response.json()["choices"][0]["message"]["content"] for response in asyncio.run(both())]
    assert "Paris" in answers[0] and "Berlin" in answers[1]


def test_dropping_a_stream_aborts_the_request(gateway: Gateway, server: Server):
    server.wait_idle()
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json={"model": model_of(gateway), **LONG},
                      timeout=120) as response:  # fmt: skip
        lines = response.iter_lines()
        for _ in range(5):
            json.loads(next(line for line in lines if line.startswith("data: "))[6:])
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 1, 60, "the request runs")
    generated = server.metrics()["vllm:generation_tokens_total"]
    server.wait_idle()
    assert server.metrics()["vllm:generation_tokens_total"] < generated + 600, "it was not cut short"
