"""Many clients, rude ones, and a pool that is too small for them: every request ends right and every page comes back.
The servers check their books after every step, and die if those are wrong."""

import asyncio
import json
import random

import httpx
import pytest

from tests.e2e.servers import Server

pytestmark = pytest.mark.slow

WORDS = "the sea a red house my old dog and snow over quiet hills she said that two of them ran home".split()


def make_requests(count: int, seed: int, longest: int) -> list[dict]:
    """Greedy requests of 1 to `longest` words of prompt, several with a common beginning."""
    rng = random.Random(seed)
    shared = " ".join(rng.choices(WORDS, k=longest // 2))
    bodies = []
    for _ in range(count):
        own = " ".join(rng.choices(WORDS, k=rng.randint(1, longest // 2)))
        prompt = f"{shared} {own}" if rng.random() < 0.3 else own
        bodies.append({"prompt": prompt, "max_tokens": rng.randint(1, 40), "temperature": 0, "return_token_ids": True,
                       "ignore_eos": True})  # fmt: skip
    return bodies


async def complete(client: httpx.AsyncClient, body: dict) -> list[int]:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == body["max_tokens"]
    return choice["token_ids"]


async def drop_mid_stream(client: httpx.AsyncClient, body: dict, tokens: int) -> None:
    """Reads some tokens and hangs up."""
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            tokens -= line.startswith("data: {")
            if tokens <= 0:
                return


async def give_up(client: httpx.AsyncClient, body: dict, seconds: float) -> None:
    """Hangs up after a while, maybe before anything has come."""
    try:
        await asyncio.wait_for(client.post("/v1/completions", json=body), seconds)
    except TimeoutError:
        pass


def connect(server: Server, clients: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    return httpx.AsyncClient(base_url=server.url, timeout=250, limits=limits)


async def unhurried(server: Server, bodies: list[dict]) -> list[list[int]]:
    """What a server says that has room for all it is asked at once."""
    slots = asyncio.Semaphore(16)

    async def one(client: httpx.AsyncClient, body: dict) -> list[int]:
        async with slots:
            return await complete(client, body)

    async with connect(server, 16) as client:
        return await asyncio.gather(*(one(client, body) for body in bodies))


@pytest.mark.timeout(900)
def test_200_requests_with_cancels_in_a_pool_too_small(server: Server, small_pool: Server):
    rng = random.Random(2)
    # 16 that run at once and outgrow the pool: 16 x 64 tokens of 640. The others come while these run.
    first = [{**body, "max_tokens": 64} for body in make_requests(16, seed=7, longest=24)]
    bodies = first + make_requests(184, seed=1, longest=24)
    fates = ["finish"] * 16 + rng.choices(["finish", "drop", "give up", "too long"], [20, 30, 30, 20], k=184)
    delays = [0.0] * 16 + [0.5 + rng.random() * 4 for _ in range(184)]
    kept = [body for body, fate in zip(bodies, fates, strict=True) if fate == "finish"]

    async def meet(client: httpx.AsyncClient, body: dict, fate: str, delay: float) -> list[int] | None:
        await asyncio.sleep(delay)
        if fate == "finish":
            return await complete(client, body)
        if fate == "drop":
            await drop_mid_stream(client, body, rng.randint(1, 8))
        elif fate == "give up":
            await give_up(client, body, rng.random() * 3)
        else:
            response = await client.post("/v1/completions", json={**body, "prompt": "sea " * rng.randint(512, 4000)})
            assert response.status_code == 400 and "context" in response.json()["error"]["message"]
        return None

    async def everyone() -> list[list[int] | None]:
        async with connect(small_pool, 200) as client:
            return await asyncio.gather(*(meet(client, *one) for one in zip(bodies, fates, delays, strict=True)))

    before = small_pool.metrics()["vllm:num_preemptions_total"]
    outputs = [output for output in asyncio.run(everyone()) if output is not None]
    small_pool.wait_idle()
    assert small_pool.metrics()["vllm:num_preemptions_total"] > before
    assert outputs == asyncio.run(unhurried(server, kept))


def test_64_clients_at_once(server: Server):
    bodies = make_requests(64, seed=3, longest=100)

    async def everyone() -> list[list[int]]:
        async with connect(server, 64) as client:
            return await asyncio.gather(*(complete(client, body) for body in bodies))

    assert asyncio.run(everyone()) == asyncio.run(unhurried(server, bodies))
    server.wait_idle()


@pytest.mark.parametrize("waiting", [False, True], ids=["mid-stream", "while waiting"])
def test_100_clients_hang_up(server: Server, waiting: bool):
    bodies = [{**body, "max_tokens": 400} for body in make_requests(100, seed=4, longest=40)]

    async def everyone() -> None:
        async with connect(server, 100) as client:
            if waiting:  # 16 run at a time; most of these never start
                await asyncio.gather(*(give_up(client, body, 1.0) for body in bodies))
            else:
                tokens = iter(range(1, 101))
                # As each hangs up the next comes in.
                await asyncio.gather(*(drop_mid_stream(client, body, next(tokens) % 5 + 1) for body in bodies))

    before = server.metrics()
    asyncio.run(everyone())
    server.wait_idle()
    after = server.metrics()
    made = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    assert made < 100 * 400 / 4, "they were served to the end"
    assert server.complete(bodies[0]["prompt"], max_tokens=4)["token_ids"]


def test_preemption_is_constant_and_invisible(server: Server, small_pool: Server):
    bodies = [{**body, "max_tokens": 60} for body in make_requests(20, seed=5, longest=60)]

    async def everyone() -> list[list[int]]:
        async with connect(small_pool, 20) as client:
            return await asyncio.gather(*(complete(client, body) for body in bodies))

    before = small_pool.metrics()["vllm:num_preemptions_total"]
    outputs = asyncio.run(everyone())
    small_pool.wait_idle()
    assert small_pool.metrics()["vllm:num_preemptions_total"] > before
    assert outputs == asyncio.run(unhurried(server, bodies))


def test_streams_under_load_spell_what_is_said_at_once(server: Server):
    bodies = make_requests(32, seed=6, longest=30)

    async def streamed(client: httpx.AsyncClient, body: dict) -> str:
        text = ""
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def everyone() -> list[str]:
        async with connect(server, 32) as client:
            return await asyncio.gather(*(streamed(client, body) for body in bodies))

    async def at_once() -> list[str]:
        async with connect(server, 32) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [answer.json()["choices"][0]["text"] for answer in answers]

    assert asyncio.run(everyone()) == asyncio.run(at_once())
