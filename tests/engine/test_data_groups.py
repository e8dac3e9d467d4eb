"""Where requests run when there are several data groups. Pages of 4 tokens and a budget of 64 a group unless said
otherwise."""

from random import Random

import pytest

from scripts.bench_scheduler import Workload, make_scheduler, step_seconds
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import Harness, make_request, random_tokens

PREFIX = random_tokens(Random(0), 512)  # worth 4 running sequences: 2 x 512 = 4 x ROW_TOKENS


def make_harness(num_groups: int = 2, *, max_num_seqs: int = 16, num_pages: int = 1000, budget: int = 64, **config):
    runner = FakeRunner(
        num_groups=num_groups,
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=2048,
    )
    return Harness(runner, **config)


def add(harness: Harness, names, prompt: list[int] | None = None, **fields) -> None:
    """Prompts of their own, or one that all begin with."""
    for index, name in enumerate(names):
        own = random_tokens(Random(str(name)), 8)
        harness.add(make_request(str(name), own if prompt is None else [*prompt, index], **fields))


def running(harness: Harness) -> list[list[str]]:
    return [[seq.request.request_id for seq in group.running] for group in harness.scheduler.groups]


def counts(harness: Harness) -> list[int]:
    return [len(names) for names in running(harness)]


def run_all(harness: Harness) -> None:
    while harness.busy:
        harness.step()


# ---- by load


def test_equal_requests_spread_evenly_and_fill_every_slot():
    harness = make_harness(4, max_num_seqs=4)
    rng = Random(1)
    for turn in range(60):
        add(harness, [f"{turn}-{i}" for i in range(rng.randrange(3))], max_tokens=20)
        step = harness.step()
        num_rows = [len(group.rows) for group in step.plan.groups] if step else [0]
        assert max(num_rows) - min(num_rows) <= 2  # requests end where they end
        if harness.scheduler._waiting:
            assert not any(group.is_open for group in harness.scheduler.groups) or harness.plans[-1] is step
    harness.run()


def test_long_prompts_weigh_more_than_short_ones():
    harness = make_harness(budget=1024)
    add(harness, ["long"], random_tokens(Random(2), 600), max_tokens=50)
    add(harness, "abcde", max_tokens=50)
    harness.step()
    assert running(harness) == [["long", "e"], ["a", "b", "c", "d"]]  # 600 tokens weigh more than two sequences
    harness.run()


def test_one_after_the_other_fill_every_groups_cache():
    harness = make_harness(4)
    for name in range(8):
        add(harness, [name])
        run_all(harness)
    assert [group.kv.tree.num_pages for group in harness.scheduler.groups] == [4] * 4
    harness.run()


# ---- by prefix


def test_a_prefix_attracts_until_its_group_is_too_busy():
    harness = make_harness()
    add(harness, ["first"], PREFIX)
    run_all(harness)
    computed = harness.runner.tokens_computed
    add(harness, "abcdefgh", PREFIX, max_tokens=30)
    while harness.scheduler._waiting:
        harness.step()
    assert counts(harness) == [5, 3]  # "abcd" are worth less than the prefix, "e" begins anew and soon has followers
    assert running(harness)[0][:4] == ["a", "b", "c", "d"]
    run_all(harness)
    assert harness.runner.tokens_computed - computed == 8 * 30 + len(PREFIX)
    harness.run()


def test_requests_with_a_new_prefix_follow_its_leader_within_reason():
    harness = make_harness(budget=600)
    add(harness, "abcdefgh", PREFIX, max_tokens=30)
    add(harness, ["other"], max_tokens=30)
    harness.step()
    assert running(harness) == [["a", "other"], ["c"]]  # "b" follows "a", "d" follows "c", and so on
    while harness.scheduler._waiting:
        harness.step()
    assert sorted(counts(harness)) == [4, 5]
    run_all(harness)
    assert harness.runner.tokens_computed == 8 * 30 + 8 + 29 + 2 * len(PREFIX)
    harness.run()


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_share_their_prompt(caching):
    harness = make_harness(enable_prefix_caching=caching)
    for i in range(4):
        harness.add(make_request(f"s{i}", 3 * PREFIX, group_id="s", seed=i, max_tokens=10))
    run_all(harness)
    assert harness.runner.tokens_computed == 3 * len(PREFIX) + 3 * 4 + 4 * 9  # a full hit leaves a page to compute
    harness.run()


def test_a_long_conversation_waits_for_its_busy_group():
    harness = make_harness(budget=16)
    add(harness, ["turn 1"], PREFIX)
    run_all(harness)
    add(harness, ["filler"], random_tokens(Random(3), 100), max_tokens=1)  # elsewhere: the other cache is empty
    add(harness, ["busy"], PREFIX[:500] + random_tokens(Random(4), 100), max_tokens=1)
    harness.step()
    assert running(harness) == [["busy"], ["filler"]]
    harness.abort("filler")
    add(harness, ["turn 2"], PREFIX)
    add(harness, ["new"])
    harness.step()
    assert running(harness) == [["busy"], ["new"]]  # "turn 2" could begin in the second group, from its first token
    run_all(harness)
    assert harness.first_events["turn 2"].num_cached_tokens == len(PREFIX)
    harness.run()


def test_conversations_come_back_to_their_groups():
    shares = []
    for num_groups in (1, 4):
        scheduler = make_scheduler(64, num_groups)
        step_seconds(scheduler, Workload(40, 800, 64, (8, 9), num_waiting=48), 64, 200)
        stats = scheduler.snapshot()
        shares.append(stats.prompt_tokens_cached / stats.prompt_tokens)
        assert all(group.num_running for group in stats.groups)
    assert shares[1] > 0.9 * shares[0] > 0.8


# ---- room


def test_what_has_no_room_in_one_group_runs_in_another():
    harness = make_harness(num_pages=111, budget=512)
    known = random_tokens(Random(5), 300)
    harness.add(make_request("owner", known, max_tokens=40))
    harness.step()
    assert running(harness) == [["owner"], []]
    # 100 pages, of which the first group has 60 and could have 34 more
    harness.add(make_request("big", known[:240] + random_tokens(Random(6), 160), max_tokens=10))
    harness.step()
    assert running(harness) == [["owner"], ["big"]]
    harness.run()


def test_a_large_request_gets_its_turn_and_holds_up_one_group_only():
    harness = make_harness(num_pages=33, max_num_seqs=8)
    add(harness, [f"first {i}" for i in range(12)], max_tokens=25)  # 8 pages each in the end
    harness.step()
    add(harness, ["large"], random_tokens(Random(7), 100), max_tokens=10)
    num_busy = []
    while "large" not in harness.finished:
        add(harness, [f"late {len(num_busy)}"], max_tokens=25)
        harness.step()
        num_busy.append(sum(count > 1 for count in counts(harness)))
        assert len(num_busy) < 60
    assert num_busy.count(0) <= 2 and num_busy.count(1) > 5  # one group went empty, the other did not
    harness.run()


def test_room_is_kept_in_one_group_whatever_becomes_cheaper():
    harness = make_harness(num_pages=33)
    for name, max_tokens in zip("abcde", (60, 60, 3, 60, 3), strict=True):
        add(harness, [name], max_tokens=max_tokens)
    harness.step()
    add(harness, ["large"], random_tokens(Random(8), 117), max_tokens=3)  # 30 of 32 pages
    harness.step()
    [large] = harness.scheduler._waiting
    assert running(harness) == [["a", "c", "e"], ["b", "d"]] and large.group is harness.scheduler.groups[1]
    for _ in range(10):
        harness.step()
        assert large.group is harness.scheduler.groups[1]
    add(harness, ["late"])
    harness.step()
    assert running(harness) == [["a", "late"], ["b", "d"]]
    harness.run()


def test_a_group_short_of_pages_preempts_its_own():
    harness = make_harness(num_pages=13, max_num_seqs=3, enable_prefix_caching=False)
    add(harness, "abcd", max_tokens=20)  # 7 pages each in the end
    harness.step()
    assert running(harness) == [["a", "c"], ["b", "d"]]
    harness.abort("b")
    lost: set[str] = set()
    while harness.busy:
        before = running(harness)
        preemptions = harness.scheduler.stats.num_preemptions
        harness.step()
        if harness.scheduler.stats.num_preemptions > preemptions:
            lost |= set(before[0]) - set(running(harness)[0])
            assert "d" in running(harness)[1] or "d" in harness.finished
    assert lost == {"c"}
    harness.run()


def test_a_preempted_sequence_goes_on_in_another_group():
    harness = make_harness(num_pages=13, max_num_seqs=3, enable_prefix_caching=False)
    add(harness, "abcd", max_tokens=20)
    harness.step()
    while not harness.scheduler.stats.num_preemptions:
        harness.step()
    victims = {seq.request.request_id for seq in harness.scheduler._waiting}
    harness.abort("b")
    harness.abort("d" if victims == {"c"} else "c")
    harness.step()
    harness.step()
    assert running(harness)[1] == ["c"] or running(harness)[0] == ["a"]
    harness.run()


# ---- the whole


def test_flush_and_books_are_of_all_groups():
    harness = make_harness(num_pages=21)
    add(harness, "abc", max_tokens=40)
    harness.step()
    stats = harness.scheduler.snapshot()
    assert [group.num_running for group in stats.groups] == [2, 1] and stats.num_running == 3
    assert [group.kv_cache_usage for group in stats.groups] == [0.2, 0.1]
    assert stats.kv_cache_usage == pytest.approx(0.15)
    assert not harness.scheduler.flush()
    for name in "abc":
        harness.abort(name)
    assert any(group.kv.tree.num_pages for group in harness.scheduler.groups)
    assert harness.scheduler.flush()
    harness.run()
