"""How the service ends: by signals, by the death of either process, and by what keeps it from starting."""

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.servers import Process, Server, serve, wait_until

# Seconds of work, however fast the machine.
LONG = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "return_token_ids": True}


def ends_within(process: psutil.Process, seconds: float) -> bool:
    """Whether it ends; a zombie has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


class Streaming(threading.Thread):
    """Streams one completion and keeps what came."""

    def __init__(self, server: Server, **fields):
        super().__init__(daemon=True)
        self.server, self.body = server, {**LONG, **fields, "stream": True}
        self.frames: list[dict] = []
        self.done = False  # [DONE] came
        self.error: Exception | None = None
        self.start()
        wait_until(lambda: self.frames or self.error, 60, "the stream starts")

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self.server.url}/v1/completions", json=self.body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self.frames.append(json.loads(line[6:]))
                    self.done |= line == "data: [DONE]"
        except httpx.HTTPError as error:
            self.error = error

    @property
    def finish_reason(self) -> str | None:
        return self.frames[-1]["choices"][0]["finish_reason"]


def occupied(server: Server) -> list[threading.Thread]:
    """Keeps the server busy with answers that nobody streams; `results` of each has its status."""
    def ask(results: list) -> None:
        try:
            results.append(httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60).status_code)
        except httpx.HTTPError as error:
            results.append(error)

    threads = []
    for _ in range(3):
        results: list = []
        thread = threading.Thread(target=ask, args=(results,), daemon=True)
        thread.results = results  # type: ignore[attr-defined]
        thread.start()
        threads.append(thread)
    wait_until(lambda: server.metrics()["vllm:num_requests_running"] >= 3, 60, "they run")
    return threads


def wait_until_it_drains(server: Server) -> None:
    wait_until(lambda: httpx.get(server.url + "/health", timeout=60).status_code == 503, 60, "it drains")


def assert_cut_short(stream: Streaming) -> None:
    stream.join(60)
    assert not stream.is_alive()
    assert stream.error or "error" in stream.frames[-1] or stream.finish_reason == "abort", stream.frames[-1]
    choices = [choice for frame in stream.frames for choice in frame.get("choices", ())]
    assert not any(choice["finish_reason"] == "length" for choice in choices)


def test_death_of_the_core(start_tiny: Callable[..., Server]):
    server = start_tiny()
    waiting = occupied(server)
    stream = Streaming(server)
    server.core.kill()
    start = time.monotonic()
    statuses = set()
    while server.popen.poll() is None:
        try:
            statuses.add(httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=5).status_code)
        except httpx.HTTPError:
            pass  # it stopped listening
        assert time.monotonic() - start < 60, "the front end outlived its engine"
    assert server.wait(60) == 1
    assert statuses <= {503}, statuses
    for thread in waiting:
        thread.join(60)
        assert thread.results == [503]  # type: ignore[attr-defined]
    stream.join(60)
    assert stream.error or "error" in stream.frames[-1]
    assert "the engine core died: signal SIGKILL" in server.log


def test_death_of_the_front_end_leaves_no_orphan(start_tiny: Callable[..., Server]):
    server = start_tiny()
    Streaming(server)
    server.signal(signal.SIGKILL)
    server.wait(60)
    assert ends_within(server.core, 60), "the core lives on"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_live_requests_finish(start_tiny: Callable[..., Server], number: signal.Signals):
    server = start_tiny("--shutdown-grace-seconds", "250")
    stream = Streaming(server, max_tokens=3800)
    server.signal(number)
    wait_until_it_drains(server)
    assert not stream.done, "too fast to tell anything"
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 503
    assert server.wait(280) == 0
    stream.join(60)
    assert stream.done and "error" not in stream.frames[-1], stream.frames[-1]
    assert stream.finish_reason == "length"
    assert sum(len(frame["choices"][0]["token_ids"]) for frame in stream.frames) == 3800
    assert ends_within(server.core, 60)


def test_after_the_grace_period_live_requests_are_cancelled(start_tiny: Callable[..., Server]):
    server = start_tiny("--shutdown-grace-seconds", "0.2")
    stream = Streaming(server, n=8)
    server.signal(signal.SIGTERM)
    assert server.wait(60) == 0
    assert_cut_short(stream)


def test_a_second_signal_means_now(start_tiny: Callable[..., Server]):
    server = start_tiny("--shutdown-grace-seconds", "250")
    stream = Streaming(server, n=8)
    server.signal(signal.SIGTERM)
    wait_until_it_drains(server)  # two signals that wait at once are one
    server.signal(signal.SIGTERM)
    assert server.wait(60) == 0
    assert_cut_short(stream)


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_busy_port(flag: str, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = ["--port", "0"] if flag == "--grpc-port" else []
        with Process(serve(*flags, flag, port, "--model", "/no/such/model"), tmp_path / "log") as process:
            assert process.wait(120) == 2
            lines = process.log.splitlines()  # nothing of the model: ports come before all that is slow
    assert len(lines) == 1 and port in lines[0] and "in use" in lines[0] and flag in lines[0], lines
