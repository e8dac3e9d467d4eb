"""Random workloads against the oracle, with and without grammars, in pools so small that preemption is constant. The
harness and the fake runner check everything after every step; here is only what happens."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.speculating import SpeculationParts
from serving.errors import InvalidRequest, Overloaded
from tests.engine.fake_grammar import random_language
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import Harness, random_requests, random_tokens


def make_harness(
    rng: random.Random,
    num_groups: int,
    make_runner: Callable[..., FakeRunner] = FakeRunner,
    speculation: Callable[[FakeRunner], SpeculationParts | None] = lambda runner: None,
) -> Harness:
    max_num_seqs = rng.choice([1, 2, 4, 8, 24])
    page_size = rng.choice([1, 2, 4, 8])
    max_model_len = rng.choice([24, 48, 80])
    full = -(-max_model_len // page_size)  # pages of one full sequence: the pool just fits it, or a few
    runner = make_runner(
        num_groups=num_groups,
        num_pages=1 + rng.choice([full // 2, full, full + 2, 2 * full, 3 * full, 8 * full]),
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 5, 30]),
        max_model_len=max_model_len,
    )
    return Harness(
        runner,
        overlap=rng.random() < 0.8,
        enable_prefix_caching=rng.random() < 0.7,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        long_prefill_token_threshold=rng.choice([0, 0, 3, 8]),
        max_num_waiting=rng.choice([5, 30]),
        speculation=speculation(runner),
    )


def play(
    rng: random.Random, num_groups: int, num_steps: int, make: Callable[[random.Random, int], Harness] = make_harness
) -> Harness:
    """Arrivals in bursts and lulls, aborts at any time, flushes; then everything must come to its end."""
    harness = make(rng, num_groups)
    max_len = harness.runner.max_model_len
    bases = [random_tokens(rng, max_len) for _ in range(3)]
    with_grammar = rng.choice([0, 0.1, 0.6])
    for step in range(num_steps):
        if rng.random() < 0.3 * num_groups:
            language = random_language(rng.randrange(99)) if rng.random() < with_grammar else None
            fast_forward = rng.random() < 0.8
            for request in random_requests(rng, str(step), bases, max_len):
                try:
                    harness.add(request, language, fast_forward)
                except (InvalidRequest, Overloaded):
                    assert request.request_id not in harness.runner.requests
        if harness.live and rng.random() < 0.05:
            harness.abort(rng.choice(list(harness.live)))
        if rng.random() < 0.01:
            harness.scheduler.flush()
            harness.scheduler.check_integrity()
        harness.step()
    harness.run()
    return harness


@pytest.mark.parametrize("num_groups", [1, 2, 3, 4])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 100))
def test_random_workloads(num_groups, seed, num_steps):
    play(random.Random(seed), num_groups, num_steps)


@pytest.mark.slow
@pytest.mark.parametrize("num_groups", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(2))
def test_ten_thousand_steps(seed, num_groups):
    rng = random.Random(seed)
    done = preempted = reused = forced = 0
    while done < 10_000:  # of single groups
        harness = play(rng, num_groups, num_steps=500)
        done += harness.runner.steps * num_groups
        preempted += harness.scheduler.stats.num_preemptions
        reused += harness.scheduler.stats.prompt_tokens_cached
        forced += harness.scheduler.stats.forced_tokens
    assert preempted > 15 and reused > 500 and forced > 100  # the workload does reach what it is meant to reach
