"""Drafts through the scheduler: whatever is guessed, sequences get exactly their tokens, and every page comes back. The
harness and the fake runner check each step; see `test_scheduler_property.py`."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.decoding.speculation.lengths import FixedLength
from serving.engine.plan import Draft, RowPlan
from serving.engine.speculating import SpeculationParts
from tests.engine.fake_runner import VOCAB, FakeRunner
from tests.engine.harness import Harness, make_request, random_tokens
from tests.engine.speculating import DraftingRunner, Guesser, RandomLength
from tests.engine.test_scheduler_property import make_harness, play

KINDS = [("host", False), ("host", True), ("device", False), ("device", True)]


def drafting(rng: Random, where: str, trees: bool):
    """Makes a harness whose sequences are drafted for, by a drafter of random accuracy."""

    def make(_: Random, num_groups: int) -> Harness:
        accuracy, length = rng.choice([0.0, 0.3, 0.8, 1.0]), RandomLength(rng, rng.choice([(0, 1, 3), (0, 2, 8), (4,)]))

        def runner(**limits) -> FakeRunner:
            return FakeRunner(**limits) if where == "host" else DraftingRunner(rng, accuracy, trees, **limits)

        def parts(runner: FakeRunner) -> SpeculationParts:
            drafter = Guesser(runner, rng, accuracy, trees) if where == "host" else None
            return SpeculationParts(length=length, drafter=drafter, tree_tokens=32 if trees else 0)

        return make_harness(rng, num_groups, runner, parts)

    return make


def guessing(runner: FakeRunner, length: int, accuracy: float) -> Harness:
    """With drafts from the host, of which so many are right."""
    drafter = Guesser(runner, Random(0), accuracy=accuracy)
    return Harness(runner, speculation=SpeculationParts(length=FixedLength(length), drafter=drafter))


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize(("where", "trees"), KINDS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 80))
def test_random_workloads(where, trees, num_groups, seed, num_steps):
    rng = Random(seed)
    harness = play(rng, num_groups, num_steps, drafting(rng, where, trees))
    parts = harness.scheduler.config.speculation
    assert parts is not None
    drafter = parts.drafter
    if isinstance(drafter, Guesser):
        assert not drafter.known and drafter.num_forgotten == len(harness.finished)


def test_random_workloads_reach_what_they_are_about():
    rng, drafts, accepted, preempted = Random(7), 0, 0, 0
    for where, trees in KINDS:
        for _ in range(3):
            stats = play(rng, 1, 150, drafting(rng, where, trees)).scheduler.stats
            drafts, accepted = drafts + stats.draft_tokens, accepted + stats.accepted_tokens
            preempted += stats.num_preemptions
    assert drafts > 500 and accepted > 100 and preempted > 10


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize(("accuracy", "length"), [(0.3, 2), (0.6, 4), (0.8, 8), (0.9, 5)])
def test_acceptance_length_is_that_of_theory(where, accuracy, length):
    """E tokens of a step = (1 - a^(k+1)) / (1 - a); a wrong guess is right by chance once in VOCAB times."""
    rng, limits = Random(0), dict(num_pages=200, max_model_len=600)
    runner = FakeRunner(**limits) if where == "host" else DraftingRunner(rng, accuracy, False, **limits)
    drafter = Guesser(runner, rng, accuracy) if where == "host" else None
    harness = Harness(runner, speculation=SpeculationParts(length=FixedLength(length), drafter=drafter))
    harness.add(make_request("a", [3, 4, 5], max_tokens=580))
    harness.run()
    stats, a = harness.scheduler.stats, accuracy + (1 - accuracy) / VOCAB
    expected = (1 - a ** (length + 1)) / (1 - a)
    per_draft = 1 + stats.accepted_tokens / stats.num_drafts
    assert per_draft == pytest.approx(expected, abs=4 * length / math.sqrt(stats.num_drafts) / 2)
    assert sum(stats.accepted_per_position) == stats.accepted_tokens
    assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
    rates = [count / stats.num_drafts for count in stats.accepted_per_position]
    assert rates == pytest.approx([a ** (i + 1) for i in range(length)], abs=0.12)


def test_a_perfect_drafter_saves_all_the_steps_it_can():
    runner = FakeRunner(num_pages=100, max_model_len=200)
    drafter = Guesser(runner, Random(0), accuracy=1.0)
    harness = Harness(runner, speculation=SpeculationParts(length=FixedLength(4), drafter=drafter))
    harness.add(make_request("a", [3, 4], max_tokens=101))  # the prompt brings the first, each step five
    harness.run()
    assert runner.steps == 1 + 20
    assert (harness.scheduler.stats.draft_tokens, harness.scheduler.stats.accepted_tokens) == (80, 80)


def test_steps_overlap_while_drafts_are_off():
    """A row of a token that the host has not seen yet: the step before it is still in flight."""

    def pending_rows(length: int) -> int:
        harness = guessing(FakeRunner(), length=length, accuracy=0.5)
        for name in "abc":
            harness.add(make_request(name, random_tokens(Random(1), 5), max_tokens=20))
        harness.run()
        return sum(row.token_ids is None for step in harness.plans for row in step.plan.rows)

    assert pending_rows(0) > 50 and pending_rows(2) == 0


def test_a_draft_ends_where_the_sequence_must():
    harness = guessing(FakeRunner(), length=8, accuracy=1.0)
    harness.add(make_request("a", [3, 4, 5], max_tokens=4))
    harness.add(make_request("b", [3, 4, 6], max_tokens=1))
    harness.run()
    assert [row.num_drafts for step in harness.plans for row in step.plan.rows if row.request_id == "a"] == [0, 2]
    assert harness.scheduler.stats.num_drafts == 1


def test_drafts_leave_half_of_that_to_prompts():
    harness = guessing(FakeRunner(max_num_batched_tokens=17, max_num_seqs=4), length=8, accuracy=1.0)
    for name in "ab":
        harness.add(make_request(name, [3, ord(name) % VOCAB], max_tokens=60))
    harness.step()
    for name in "cd":
        harness.add(make_request(name, random_tokens(Random(name), 24), max_tokens=1))
    harness.run()
    lengths = [{row.request_id: row.num_tokens for row in step.plan.rows} for step in harness.plans[1:8]]
    assert lengths == [{"a": 8, "b": 1, name: 8} for name in "cccddd"] + [{"a": 9, "b": 8}]


def test_drafts_share_what_the_budget_leaves():
    harness = guessing(FakeRunner(max_num_seqs=4, max_num_batched_tokens=9), length=4, accuracy=1.0)
    for name in "abcd":
        harness.add(make_request(name, [3, ord(name) % VOCAB], max_tokens=12))
    harness.run()
    lengths = [[row.num_tokens for row in step.plan.rows] for step in harness.plans]
    assert max(map(sum, lengths)) == 9 and any(sorted(step) == [1, 1, 2, 5] for step in lengths)


def with_grammar(accuracy: float, rejects: bool) -> tuple[Harness, list[RowPlan]]:
    """Drafts of the device beside a grammar that forces every fifth token. Second: the rows with drafts, without the
    last ones, which end where the sequence must."""

    def language(outputs: list[int]) -> set[int]:
        return {7} if len(outputs) % 5 == 4 else set(range(2, VOCAB, 3))

    parts = SpeculationParts(length=FixedLength(3), drafter=None, rejects=rejects)
    harness = Harness(DraftingRunner(Random(0), accuracy, False, max_model_len=128), speculation=parts)
    harness.add(make_request("a", [3, 4, 5], max_tokens=100), language)
    harness.run()
    assert harness.scheduler.stats.forced_tokens > 3
    rows = [row for step in harness.plans for row in step.plan.rows if row.draft is not None]
    assert all(row.mask is not None and len(row.mask) == 1 + row.num_drafts for row in rows)
    return harness, rows[:-3]


def test_a_draft_ends_where_the_grammar_forbids_it_unless_rejection_has_to_see_it():
    lengths = [{row.num_drafts for row in with_grammar(0.5, rejects)[1]} for rejects in (False, True)]
    assert lengths == [{1, 2, 3}, {3}]


def test_what_was_drafted_goes_on_after_forced_tokens():
    """But for drawn tokens: the device has their distributions by place."""
    for rejects in (False, True):
        harness, rows = with_grammar(1.0, rejects)
        stats = harness.scheduler.stats
        assert stats.accepted_tokens == stats.draft_tokens > 30
        assert any(row.num_tokens - row.num_drafts > 1 for row in rows) == (not rejects)


def test_the_rest_of_a_draft():
    chain = Draft(np.array([5, 6, 6, 7], np.int32))
    tree = Draft(np.array([5, 8, 6, 9, 6, 7], np.int32), np.array([-1, -1, 0, 1, 2, 2], np.int32))
    cases = [(chain, [5, 6], [6, 7], [-1, 0]), (chain, [], [5, 6, 6, 7], [-1, 0, 1, 2]), (chain, [6], None, None),
             (chain, [5, 6, 6, 7], None, None), (chain, [5, 6, 6, 7, 8], None, None),
             (tree, [5], [6, 6, 7], [-1, 0, 0]), (tree, [5, 6], [6, 7], [-1, -1]), (tree, [8], [9], [-1]),
             (tree, [8, 6], None, None)]  # fmt: skip
    for draft, tokens, rest, parents in cases:
        got = draft.after(tokens)
        assert (None if got is None else got.tokens.tolist()) == rest
        assert got is None or got.parent_of.tolist() == parents and (got.parents is None) == (draft.parents is None)
