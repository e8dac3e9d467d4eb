"""Starts `python -m serve` for a measurement, and reads a server's own numbers."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.bench_lib.client import BenchError

START_TIMEOUT = 600.0
STOP_TIMEOUT = 60.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def get(url: str, timeout: float = 10.0) -> bytes:
    with urllib.request.urlopen(url, timeout=timeout) as reply:
        return reply.read()


def model_name(url: str) -> str:
    try:
        return json.loads(get(f"{url}/v1/models"))["data"][0]["id"]
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise BenchError(f"no server answers at {url}: {error}") from error


def wait_ready(url: str, process: subprocess.Popen, log: Path) -> None:
    """Returns when /health answers 200; raises with the log's end when the server ends or stays silent."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise BenchError(f"the server ended with code {process.returncode}; the end of {log}:\n{tail}")
        try:
            get(f"{url}/health", timeout=2)
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.1)
    raise BenchError(f"the server was not ready after {START_TIMEOUT:.0f} s; see {log}")


@contextmanager
def running_server(arguments: list[str], log: Path) -> Iterator[tuple[str, float]]:
    """Yields (url, seconds from start to ready) of a server on a free port; its output goes to `log`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "-m", "serve", "--port", str(port), *arguments],
                                   stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_ready(url, process, log)
        yield url, time.monotonic() - start
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def scrape(url: str) -> dict[str, float]:
    """The server's metrics as {name or name{part}: value}; empty where it has none."""
    try:
        text = get(f"{url}/metrics").decode()
    except urllib.error.URLError:
        return {}
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = re.match(r'([\w:]+)(\{[^}]*\})? (\S+)$', line)
        if match:
            part = re.search(r'part="(\w+)"', match[2] or "")
            name = match[1] + (f"{{{part[1]}}}" if part else "")
            found[name] = found.get(name, 0.0) + float(match[3])
    return found


def engine_split(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """ms a step by part, and the share of the host's work (all but waiting for the device), between two scrapes."""
    steps = after.get("pageloom:steps_total", 0.0) - before.get("pageloom:steps_total", 0.0)
    if steps <= 0:
        return {}
    prefix = "pageloom:step_seconds_total{"
    seconds = {name[len(prefix):-1]: value - before.get(name, 0.0)
               for name, value in after.items() if name.startswith(prefix)}
    split = {f"{part}_ms": round(value / steps * 1e3, 3) for part, value in seconds.items()}
    total = sum(seconds.values())
    host = total - seconds.get("device", 0.0)
    misses = "pageloom:compile_misses_total"
    return {"steps": steps, **split, "host_share": round(host / total, 4) if total else 0.0,
            "compile_misses": after.get(misses, 0.0) - before.get(misses, 0.0)}
