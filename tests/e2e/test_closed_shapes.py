"""Nothing compiles while serving, whatever is asked for. (Every shared server is held to that again when it ends.)"""

import asyncio

import httpx

from tests.e2e.servers import Server

LONG = "All work and no play makes Jack a dull boy. " * 80  # about 960 tokens

OPTIONS: tuple[dict, ...] = (
    {}, {"temperature": 1}, {"temperature": 0.7, "top_k": 5}, {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.1}, {"temperature": 1, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    {"presence_penalty": 1.5}, {"frequency_penalty": -1.5}, {"repetition_penalty": 1.3},
    {"logit_bias": {"100": 5, "200": -100}}, {"allowed_token_ids": list(range(100, 900))}, {"bad_words": ["sea"]},
    {"min_tokens": 4}, {"stop_token_ids": [30, 28]}, {"ignore_eos": True}, {"n": 5, "temperature": 1},
    {"logprobs": 0}, {"logprobs": 20}, {"prompt_logprobs": 0}, {"prompt_logprobs": 20}, {"echo": True, "logprobs": 5},
    {"stop": ["x", "y"], "include_stop_str_in_output": True}, {"prompt": LONG}, {"prompt": LONG, "prompt_logprobs": 3},
    {"prompt": LONG, "n": 3, "temperature": 1, "logprobs": 2, "presence_penalty": 1}, {"prompt": [5]},
    {"n": 16, "temperature": 2, "frequency_penalty": 2, "repetition_penalty": 2, "logprobs": 20,
     "logit_bias": {"5": 3}, "min_tokens": 2},
)  # fmt: skip


def test_a_mixed_workload_compiles_nothing(server: Server):
    bodies = [{"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, **options} for options in OPTIONS]

    async def together() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=500) as client:
            answers = [client.post("/v1/completions", json=body) for body in bodies]
            return await asyncio.gather(*answers)

    alone = [server.post("/v1/completions", body) for body in bodies]
    server.post("/flush_cache", None)
    for response in alone + asyncio.run(together()):
        assert response.status_code == 200, response.text
    after = server.metrics()
    assert after["pageloom:compile_misses_total"] == 0
    assert after["pageloom:steps_total"] > 100
