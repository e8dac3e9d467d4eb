import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from serving.api.http.app import create_app
from serving.api.server import Ports, bind_ports, serve_apis
from serving.api.service import Service
from serving.tokenizer.tokenizer import Tokenizer
from tests.api.fakes import FakeEngine, byte_tokenizer, make_service

Serve = Callable[..., Service]
SECONDS = 60.0  # for what takes milliseconds, on a machine that is busy


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Serve:
    """Makes a service whose engine answers with `text`."""

    def make(text: str = "Hello world", *, tokenizer: Tokenizer = tokenizer, config: dict[str, Any] | None = None,
             **engine: Any) -> Service:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return make_service(FakeEngine(lambda _: ids, eos=tokenizer.eos_ids[0], **engine), tokenizer, **(config or {}))

    return make


@asynccontextmanager
async def client_of(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@asynccontextmanager
async def listening(service: Service) -> AsyncIterator[Ports]:
    """The whole service on real sockets of this process."""
    ports, ready = bind_ports(service.config), asyncio.Event()
    serving = asyncio.ensure_future(serve_apis(service, ports, ready.set))
    try:
        await asyncio.wait_for(ready.wait(), SECONDS)
        yield ports
    finally:
        if not serving.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(serving, SECONDS)


async def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def engine_stub(ports: Ports) -> AsyncIterator[vllm_engine_pb2_grpc.VllmEngineStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc_port}") as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)
