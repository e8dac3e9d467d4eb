"""Real processes for the tests: `python -m serve`, and the gateway before it. Each is found by what it prints."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

import httpx
import psutil

ROOT = Path(__file__).parents[2]
START_SECONDS = 600  # a cold compilation cache on a slow machine
READY = re.compile(r"Ready after .* at (http://\S+)/v1")
NONE: Mapping[str, str] = MappingProxyType({})
GRPC = re.compile(r"gRPC .* at (\S+)")


def environment() -> dict[str, str]:
    """This process' environment without what tests/conftest.py set for simulated devices."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XLA", "JAX"))}
    return {**kept, "JAX_PLATFORMS": "cpu"}


def serve(*flags: str) -> list[str]:
    return [sys.executable, "-m", "serve", *flags]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.05)


class Process:
    """A child that logs to a file. Leaving the `with` block kills it and all that it has started. `variables` join its
    environment."""

    def __init__(self, command: list[str], log: Path, variables: Mapping[str, str] = NONE):
        self.log_path = log
        with log.open("wb") as out:
            self.popen = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT,
                                          env={**environment(), **variables})  # fmt: skip
        self.pid = self.popen.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def wait(self, seconds: float) -> int:
        """Its exit code, negative for a signal."""
        return self.popen.wait(seconds)

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait_for(self, pattern: re.Pattern[str], seconds: float) -> re.Match[str]:
        def found() -> bool:
            assert self.popen.poll() is None, f"it ended with {self.popen.returncode}: {self.log[-3000:]}"
            return pattern.search(self.log) is not None

        wait_until(found, seconds, f"{pattern.pattern} in the log")
        match = pattern.search(self.log)
        assert match is not None
        return match

    def __enter__(self):
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        family = [self.popen]
        if self.popen.poll() is None:
            family += psutil.Process(self.pid).children(recursive=True)
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        self.popen.wait(60)


class Server(Process):
    """A server that is ready. Ports are free ones; `flags` come after those that every server here gets."""

    def __init__(self, *flags: str, log: Path, variables: Mapping[str, str] = NONE):
        super().__init__(serve("--port", "0", "--grpc-port", "0", "--dtype", "float32", *flags), log, variables)
        try:
            self.url = self.wait_for(READY, START_SECONDS)[1]
            self.grpc_address = self.wait_for(GRPC, 60)[1]
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.core = psutil.Process(self.pid).children()[0]

    def post(self, path: str, body: object, timeout: float = 120, **options) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout, **options)

    def complete(self, prompt: str | list[int], **fields) -> dict:
        """The only choice of a completion, with its token ids; greedy unless told otherwise."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 16, "return_token_ids": True, **fields}
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    def tokenize(self, text: str) -> list[int]:
        return self.post("/tokenize", {"prompt": text}).json()["tokens"]

    def metrics(self) -> dict[str, float]:
        """Values by name; of a metric with several labels their sum."""
        values: dict[str, float] = {}
        for line in httpx.get(self.url + "/metrics", timeout=60).text.splitlines():
            if not line.startswith("#"):
                name, value = line.split("{")[0].split(" ")[0], float(line.rsplit(" ", 1)[1])
                values[name] = values.get(name, 0.0) + value
        return values

    def is_idle(self) -> bool:
        """Nothing runs, nothing waits, and no sequence holds a page."""
        now = self.metrics()
        return not any(now[f"vllm:{name}"] for name in
                       ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"))

    def wait_idle(self, seconds: float = 120) -> None:
        wait_until(self.is_idle, seconds, f"idle; now {self.metrics()}")


class Gateway(Process):
    """The SMG gateway, routing to one server over gRPC."""

    def __init__(self, server: Server, log: Path):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__([str(Path(sys.executable).with_name("smg")), "launch",
                          "--worker-urls", f"grpc://{server.grpc_address}", "--worker-startup-check-interval", "1",
                          "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
                          "--policy", "round_robin", "--tool-call-parser", "mistral",
                          "--disable-retries"], log)  # fmt: skip
        try:
            self.wait_for(re.compile("Successfully loaded tokenizer"), 180)  # from the server, over gRPC
        except BaseException:
            self.__exit__(None, None, None)
            raise
