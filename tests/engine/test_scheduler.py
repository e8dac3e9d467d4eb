"""What a step contains, case by case. Pages of 4 tokens, 8 rows, a budget of 32 tokens unless said otherwise."""

import pytest

from serving.errors import InvalidRequest, Overloaded
from tests.engine.fake_runner import FakeRunner, expected_outputs
from tests.engine.harness import Harness, make_request

PROMPT = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 2, 3, 4, 5, 6, 7]  # 4 pages and 2 tokens


def rows(step) -> dict[str, int]:
    return {row.request_id: row.num_tokens for row in step.plan.rows}


def computed(harness: Harness) -> int:
    return harness.runner.tokens_computed


# ---- budget and chunks


def test_decodes_come_first_and_chunks_share_the_rest():
    harness = Harness(FakeRunner(max_num_batched_tokens=10), enable_prefix_caching=False)
    harness.add(make_request("short", [5, 6], max_tokens=30))
    harness.add(make_request("long", PROMPT))
    harness.add(make_request("next", PROMPT))
    assert rows(harness.step()) == {"short": 2, "long": 8}
    assert rows(harness.step()) == {"short": 1, "long": 9}
    step = harness.step()
    assert rows(step) == {"short": 1, "long": 1, "next": 8}
    assert step.plan.groups[0].num_decode == 2 and [row.num_tokens for row in step.plan.rows] == [1, 1, 8]
    harness.run()


def test_a_long_prefill_is_capped():
    harness = Harness(long_prefill_token_threshold=5)
    harness.add(make_request("a", PROMPT))
    harness.add(make_request("b", PROMPT[::-1]))
    assert rows(harness.step()) == {"a": 5, "b": 5}
    harness.run()


def test_no_token_is_computed_in_vain_when_the_length_is_known():
    harness = Harness()
    harness.add(make_request("a", PROMPT, max_tokens=6))
    harness.run()
    assert computed(harness) == len(PROMPT) + 5


def test_a_late_stop_wastes_one_row():
    request = make_request("a", [9, 8, 7], max_tokens=30)
    outputs = expected_outputs(request, 64)[0]
    index = next(i for i in range(3, 30) if outputs[i] not in outputs[:i])
    harness = Harness()
    harness.add(make_request("a", [9, 8, 7], max_tokens=30, stop_token_ids=(outputs[index],)))
    harness.run()
    assert harness.outputs["a"] == outputs[: index + 1]
    assert harness.finished["a"].stop_token_id == outputs[index]
    assert computed(harness) == 3 + index + 1


def test_the_context_length_ends_a_sequence():
    harness = Harness(FakeRunner(max_model_len=20))
    harness.add(make_request("a", PROMPT, max_tokens=None))
    harness.run()
    assert len(harness.outputs["a"]) == 2 and harness.finished["a"].finish_reason == "length"


def test_zero_tokens_wanted():
    harness = Harness()
    harness.add(make_request("a", PROMPT, max_tokens=0, prompt_logprobs=0))
    harness.run()
    assert harness.outputs["a"] == [] and harness.finished["a"].finish_reason == "length"


# ---- refusals


def test_a_request_that_can_never_fit_is_refused():
    harness = Harness(FakeRunner(num_pages=6))
    with pytest.raises(InvalidRequest, match=r"needs 6 KV pages for 22 tokens .*only 5 pages of 4 tokens"):
        harness.add(make_request("a", PROMPT))
    harness.add(make_request("a", PROMPT, max_tokens=3))  # its last token is never fed: 20 positions
    harness.run()


@pytest.mark.parametrize("length", [0, 64, 65])
def test_prompt_length(length):
    with pytest.raises(InvalidRequest, match=f"the prompt has {length} tokens"):
        Harness().add(make_request("a", [3] * length))


def test_admission_limit_and_live_ids():
    harness = Harness(max_num_waiting=2)
    harness.add(make_request("a", PROMPT))
    with pytest.raises(InvalidRequest, match="'a' is already live"):
        harness.scheduler.add(make_request("a", PROMPT))
    harness.add(make_request("b", PROMPT))
    with pytest.raises(Overloaded, match="2 requests are waiting, the limit is 2"):
        harness.add(make_request("c", PROMPT))
    harness.run()
    harness.add(make_request("a", PROMPT))
    harness.run()


# ---- prefix reuse


def test_a_repeated_prompt_computes_only_what_is_not_a_full_page():
    harness = Harness()
    harness.add(make_request("a", PROMPT, max_tokens=1))
    harness.step()
    harness.add(make_request("b", PROMPT, max_tokens=1))
    harness.step()
    assert computed(harness) == len(PROMPT) + 2
    harness.add(make_request("c", PROMPT[:16], max_tokens=1))  # a full hit: its last page is computed again
    harness.run()
    assert [harness.finished[name].num_cached_tokens for name in "abc"] == [0, 16, 12]
    assert harness.scheduler.stats.prefix_cache_hits == 28


def test_of_requests_that_arrive_together_one_computes_the_prefix():
    harness = Harness()
    for name in "abcd":
        harness.add(make_request(name, [*PROMPT[:16], ord(name) % 32], max_tokens=2))
    assert rows(harness.step()) == {"a": 17}
    assert rows(harness.step()) == {"a": 1, "b": 1, "c": 1, "d": 1}
    harness.run()
    assert computed(harness) == 17 + 3 + 4


def test_followers_wait_for_a_prompt_in_chunks_and_others_pass():
    harness = Harness(FakeRunner(max_num_batched_tokens=9))
    harness.add(make_request("a", PROMPT, max_tokens=1))
    harness.add(make_request("b", [*PROMPT[:17], 1, 1], max_tokens=1))
    harness.add(make_request("other", [1, 2, 3], max_tokens=1))
    assert rows(harness.step()) == {"a": 9}
    assert rows(harness.step()) == {"a": 9}
    assert rows(harness.step()) == {"b": 3, "other": 3}
    harness.run()


def test_nobody_waits_for_little():
    harness = Harness()
    harness.add(make_request("a", PROMPT[:4] + [1] * 10))
    harness.add(make_request("b", PROMPT[:4] + [2] * 14))
    assert rows(harness.step()) == {"a": 14, "b": 18}
    harness.run()


def test_followers_go_on_when_their_leader_ends():
    harness = Harness(FakeRunner(max_num_batched_tokens=9))
    harness.add(make_request("a", PROMPT))
    harness.add(make_request("b", PROMPT))
    harness.step()
    harness.abort("a")
    assert rows(harness.step()) == {"b": 9}
    harness.run()


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it():
    harness = Harness()
    for name, fields in (("a", {}), ("b", {"prompt_logprobs": 0})):
        harness.add(make_request(name, PROMPT, **fields))
        while harness.busy:
            harness.step()
    assert harness.first_events["b"].num_cached_tokens == 0
    harness.scheduler.flush()
    harness.add(make_request("c", PROMPT, prompt_logprobs=0))
    harness.add(make_request("d", PROMPT))
    harness.run()
    assert harness.first_events["d"].num_cached_tokens == 16


def test_salts_share_nothing():
    harness = Harness()
    for salt in ("x", "y", "x"):
        harness.add(make_request(salt + str(harness.runner.steps), PROMPT, cache_salt=salt))
        while harness.busy:
            harness.step()
    assert [event.num_cached_tokens for event in harness.first_events.values()] == [0, 0, 16]


def test_a_group_shares_its_prompt_without_prefix_caching():
    harness = Harness(enable_prefix_caching=False)
    for group in ("g", "h"):
        for i in range(3):
            harness.add(make_request(f"{group}{i}", PROMPT, group_id=group, seed=i, max_tokens=2))
    harness.run()
    assert [event.num_cached_tokens for event in harness.first_events.values()].count(16) == 4
    assert computed(harness) == 2 * (len(PROMPT) + 2 * 2 + 3)


# ---- preemption


def test_the_last_to_arrive_is_preempted_and_nothing_changes_for_its_client():
    harness = Harness(FakeRunner(num_pages=13), enable_prefix_caching=False)
    for i in range(3):
        harness.add(make_request(str(i), PROMPT[i : i + 8], seed=i, max_tokens=24))
    harness.run()
    assert harness.scheduler.stats.num_preemptions > 0
    assert list(harness.finished) == ["0", "1", "2"]


def test_nobody_overtakes_who_was_preempted():
    harness = Harness(FakeRunner(num_pages=13), enable_prefix_caching=False)
    for name in "ab":
        harness.add(make_request(name, PROMPT[:8], max_tokens=20))
    [group] = harness.scheduler.groups
    while group.kv.num_available:
        harness.step()
    harness.add(make_request("small", [3, 4], max_tokens=1))
    while not harness.scheduler.stats.num_preemptions:
        harness.step()
    names = set(rows(harness.plans[-1]))
    assert names == {"a"}
    while "b" not in names:
        assert "small" not in names
        step = harness.step()
        names = set(rows(step)) if step else set()
    harness.run()


def test_priority_decides_who_runs_and_who_is_preempted():
    harness = Harness(FakeRunner(max_num_seqs=1), scheduling_policy="priority")
    for name, priority in (("low", 5), ("high", -1), ("mid", 2)):
        harness.add(make_request(name, [3, 4], priority=priority))
    harness.run()
    assert list(harness.finished) == ["high", "mid", "low"]
    harness = Harness(FakeRunner(num_pages=9), scheduling_policy="priority", enable_prefix_caching=False)
    harness.add(make_request("low", PROMPT[:8], priority=1, max_tokens=20))
    harness.add(make_request("high", PROMPT[8:16], priority=0, max_tokens=20))
    harness.run()
    assert list(harness.finished) == ["high", "low"] and harness.scheduler.stats.num_preemptions > 0


def test_34_scored_prompts_in_a_tiny_pool():
    harness = Harness(FakeRunner(num_pages=15, max_num_batched_tokens=8))
    for i in range(34):
        harness.add(make_request(str(i), [i % 32, *PROMPT[:7]], seed=i, max_tokens=40, prompt_logprobs=2))
    harness.run()
    assert len(harness.finished) == 34 and harness.scheduler.stats.num_preemptions > 0


# ---- aborts


def test_aborts_free_pages_wherever_the_request_is():
    harness = Harness(FakeRunner(max_num_seqs=2, max_num_batched_tokens=8))
    for name in ("running", "chunking", "waiting"):
        harness.add(make_request(name, PROMPT[:6] if name == "running" else PROMPT))
    harness.step()
    harness.step()
    for name in ("chunking", "waiting", "running"):
        harness.abort(name)
    assert harness.scheduler.abort("running") is None
    assert harness.scheduler.snapshot().kv_cache_usage == 0 and harness.busy  # a step is still in flight
    harness.run()


def test_abort_all_says_why():
    harness = Harness()
    for name in "ab":
        harness.add(make_request(name, PROMPT))
    harness.step()
    events = harness.scheduler.abort_all("error", "it broke")
    assert [(event.request_id, event.finish_reason, event.error) for event in events] == [
        ("a", "error", "it broke"),
        ("b", "error", "it broke"),
    ]
    harness.scheduler.check_integrity()


# ---- sampling state


def updates(harness: Harness) -> list[tuple[int, object]]:
    groups = [(i, group) for i, step in enumerate(harness.plans) for group in step.plan.groups]
    return [(i, update) for i, group in groups for update in group.slot_updates]


def test_plain_requests_send_no_updates():
    harness = Harness()
    harness.add(make_request("a", PROMPT, max_tokens=10, temperature=0.5, top_p=0.9, stop_token_ids=(3,)))
    harness.run()
    assert not updates(harness)


def test_min_tokens_lifts_its_bans_with_the_step_that_may_stop():
    harness = Harness()
    harness.add(make_request("a", PROMPT, max_tokens=10, min_tokens=3, ignore_eos=False, stop_token_ids=(7,)))
    harness.run()
    (first, ban), (last, lift) = updates(harness)
    assert (first, last) == (0, 3)
    assert ban.banned_token_ids == (7, 1) and ban.reset_counts
    assert lift.banned_token_ids == () and not lift.reset_counts


def test_a_slot_is_cleaned_for_the_next_owner():
    harness = Harness(FakeRunner(max_num_seqs=1))
    harness.add(make_request("a", [3, 4], logit_bias={5: 2.0}))
    harness.add(make_request("b", [5, 6]))
    harness.add(make_request("c", [7, 8]))
    harness.run()
    assert [update.logit_bias for _, update in updates(harness)] == [{5: 2.0}, {}]


def test_counts_survive_a_preemption():
    harness = Harness(FakeRunner(num_pages=9), enable_prefix_caching=False)
    for name in "ab":
        harness.add(make_request(name, PROMPT[:8], max_tokens=20, repetition_penalty=1.2))
    harness.run()  # the runner checks the counts at every sample
    again = [update for _, update in updates(harness) if len(update.output_token_ids)]
    assert harness.scheduler.stats.num_preemptions == len(again) > 0
    assert all(update.reset_counts and len(update.prompt_token_ids) == 8 for update in again)


def test_bad_words_of_several_tokens_wait_for_the_host():
    outputs = expected_outputs(make_request("a", [9, 8, 7], max_tokens=8), 64)[0]
    request = make_request("a", [9, 8, 7], max_tokens=8, bad_words=((outputs[2], outputs[3]), (outputs[5],)))
    harness = Harness(FakeRunner(max_num_seqs=16, max_num_batched_tokens=64))
    harness.add(request)
    for name in "bcdefghij":  # so many that they do not wait, too
        harness.add(make_request(name, [1, 2, ord(name) % 32], max_tokens=8))
    harness.run()
    got = harness.outputs["a"]
    assert got[:3] == outputs[:3] and got[3] != outputs[3] and outputs[5] not in got
    fed = {row.request_id: row.token_ids for row in harness.plans[2].plan.rows}
    assert fed["a"] is not None and set(rows(harness.plans[1])) == set("bcdefghij")


# ---- grammars


def test_prompt_logprobs_are_whole_in_the_first_event_though_the_first_tokens_were_forced_before():
    harness = Harness(FakeRunner(max_num_batched_tokens=8))
    text = [5, 6, 7, 1]
    harness.add(make_request("a", PROMPT, max_tokens=9, prompt_logprobs=0), lambda outputs: {text[len(outputs)]})
    harness.run()  # the harness looks at the logprobs
    assert harness.outputs["a"] == text


# ---- bans


@pytest.mark.parametrize("fields", [
    {"allowed_token_ids": (3, 4), "stop_token_ids": (3, 4), "min_tokens": 2, "max_tokens": 5},
    {"allowed_token_ids": (3,), "bad_words": ((3,),)},
], ids=str)  # fmt: skip
def test_allowed_tokens_that_are_all_banned_are_refused(fields):
    harness = Harness()
    with pytest.raises(InvalidRequest, match="leaves no token"):
        harness.add(make_request("a", [5, 6], **fields))
    assert not harness.scheduler.has_work
