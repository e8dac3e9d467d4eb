"""Servers shared by the tests of one pytest process. Everything runs offline, on free ports of 127.0.0.1."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from checkpoints.default_model import default_model_path
from tests.e2e.servers import Gateway, Server
from tests.e2e.tiny_model import write_tiny_model

# Few compiled shapes: what start-up costs with a cold cache.
REAL = ("--max-num-seqs", "16", "--max-num-batched-tokens", "128", "--check-integrity", "--enable-auto-tool-choice",
        "--tool-call-parser", "hermes")  # fmt: skip
TINY = ("--max-model-len", "4096", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--num-pages", "2049")
TEST_SECONDS = 600  # what takes seconds takes minutes where 30 processes share two cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_SECONDS))


def _check_and_stop(server: Server) -> None:
    server.wait_idle()
    assert server.metrics()["pageloom:compile_misses_total"] == 0
    assert "Traceback" not in server.log


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model with room for everything. All that the tests did to it must leave it idle and uncompiled."""
    flags = (*REAL, "--max-model-len", "1024", "--num-pages", "512")
    with Server(*flags, log=tmp_path_factory.mktemp("server") / "log") as server:
        yield server
        _check_and_stop(server)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="session")
def small_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model with a KV pool of 640 tokens: a few long sequences fill it."""
    flags = (*REAL, "--max-model-len", "512", "--num-pages", "41")
    with Server(*flags, log=tmp_path_factory.mktemp("small-pool") / "log") as server:
        yield server
        _check_and_stop(server)


@pytest.fixture(scope="session")
def tiny_flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return ("--model", str(folder), "--tokenizer", str(default_model_path()), *TINY)


@pytest.fixture
def start_tiny(tmp_path: Path, tiny_flags: tuple[str, ...]) -> Iterator[Callable[..., Server]]:
    """Starts servers of the test's own, which may come to harm."""
    with ExitStack() as stack:
        def start(*flags: str) -> Server:
            return stack.enter_context(Server(*tiny_flags, *flags, log=tmp_path / "log"))

        yield start


@pytest.fixture(scope="session")
def gateway(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(server, tmp_path_factory.mktemp("gateway") / "log") as gateway:
        yield gateway
