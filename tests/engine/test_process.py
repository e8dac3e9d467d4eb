"""A core in its own process, with a runner that only pretends: starting, streaming, ending, and every way to die."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from serving.config import EngineConfig
from serving.engine.process import launch_core
from serving.engine.socket_client import SocketClient
from serving.errors import ConfigError, EngineDead, InvalidRequest, Overloaded
from tests.engine.seed_runner import outputs, request

pytestmark = pytest.mark.e2e


@contextlib.contextmanager
def core(**config):
    process = launch_core("tests.engine.seed_runner:build", EngineConfig(check_integrity=True, **config))
    try:
        yield process
    finally:
        process.kill()
        assert not Path(process.address.removeprefix("ipc://")).parent.exists()


@contextlib.asynccontextmanager
async def connected(process):
    client = await SocketClient.connect(process.address, process)
    try:
        yield client
    finally:
        await client.close()


async def collect(client, a_request):
    tokens, events = [], []
    async for event in client.generate(a_request):
        tokens += event.new_token_ids
        events.append(event)
    return tokens, events


async def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def all_pages_free(client):
    """Provokes steps until the books say so."""
    for i in range(100):
        await collect(client, request(f"probe{i}", max_tokens=1))
        if client.stats.kv_cache_usage == 0 and not client.stats.num_running and not client.stats.num_waiting:
            return
    raise AssertionError(client.stats)


def run(scenario, **config):
    """Runs `scenario(client, process)` against a fresh core."""

    async def main(process):
        async with connected(process) as client:
            await scenario(client, process)

    with core(**config) as process:
        asyncio.run(main(process))


# ---- start


def test_a_start_up_error_comes_back_as_its_one_line():
    with pytest.raises(ConfigError, match="^no model at /nowhere: give --model a path$"):
        launch_core("tests.engine.seed_runner:build", EngineConfig(model="bad config"))


def test_what_is_no_mistake_of_the_configuration_is_told_apart():
    """Another host is gone: launchers may start the same service again."""
    with pytest.raises(EngineDead, match="^host 1 is gone$"):
        launch_core("tests.engine.seed_runner:build", EngineConfig(model="a host gone"))


def test_a_bug_at_start_is_told_with_its_traceback(capfd):
    with pytest.raises(EngineDead, match="died at start with exit code 1; its error is above"):
        launch_core("tests.engine.seed_runner:build", EngineConfig(model="bug at start"))
    assert "RuntimeError: a bug in start-up" in capfd.readouterr().err


def test_a_kill_at_start_is_named():
    with pytest.raises(EngineDead, match="at start with signal SIGKILL; as the kernel ends what needs too much"):
        launch_core("tests.engine.seed_runner:build", EngineConfig(model="killed at start"))


def test_connecting_to_nobody():
    async def main():
        with pytest.raises(EngineDead, match=r"no engine core answers at ipc:///tmp/nobody-there within 0.2 s"):
            await SocketClient.connect("ipc:///tmp/nobody-there", timeout=0.2)

    asyncio.run(main())


# ---- service


def test_64_clients_at_once():
    async def scenario(client, process):
        assert client.info == process.info and client.info.max_num_seqs == 16
        results = await asyncio.gather(*(collect(client, request(str(i), seed=i, max_tokens=30)) for i in range(64)))
        for i, (tokens, events) in enumerate(results):
            assert tokens == outputs(i, 30) and events[-1].finish_reason == "length"
        assert client.stats.generation_tokens == 64 * 30 and client.stats.num_running == 0
        assert {"schedule", "pack", "dispatch", "device", "fetch"} == client.stats.step_seconds.keys()
        assert await client.flush_cache()

    run(scenario, model="fast")


def test_two_front_ends_share_a_core():
    async def scenario(client, process):
        async with connected(process) as other:
            mine, theirs = await asyncio.gather(collect(client, request("a", seed=1)), collect(other, request("b")))
            assert mine[0] == outputs(1, 8) and theirs[0] == outputs(0, 8)
            await other.abort("unknown")
        await all_pages_free(client)

    run(scenario)


def test_refusals_are_raised_as_what_they_are():
    async def scenario(client, process):
        with pytest.raises(InvalidRequest, match="the prompt has 5000 tokens") as info:
            await collect(client, request("a", prompt_len=5000))
        assert info.value.param == "prompt"
        crowd = [asyncio.create_task(collect(client, request(str(i), seed=i, max_tokens=50))) for i in range(12)]
        done = await asyncio.gather(*crowd, return_exceptions=True)
        refused = [result for result in done if isinstance(result, Overloaded)]
        assert refused and "the limit is 3" in str(refused[0])
        assert all(isinstance(result, (Overloaded, tuple)) for result in done)
        await all_pages_free(client)

    run(scenario, max_num_seqs=2, max_num_waiting=3)


def test_a_live_id_cannot_be_used_again():
    async def scenario(client, process):
        stream = client.generate(request("a", max_tokens=1000))
        await anext(stream)
        with pytest.raises(InvalidRequest, match="'a' is already live"):
            await collect(client, request("a"))
        async with connected(process) as other:
            with pytest.raises(InvalidRequest, match="'a' is already live"):
                await collect(other, request("a"))
        await anext(stream)
        await stream.aclose()
        with pytest.raises(InvalidRequest, match="'a' is already live"):  # until the core has ended it
            await collect(client, request("a"))
        await until(lambda: not client._streams)
        assert (await collect(client, request("a")))[0] == outputs(0, 8)

    run(scenario)


def test_events_of_a_slow_consumer_are_merged():
    async def scenario(client, process):
        stream = client.generate(request("a", seed=3, max_tokens=100, logprobs=0))
        events = [await anext(stream)]
        await until(lambda: not client._streams)  # the core's last word is here
        events += [event async for event in stream]
        assert len(events) <= 2 and events[-1].finish_reason == "length"
        assert sum((event.new_token_ids for event in events), []) == outputs(3, 100)
        assert sum(len(event.logprobs) for event in events) == 100

    run(scenario)


# ---- ends of requests


def test_abort_and_dropped_iterators():
    async def scenario(client, process):
        aborted = asyncio.create_task(collect(client, request("a", max_tokens=1000)))
        dropped = client.generate(request("b", max_tokens=1000))
        await anext(dropped)
        await dropped.aclose()
        cancelled = asyncio.create_task(collect(client, request("c", max_tokens=1000)))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        await client.abort("a")
        tokens, events = await aborted
        assert events[-1].finish_reason == "abort" and tokens == outputs(0, len(tokens))
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await all_pages_free(client)

    run(scenario)


def test_100_clients_leave_in_mid_stream_or_while_waiting():
    async def scenario(client, process):
        tasks = [asyncio.create_task(collect(client, request(str(i), seed=i, max_tokens=1000))) for i in range(100)]
        await until(lambda: client.stats.num_waiting > 80 and client.stats.generation_tokens > 100)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await all_pages_free(client)
        assert await client.flush_cache()

    run(scenario)


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_front_end_that_disappears_takes_its_requests_along(how):
    code = """
        import asyncio, sys
        from tests.engine.seed_runner import request
        from serving.engine.socket_client import SocketClient
        async def main():
            client = await SocketClient.connect(sys.argv[1])
            async for event in client.generate(request("theirs", max_tokens=3000)):
                print(event.new_token_ids, flush=True)
                if sys.argv[2] == "closed":
                    await client.close()
                    return
        asyncio.run(main())
    """

    async def scenario(client, process):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), process.address, how], stdout=subprocess.PIPE, env=environment
        ) as other:
            assert await asyncio.to_thread(other.stdout.readline)
            if how == "killed":
                await until(lambda: client.stats.num_running == 1)
                other.kill()
        await all_pages_free(client)

    run(scenario)


# ---- ends of the core


def test_kill_9_is_noticed():
    async def scenario(client, process):
        tasks = [asyncio.create_task(collect(client, request(str(i), max_tokens=1000))) for i in range(5)]
        await until(lambda: client.stats.num_running == 5)
        flushing = asyncio.create_task(client.flush_cache())
        process.process.kill()
        for result in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
            assert isinstance(result, EngineDead) and str(result) == "the engine core died: signal SIGKILL"
        with contextlib.suppress(EngineDead):
            await flushing
        with pytest.raises(EngineDead):
            client.check_health()
        with pytest.raises(EngineDead):
            await collect(client, request("new"))
        await client.abort("0")
        await client.shutdown(1.0)

    run(scenario)


def test_a_device_error_ends_every_request_and_the_core(capfd):
    async def scenario(client, process):
        results = await asyncio.gather(*(collect(client, request(str(i), max_tokens=100)) for i in range(20)))
        for _, events in results:
            assert events[-1].finish_reason == "error" and "the fake device broke" in events[-1].error
        assert await asyncio.to_thread(process.wait, 30.0) == 1
        await until(lambda: client._dead is not None)
        with pytest.raises(EngineDead, match="exit code 1"):
            client.check_health()

    run(scenario, model="fail at step 5")
    assert "RuntimeError: the fake device broke" in capfd.readouterr().err


def test_shutdown_lets_requests_finish_in_time_and_takes_no_new_ones():
    async def scenario(client, process):
        live = asyncio.create_task(collect(client, request("a", max_tokens=300)))
        await until(lambda: client.stats.num_running == 1)
        closing = asyncio.create_task(client.shutdown(60.0))
        await asyncio.sleep(0)  # it has told the core
        with pytest.raises(EngineDead, match="shutting down"):
            await collect(client, request("late"))
        assert (await live)[0] == outputs(0, 300)
        await closing
        assert process.wait(0.0) == 0
        with pytest.raises(EngineDead, match="was shut down"):
            client.check_health()

    run(scenario)


def test_shutdown_aborts_what_does_not_end_in_time():
    async def scenario(client, process):
        live = asyncio.create_task(collect(client, request("a", max_tokens=3000)))
        await until(lambda: client.stats.num_running == 1)
        started = time.monotonic()
        await client.shutdown(0.3)
        assert 0.3 <= time.monotonic() - started < 25  # the request would take 30
        _, events = await live
        assert events[-1].finish_reason == "abort" and process.wait(0.0) == 0

    run(scenario)


@pytest.mark.parametrize("busy", [True, False])
def test_the_core_ends_with_its_parent(busy):
    code = """
        import asyncio
        from tests.engine.seed_runner import request
        from serving.config import EngineConfig
        from serving.engine.process import launch_core
        from serving.engine.socket_client import SocketClient
        async def main(process):
            client = await SocketClient.connect(process.address, process)
            print(process.process.pid, process.address.removeprefix("ipc://"), flush=True)
            async for _ in client.generate(request("a", max_tokens=BUSY)):
                pass
            await asyncio.sleep(60)
        asyncio.run(main(launch_core("tests.engine.seed_runner:build", EngineConfig())))
    """.replace("BUSY", "3000" if busy else "1")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, env=environment
    ) as parent:
        pid, path = parent.stdout.readline().decode().split()
        time.sleep(0.3)
        parent.kill()
    deadline = time.monotonic() + 20  # the request would take 30
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the core outlives its parent"
        time.sleep(0.02)
    assert not Path(path).parent.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_core_leaves_signals_to_its_parent(number):
    async def scenario(client, process):
        stream = client.generate(request("a", max_tokens=30))
        await anext(stream)
        process.process.send_signal(number)
        assert (await collect(client, request("b", seed=2)))[0] == outputs(2, 8)
        await stream.aclose()

    run(scenario)


def test_an_idle_core_uses_no_processor_time():
    async def scenario(client, process):
        await collect(client, request("a"))
        spent = []
        for _ in range(4):  # it may still be at the last of its work
            before = cpu_ticks(process.process.pid)
            await asyncio.sleep(1.5)
            spent.append(cpu_ticks(process.process.pid) - before)
            if spent[-1] <= 2:
                return
        raise AssertionError(spent)

    run(scenario)


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])
