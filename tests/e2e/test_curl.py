"""What the README shows, typed as it is there."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.e2e.servers import Server

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def curl(*arguments: str) -> str:
    return subprocess.run(["curl", "-sS", "--fail-with-body", "--max-time", "60", *arguments], check=True,
                          capture_output=True, text=True, timeout=70).stdout  # fmt: skip


def test_the_line_that_start_prints(server: Server):
    command = next(line.strip() for line in server.log.splitlines() if line.strip().startswith("curl "))
    shown = subprocess.run(command + " -sS", shell=True, check=True, capture_output=True, text=True, timeout=60).stdout
    assert "Paris" in json.loads(shown)["choices"][0]["message"]["content"]


def test_chat(server: Server):
    answer = json.loads(curl(f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d",
                             json.dumps({"messages": FRANCE, "temperature": 0})))  # fmt: skip
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "The capital of France is Paris."} | {
        name: value for name, value in answer["choices"][0]["message"].items() if name not in ("role", "content")}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


@contextmanager
def choices(server: Server, max_tokens: int) -> Iterator[Iterator[dict]]:
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True,
            "stream": True, "return_token_ids": True}  # fmt: skip
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:])["choices"][0] for line in response.iter_lines() if line.startswith("data: {"))


def test_a_stream_brings_each_token_when_it_is_made(server: Server):
    server.wait_idle()
    with choices(server, max_tokens=900) as long:
        assert next(long)["token_ids"] and server.metrics()["vllm:num_requests_running"] == 1, "it waited for others"
    with choices(server, max_tokens=64) as short:
        made = list(short)
    assert len(made) > 4 and all(choice["token_ids"] for choice in made), "a busy processor makes some share a delta"
    whole = server.complete("Once upon a time", max_tokens=64, ignore_eos=True)
    assert sum((choice["token_ids"] for choice in made), []) == whole["token_ids"]
    assert "".join(choice["text"] for choice in made) == whole["text"]


def test_operations(server: Server):
    for path in ("/health", "/ping"):
        assert curl(server.url + path) == ""
    assert json.loads(curl(server.url + "/v1/models"))["data"][0]["max_model_len"] == 1024
    assert json.loads(curl(server.url + "/version"))["version"]
    assert json.loads(curl(server.url + "/server_info"))["engine"]["num_pages"] == 512
    text = "Grüße, 世界 🙂"
    ids = json.loads(curl(server.url + "/tokenize", "--json", json.dumps({"prompt": text})))["tokens"]
    assert json.loads(curl(server.url + "/detokenize", "--json", json.dumps({"tokens": ids}))) == {"prompt": text}
    assert json.loads(curl(server.url + "/flush_cache", "-X", "POST"))["success"]
