"""The core's loop in a thread: the same client, with the fake runner that checks every access."""

import asyncio
import random
import threading
import time
from concurrent.futures import Future

import msgspec
import pytest

from serving.config import EngineConfig
from serving.engine.in_process import InProcessClient
from serving.errors import EngineDead, InvalidRequest, Overloaded
from tests.engine.fake_runner import EOS, FakeRunner, expected_outputs
from tests.engine.harness import make_request, random_requests, random_tokens
from tests.engine.seed_runner import SeedRunner, build, make_info, outputs, request


def make_client(runner=None, compile_grammar=None, **config) -> InProcessClient:
    runner = runner or FakeRunner()
    engine = EngineConfig(check_integrity=True, **config)
    return InProcessClient(runner, make_info(runner), EOS, engine, compile_grammar)


async def collect(client, a_request):
    tokens, last = [], None
    async for event in client.generate(a_request):
        tokens += event.new_token_ids
        last = event
    return tokens, last


async def rest(stream) -> list[int]:
    return [token async for event in stream for token in event.new_token_ids]


@pytest.mark.parametrize("caching", [True, False])
def test_500_requests_with_random_cancels_in_a_tiny_pool(caching):
    rng = random.Random(1)
    runner = FakeRunner(num_pages=23, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=48)
    client = make_client(runner, enable_prefix_caching=caching)
    bases = [random_tokens(rng, 40) for _ in range(3)]
    requests = [r for i in range(400) for r in random_requests(rng, str(i), bases, 48)][:500]
    for a_request in requests:
        runner.register(a_request)

    async def one(a_request):
        await asyncio.sleep(rng.random() * 0.5)
        patience = rng.choice([None, None, None, 0.0, 0.01, 0.1])
        if patience is None:
            return await collect(client, a_request)
        try:
            return await asyncio.wait_for(collect(client, a_request), patience)
        except TimeoutError:
            return None

    async def main():
        results = await asyncio.gather(*map(one, requests))
        for a_request, result in zip(requests, results, strict=True):
            if result is not None:
                tokens, last = result
                assert (tokens, last.finish_reason, last.stop_token_id) == expected_outputs(a_request, 48)
        assert sum(result is not None for result in results) > 200
        await client.shutdown(1.0)

    asyncio.run(main())
    for group in client.scheduler.groups:
        assert group.kv.num_held == 0 and group.kv.flush() and group.kv.pool.num_free == group.kv.pool.num_usable
    assert client.scheduler.stats.num_preemptions > 0


def test_event_loops_in_several_threads():
    client = make_client(SeedRunner(EngineConfig(), step_seconds=0.001))
    results = {}

    def work(name: int) -> None:
        async def main():
            return await asyncio.gather(
                *(collect(client, request(f"{name}-{i}", seed=10 * name + i, max_tokens=20)) for i in range(10))
            )

        results[name] = asyncio.run(main())

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, its_results in results.items():
        assert [tokens for tokens, _ in its_results] == [outputs(10 * name + i, 20) for i in range(10)]
    assert len(results) == 4
    asyncio.run(client.shutdown(1.0))


def test_shutdown_flush_and_refusals():
    async def main():
        client = make_client(SeedRunner(EngineConfig(), step_seconds=0.001))
        with pytest.raises(InvalidRequest, match="the prompt has 0 tokens"):
            await collect(client, request("a", prompt_len=0))
        assert await client.flush_cache()
        stream = client.generate(request("a", seed=4, max_tokens=1000, prompt_len=40, ignore_eos=True))
        first = await anext(stream)  # from here on it runs
        live = asyncio.create_task(rest(stream))
        assert not await client.flush_cache()
        await client.shutdown(60.0)
        assert first.new_token_ids + await live == outputs(4, 1000)
        for call in (collect(client, request("b")), client.flush_cache()):
            with pytest.raises(EngineDead, match="the engine was shut down"):
                await call
        await client.abort("b")
        await client.shutdown(5.0)

    asyncio.run(main())


def test_a_runner_error_ends_all_requests_and_is_logged(caplog):
    async def main():
        config = EngineConfig(model="fail at step 5")
        runner, info, eos_ids, _ = build(config)
        client = InProcessClient(runner, info, eos_ids, config)
        results = await asyncio.gather(*(collect(client, request(str(i), max_tokens=100)) for i in range(20)))
        assert {last.finish_reason for _, last in results} == {"error"}
        assert all("the fake device broke" in last.error for _, last in results)
        await asyncio.to_thread(client._thread.join)
        with pytest.raises(EngineDead, match="the fake device broke"):
            client.check_health()

    asyncio.run(main())
    assert "RuntimeError: the fake device broke" in caplog.text


def test_requests_that_wait_for_their_grammars_count_as_waiting():
    compiling = {"0": Future(), "1": Future()}

    async def main():
        client = make_client(compile_grammar=compiling.__getitem__, max_num_waiting=2)
        grammars = [msgspec.structs.replace(request(i), grammar=i) for i in compiling]
        bad, aborted = (asyncio.create_task(collect(client, a_request)) for a_request in grammars)
        while client.stats.num_waiting < 2:
            await asyncio.sleep(0.001)
        with pytest.raises(Overloaded, match="2 requests are waiting, the limit is 2"):
            await collect(client, request("c"))
        aborted.cancel()
        compiling["0"].set_exception(InvalidRequest("what a grammar"))
        with pytest.raises(InvalidRequest, match="what a grammar"):
            await bad
        while client.stats.num_waiting:
            await asyncio.sleep(0.001)
        await client.shutdown(1.0)
        assert compiling["1"].cancelled()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_steps_overlap():
    """The next step is dispatched before the last one is fetched, and the books split the time."""
    log = []

    class Logged(SeedRunner):
        def dispatch(self, plan):
            log.append(f"dispatch {self.steps}")
            return super().dispatch(plan)

        def fetch(self, handle):
            log.append("fetch")
            return super().fetch(handle)

    async def main():
        client = make_client(Logged(EngineConfig(), step_seconds=0.001))
        await collect(client, request("a", max_tokens=3))
        await client.shutdown(1.0)
        assert client.stats.steps == 3 and client.stats.batch_tokens == 7 and client.stats.generation_tokens == 3

    asyncio.run(main())
    assert log == ["dispatch 0", "dispatch 1", "fetch", "dispatch 2", "fetch", "fetch"]


def test_the_first_event_tells_queue_time_and_cached_tokens():
    async def main():
        runner = FakeRunner(page_size=4)
        client = make_client(runner)
        a_request = make_request("a", list(range(2, 20)))
        runner.register(a_request)
        await collect(client, a_request)
        event = await anext(client.generate(a_request))
        assert event.num_cached_tokens == 16
        other = make_client(SeedRunner(EngineConfig(max_num_seqs=1), step_seconds=0.01))
        blocker = other.generate(request("blocker", max_tokens=100, ignore_eos=True))
        await anext(blocker)
        waiting = time.time()
        event = await anext(other.generate(request("x", max_tokens=1)))  # about a second later
        assert 0.05 < event.queue_time <= time.time() - waiting
        assert len(await rest(blocker)) == 99
        await client.shutdown(1.0)
        await other.shutdown(1.0)

    asyncio.run(main())
