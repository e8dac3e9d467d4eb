"""Whoever leaves frees the engine: over real sockets, in mid-stream and while waiting."""

import asyncio

import httpx
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.api.conftest import SECONDS, Serve, engine_stub, listening, until

pytestmark = pytest.mark.anyio
PORTS = {"port": 0, "grpc_port": 0}


def streaming(url: str, **fields: object) -> tuple[str, str, dict[str, object]]:
    return "POST", f"{url}/v1/completions", {"prompt": ["Hello", "a"], "n": 2, "stream": True, **fields}


async def test_clients_that_leave_in_mid_stream(serve: Serve) -> None:
    service = serve("abcdefgh" * 20, gate=asyncio.Event(), config=PORTS)
    async with listening(service) as ports, httpx.AsyncClient(timeout=SECONDS) as client:
        service.engine.gate.set()
        method, url, body = streaming(f"http://127.0.0.1:{ports.http_port}", max_tokens=100)

        async def read_two_frames() -> None:
            async with client.stream(method, url, json=body) as response:
                frames = response.aiter_lines()
                for _ in range(4):
                    await anext(frames)
                service.engine.gate.clear()  # so that none can finish

        await asyncio.gather(*(read_two_frames() for _ in range(8)))
        await until(lambda: not service.engine.live)
        assert len(service.engine.aborted) == len(service.engine.seen) == 32
        await until(lambda: not service.lifecycle.live)


@pytest.mark.parametrize("stream", [True, False])
async def test_clients_that_leave_before_the_first_token(serve: Serve, stream: bool) -> None:
    service = serve("abc", gate=asyncio.Event(), config=PORTS)
    async with listening(service) as ports, httpx.AsyncClient(timeout=SECONDS) as client:
        method, url, body = streaming(f"http://127.0.0.1:{ports.http_port}", stream=stream)
        calls = [asyncio.ensure_future(client.request(method, url, json=body)) for _ in range(5)]
        await until(lambda: len(service.engine.live) == 20)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: not service.engine.live and not service.lifecycle.live)
        assert len(service.engine.aborted) == 20


async def test_a_stop_string_ends_the_sequence_in_the_engine(serve: Serve) -> None:
    service = serve("abc STOP" + "x" * 100, config=PORTS)
    async with listening(service) as ports, httpx.AsyncClient(timeout=SECONDS) as client:
        url = f"http://127.0.0.1:{ports.http_port}/v1/completions"
        body = {"prompt": "Hello", "stop": "STOP", "n": 3, "max_tokens": 90}
        answer = (await client.post(url, json=body)).json()
        assert [choice["text"] for choice in answer["choices"]] == ["abc "] * 3
        assert not service.engine.live and len(service.engine.aborted) == 3


async def test_a_grpc_stream_that_is_cancelled(serve: Serve) -> None:
    service = serve("abcdefgh", gate=asyncio.Event(), config=PORTS)
    async with listening(service) as ports, engine_stub(ports) as stub:
        request = pb.GenerateRequest(request_id="r", text="x", stream=True, sampling_params=pb.SamplingParams(n=2))
        waiting = [stub.Generate(request) for _ in range(3)]
        readers = [asyncio.ensure_future(call.read()) for call in waiting]
        await until(lambda: len(service.engine.live) == 6)
        for call in waiting:
            call.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await until(lambda: not service.engine.live)
        assert len(service.engine.aborted) == 6


async def test_grpc_abort_ends_the_stream_and_may_be_repeated(serve: Serve) -> None:
    service = serve("abcdefgh", gate=asyncio.Event(), config=PORTS)
    async with listening(service) as ports, engine_stub(ports) as stub:
        call = stub.Generate(pb.GenerateRequest(request_id="r", text="x", stream=True))

        async def read() -> list[pb.GenerateResponse]:
            return [message async for message in call]

        reading = asyncio.ensure_future(read())
        await until(lambda: len(service.engine.live) == 1)
        await stub.Abort(pb.AbortRequest(request_ids=["r", "unknown"]))
        service.engine.gate.set()
        assert (await reading)[-1].complete.finish_reason == "abort"
        await stub.Abort(pb.AbortRequest(request_ids=["r"]))
