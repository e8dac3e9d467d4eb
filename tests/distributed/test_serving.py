"""Two real hosts on one machine: `python -m serve` twice, four simulated devices each, over real sockets."""

import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.e2e.servers import Process, Server, free_port, serve, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = Path(__file__).parents[1] / "goldens" / "olmo2"
GOLDEN = np.load(MODEL / "golden.npz")
# As tests/runner/test_family_goldens.py has it in one process.
SIZES = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--num-pages", "40", "--block-size", "8",
         "--dtype", "float32", "--check-integrity")  # fmt: skip
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, '
          '"prompt_lookup_max": 3, "adaptive": false}')  # fmt: skip
SECONDS = 10  # from a host's death to the end of the service


@pytest.fixture(scope="module")
def flags(tokenizer: str) -> tuple[str, ...]:
    return ("--model", str(MODEL), "--tokenizer", tokenizer, *SIZES)


@dataclass
class Hosts:
    leader: Server
    follower: Process


def of_host(rank: int, port: int) -> tuple[str, ...]:
    return ("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", str(port))


def port_pair() -> int:
    """The first of two that are free now."""
    while True:
        port = free_port()
        with socket.socket() as second:
            try:
                second.bind(("127.0.0.1", port + 1))
                return port
            except OSError:
                pass


@contextmanager
def two_hosts(mesh: str, flags: tuple[str, ...], folder: Path) -> Iterator[Hosts]:
    port = port_pair()
    with ExitStack() as stack:
        command = serve(*flags, "--mesh", mesh, *of_host(1, port))
        follower = stack.enter_context(Process(command, folder / "follower.log", DEVICES))
        leader = stack.enter_context(
            Server(*flags, "--mesh", mesh, *of_host(0, port), log=folder / "leader.log", variables=DEVICES))
        yield Hosts(leader, follower)


def check_tokens(server: Server) -> None:
    """All prompts at once, against what transformers says and one process with eight devices gives."""
    answers: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        prompt = GOLDEN[f"prompt_{number}"].tolist()
        answers[number] = server.complete(prompt, max_tokens=16, ignore_eos=True)["token_ids"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: GOLDEN[f"greedy_{number}"].tolist() for number in range(3)}


def ask_for_long(server: Server) -> list[httpx.Response]:
    """Answers to a request that is under way when this returns, once they come."""
    answers: list[httpx.Response] = []
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)), daemon=True)
    thread.start()
    wait_until(lambda: server.metrics()["vllm:num_requests_running"] > 0, 60, "it runs")
    return answers


def test_tokens_and_the_death_of_a_follower(flags: tuple[str, ...], tmp_path: Path):
    with two_hosts("8x1", (*flags, *DRAFTS), tmp_path) as hosts:
        check_tokens(hosts.leader)
        grammar = {"structured_outputs": {"regex": "[a-c]{6}"}}
        assert re.fullmatch("[a-c]{6}", hosts.leader.complete([5, 6, 7], max_tokens=16, **grammar)["text"])
        metrics = hosts.leader.metrics()
        assert metrics["vllm:spec_decode_num_draft_tokens_total"] > 0
        assert metrics["pageloom:compile_misses_total"] == 0
        answers = ask_for_long(hosts.leader)
        hosts.follower.signal(signal.SIGKILL)
        assert hosts.leader.wait(SECONDS) == 1
        assert "host 1 (127.0.0.1) is gone" in hosts.leader.log
        wait_until(lambda: answers, 30, "the request is answered")
        assert answers[0].status_code >= 500 and "host 1 (127.0.0.1) is gone" in answers[0].text, answers[0].text


def test_tokens_of_two_groups_and_the_death_of_the_leader(flags: tuple[str, ...], tmp_path: Path):
    with two_hosts("4x2", flags, tmp_path) as hosts:
        check_tokens(hosts.leader)
        ask_for_long(hosts.leader)
        hosts.leader.core.send_signal(signal.SIGKILL)
        assert hosts.follower.wait(SECONDS) == 1
        assert hosts.follower.log.splitlines()[-1].startswith("pageloom: host 0 (127.0.0.1) is gone")
        assert hosts.leader.wait(SECONDS) == 1


def refusal(process: Process) -> str:
    """The one line that it prints."""
    assert process.wait(120) == 2, process.log
    (line,) = (line for line in process.log.splitlines() if line.startswith("pageloom: "))
    assert "Traceback" not in process.log
    return line


def test_a_follower_that_never_comes(flags: tuple[str, ...], tmp_path: Path):
    port = port_pair()
    command = serve(*flags, "--mesh", "8x1", "--port", "0", *of_host(0, port), "--distributed-timeout-seconds", "1")
    with Process(command, tmp_path / "log", DEVICES) as leader:
        line = refusal(leader)
    for part in ("of 2 hosts", "host 1", "within 1 s", "--distributed-timeout-seconds", f"{port} and {port + 1}"):
        assert part in line


def test_a_leader_that_never_comes(flags: tuple[str, ...], tmp_path: Path):
    port = port_pair()
    command = serve(*flags, *of_host(1, port), "--distributed-timeout-seconds", "1")
    with Process(command, tmp_path / "log", DEVICES) as follower:
        line = refusal(follower)
    for part in ("host 0 (127.0.0.1)", f"port {port + 1}", "within 1 s", "refused"):
        assert part in line


def test_hosts_that_differ(flags: tuple[str, ...], tmp_path: Path):
    port = port_pair()
    with ExitStack() as stack:
        leader, follower = (
            stack.enter_context(Process(
                serve(*flags, "--mesh", "8x1", "--port", "0", *of_host(rank, port), "--max-model-len", length),
                tmp_path / str(rank), DEVICES))
            for rank, length in enumerate(("128", "64"))
        )  # fmt: skip
        for process in (leader, follower):
            assert "host 1 (127.0.0.1) differs from host 0 in --max-model-len: 64 there, 128 on" in refusal(process)


def test_a_mesh_that_leaves_a_host_out(flags: tuple[str, ...], tmp_path: Path):
    """Found only once all are one jax program: still one line, on both."""
    port = port_pair()
    with ExitStack() as stack:
        processes = [
            stack.enter_context(Process(serve(*flags, "--mesh", "4x1", "--port", "0", *of_host(rank, port)),
                                        tmp_path / str(rank), DEVICES))
            for rank in (0, 1)
        ]  # fmt: skip
        for process in processes:
            line = refusal(process)
            assert "4 of 8 devices" in line and "host 1" in line and "--mesh 8x1" in line
