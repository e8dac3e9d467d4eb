"""The `openai` package, unmodified."""

import asyncio
import math
from collections.abc import Callable
from typing import Literal

import openai
import pydantic
import pytest

from tests.e2e.servers import Server

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
STORY = "Once upon a time, in a small village by the sea,"


def test_chat(client: openai.OpenAI, model: str):
    answer = client.chat.completions.create(model=model, messages=FRANCE, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.model == model and answer.choices[0].finish_reason == "stop"


def test_streams_spell_the_whole_answer(client: openai.OpenAI, model: str):
    whole = client.completions.create(model=model, prompt=STORY, temperature=0, max_tokens=24)
    chunks = list(client.completions.create(model=model, prompt=STORY, temperature=0, max_tokens=24, stream=True,
                                            stream_options={"include_usage": True}))  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24
    with client.chat.completions.stream(model=model, messages=FRANCE, temperature=0) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "The capital of France is Paris."


def test_async_clients_at_once(server: Server, model: str):
    async def ask(client: openai.AsyncOpenAI, name: str) -> str:
        stream = await client.completions.create(model=model, prompt=f"{name} lives in", temperature=0,
                                                 max_tokens=12, stream=True)  # fmt: skip
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everyone() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
            names = ["The bear", "The whale", "My uncle", "The king", "The cat"]
            together = await asyncio.gather(*(ask(client, name) for name in names))
            return together, [await ask(client, name) for name in names]

    together, alone = asyncio.run(everyone())
    assert together == alone and len(set(alone)) == 5


def test_logprobs(client: openai.OpenAI, model: str):
    answer = client.chat.completions.create(model=model, messages=FRANCE, temperature=0, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    spelled = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert spelled.decode() == answer.choices[0].message.content + "<|im_end|>" or (
        spelled.decode() == answer.choices[0].message.content)  # fmt: skip
    for token in logprobs.content:
        assert token.logprob == max(top.logprob for top in token.top_logprobs) <= 0  # greedy takes the best
        assert len(token.top_logprobs) == 3
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) < 1 + 1e-5


def test_several_answers_and_seeds(client: openai.OpenAI, model: str):
    def sample(seed: int) -> list[str]:
        choices = client.completions.create(model=model, prompt=STORY, temperature=1, n=3, seed=seed,
                                            max_tokens=12).choices  # fmt: skip
        assert [choice.index for choice in choices] == [0, 1, 2]
        return [choice.text for choice in choices]

    first = sample(7)
    assert len(set(first)) == 3
    assert sample(7) == first
    assert sample(8)[0] == first[1], "sequence i of n is the one that seed + i makes"
    assert sample(100) != first


def test_stop(client: openai.OpenAI, model: str):
    text = client.completions.create(model=model, prompt=STORY, temperature=0, max_tokens=32).choices[0].text
    stop = text[20:26]
    choice = client.completions.create(model=model, prompt=STORY, temperature=0, max_tokens=32, stop=[stop]).choices[0]
    assert choice.text == text[: text.index(stop)] and choice.finish_reason == "stop"
    cut = client.completions.create(model=model, prompt=STORY, temperature=0, max_tokens=3).choices[0]
    assert text.startswith(cut.text) and cut.finish_reason == "length"


def test_usage_tells_what_came_from_the_cache(client: openai.OpenAI, model: str):
    prompt = "The cache of this very prompt was empty. " * 12
    usages = [client.completions.create(model=model, prompt=prompt, max_tokens=4).usage for _ in range(2)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]  # type: ignore[union-attr]
    assert cached[0] == 0
    assert usages[1].prompt_tokens - 17 <= cached[1] < usages[1].prompt_tokens  # type: ignore[union-attr]


class City(pydantic.BaseModel):
    name: Literal["Paris", "London"]
    country: str = pydantic.Field(max_length=20)
    is_capital: bool


def test_parsed_answers(client: openai.OpenAI, model: str):
    """`parse` sends a schema with `strict` and reads the answer with it."""
    answer = client.chat.completions.parse(model=model, messages=FRANCE, temperature=0, max_tokens=60,
                                           response_format=City)  # fmt: skip
    city = answer.choices[0].message.parsed
    assert city is not None and len(city.country) > 2
    with client.chat.completions.stream(model=model, messages=FRANCE, temperature=0, max_tokens=60,
                                        response_format=City) as stream:  # fmt: skip
        assert stream.get_final_completion().choices[0].message.parsed == city
    chosen = client.completions.create(model=model, prompt="The capital of France is", temperature=0,
                                       extra_body={"structured_outputs": {"choice": [" London", " Paris"]}})
    assert chosen.choices[0].text == " Paris" and chosen.choices[0].finish_reason == "stop"
    for schema in ({"type": "object", "not": {"required": ["a"]}}, {"type": "integer", "minimum": 2, "maximum": 1}):
        with pytest.raises(openai.BadRequestError, match="not is not supported|minimum") as caught:
            client.chat.completions.create(model=model, messages=FRANCE, stream=True, response_format={
                "type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        assert caught.value.param == "response_format"


def test_errors(client: openai.OpenAI, model: str):
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model=model, prompt="x", temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="gpt-17"):
        client.completions.create(model="gpt-17", prompt="x")
    with pytest.raises(openai.NotFoundError, match="gpt-17"):
        client.models.retrieve("gpt-17")
    with pytest.raises(openai.BadRequestError, match="unclosed group"):
        client.completions.create(model=model, prompt="x", extra_body={"structured_outputs": {"regex": "("}})
    with pytest.raises(openai.BadRequestError, match="guided_json"):
        client.completions.create(model=model, prompt="x", extra_body={"guided_json": {}})
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=model, prompt=[5] * 1024)


def test_api_keys(start_tiny: Callable[..., Server]):
    server = start_tiny("--api-key", "sesame", "--api-key", "second")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame", timeout=60, max_retries=0) as client:
        model = client.models.list().data[0].id
        assert client.completions.create(model=model, prompt="x", max_tokens=2).choices[0].finish_reason == "length"
        assert client.with_options(api_key="second").models.list().data
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").completions.create(model=model, prompt="x", max_tokens=2)
