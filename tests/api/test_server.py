"""Start and end of the process's front ends."""

import asyncio
import contextlib
import os
import signal
import socket

import httpx
import openai
import pytest

from serving.api.http.protocol import MAX_HEAD_BYTES
from serving.api.server import bind_ports, serve_apis
from serving.config import ServerConfig
from serving.errors import ConfigError, EngineDead
from tests.api.conftest import SECONDS, Serve, listening, until

pytestmark = pytest.mark.anyio
PORTS = {"port": 0, "grpc_port": 0}


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_busy_port_is_told_at_once(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        config = ServerConfig(**{**PORTS, flag[2:].replace("-", "_"): port})
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use.*{flag}"):
            bind_ports(config)


def test_a_reserved_port_is_busy_for_others() -> None:
    ports = bind_ports(ServerConfig(port=0, grpc_port=0))
    assert ports.grpc_port is not None
    for port in (ports.http_port, ports.grpc_port):
        with pytest.raises(ConfigError, match="in use"):
            bind_ports(ServerConfig(port=port))
    ports.close()


def test_a_port_can_be_had_again_at_once():
    ports = bind_ports(ServerConfig(port=0))
    ports.listen()
    port = ports.http_port
    client = socket.create_connection(("127.0.0.1", ports.http_port))
    connection, _ = ports.http.accept()
    connection.close()  # the server first: its end of the connection lingers
    assert client.recv(1) == b""
    client.close()
    ports.close()
    bind_ports(ServerConfig(port=port)).close()


def test_an_impossible_address() -> None:
    for host, port in (("no.such.host.invalid", 0), ("127.0.0.1", 70000), ("203.0.113.1", 0)):
        with pytest.raises(ConfigError, match=f"cannot bind {host}:{port}"):
            bind_ports(ServerConfig(host=host, port=port))


async def test_sigterm_lets_live_requests_finish(serve: Serve) -> None:
    service = serve("abc", gate=asyncio.Event(), config=PORTS)

    async def shutdown(grace_seconds: float) -> None:
        async with asyncio.timeout(grace_seconds):
            while service.engine.live:
                await asyncio.sleep(0.01)

    service.engine.shutdown = shutdown
    ports, ready = bind_ports(service.config), asyncio.Event()
    serving = asyncio.ensure_future(serve_apis(service, ports, ready.set))
    await ready.wait()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.http_port}", timeout=SECONDS) as client:
        calls = [asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x", "stream": stream}))
                 for stream in (True, False)]
        await until(lambda: len(service.engine.live) == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: service.lifecycle.draining)
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 503
        service.engine.gate.set()
        streamed, whole = await asyncio.gather(*calls)
        assert streamed.text.endswith("data: [DONE]\n\n") and whole.json()["choices"][0]["text"] == "abc"
        assert await asyncio.wait_for(serving, SECONDS) == 0
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")


async def test_a_second_signal_is_not_graceful(serve: Serve) -> None:
    service = serve("abc", gate=asyncio.Event(), config=PORTS)
    graces: list[float] = []

    async def shutdown(grace_seconds: float) -> None:
        graces.append(grace_seconds)
        await asyncio.sleep(grace_seconds)

    service.engine.shutdown = shutdown
    ready = asyncio.Event()
    serving = asyncio.ensure_future(serve_apis(service, bind_ports(service.config), ready.set))
    await ready.wait()
    os.kill(os.getpid(), signal.SIGINT)
    await until(lambda: service.lifecycle.draining)
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(serving, SECONDS) == 0
    assert graces == [30.0, 0.0]


async def test_the_engines_death_ends_the_process(serve: Serve) -> None:
    service = serve("abc", gate=asyncio.Event(), config=PORTS)
    ports, ready = bind_ports(service.config), asyncio.Event()
    serving = asyncio.ensure_future(serve_apis(service, ports, ready.set))
    await ready.wait()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.http_port}", timeout=SECONDS) as client:
        whole = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
        await until(lambda: len(service.engine.live) == 1)
        service.engine.dead = True
        service.engine.gate.set()
        answer = await whole
        assert answer.status_code == 503 and "engine" in answer.json()["error"]["message"]
        assert await asyncio.wait_for(serving, SECONDS) == 1


@pytest.mark.parametrize("error, told", [(EngineDead("the engine core is gone"), '"code":503'),
                                         (ValueError("a secret"), "internal error: ValueError")])  # fmt: skip
async def test_an_error_in_mid_stream_is_told_in_the_stream(serve: Serve, error: Exception, told: str) -> None:
    service = serve("abcdef", config=PORTS)
    async with listening(service) as ports, httpx.AsyncClient(timeout=SECONDS) as client:
        url = f"http://127.0.0.1:{ports.http_port}/v1/completions"
        real, count = service.engine.check_health, 0

        def dying() -> None:
            nonlocal count
            count += service.engine.stats.generation_tokens > 2
            if count:
                raise error
            real()

        service.engine.check_health = dying
        answer = await client.post(url, json={"prompt": "x", "stream": True})
        frames = answer.text.split("\n\n")
        assert told in frames[-3] and "secret" not in frames[-3] and frames[-2] == "data: [DONE]"


async def test_the_openai_client(serve: Serve) -> None:
    service = serve("Hello world", config={**PORTS, "api_keys": ("key",)})
    async with listening(service) as ports:
        url = f"http://127.0.0.1:{ports.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
            messages = [{"role": "user", "content": "hi"}]
            answer = await client.chat.completions.create(model="tiny", messages=messages, logprobs=True)
            assert answer.choices[0].message.content == "Hello world"
            again = await client.chat.completions.create(model="tiny", messages=[*messages, answer.choices[0].message])
            assert again.choices[0].finish_reason == "stop"
            stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True,
                                                          stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world"
            assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3
            text = await client.completions.create(model="tiny", prompt="x", echo=True, logprobs=1, max_tokens=2)
            assert text.choices[0].text == "xHello world"
            raw = await client.completions.create(model="tiny", prompt="x", extra_body={"top_k": 5}, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in raw]) == "Hello world"
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await client.completions.create(model="tiny", prompt="x", temperature=5)
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="other", prompt="x")
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def test_an_oversized_body_over_a_socket(serve: Serve) -> None:
    service = serve(config={**PORTS, "max_body_bytes": 1000})
    async with listening(service) as ports, httpx.AsyncClient(timeout=SECONDS) as client:
        async def chunks():
            for _ in range(100):
                yield b" " * 1000

        url = f"http://127.0.0.1:{ports.http_port}/v1/completions"
        with contextlib.suppress(httpx.WriteError):  # the server may close while we are still sending
            answer = await client.post(url, content=chunks(), headers={"content-type": "application/json"})
            assert answer.status_code == 413
        assert (await client.get(f"http://127.0.0.1:{ports.http_port}/health")).status_code == 200


async def _answer(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    with contextlib.closing(writer):
        return await asyncio.wait_for(reader.readline(), SECONDS)


async def test_an_offer_of_http2_and_endless_headers(serve: Serve) -> None:
    """The offer as Java's client makes it."""
    body = b'{"prompt": "hi"}'
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    async with listening(serve(config=PORTS)) as ports:
        for headers in (upgrade, b"x: " + b"y" * 200_000 + b"\r\n"):
            assert await _answer(ports.http_port, head + headers + b"\r\n" + body) == b"HTTP/1.1 200 OK\r\n"
        endless = head + b"x: " + b"y" * (MAX_HEAD_BYTES + 1)
        assert await _answer(ports.http_port, endless) == b"HTTP/1.1 400 Bad Request\r\n"
