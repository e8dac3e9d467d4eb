"""Draft lengths against the theory of speculation, by simulation: E tokens = (1 - a^(k+1)) / (1 - a) of a row and step,
a: acceptance of a draft."""

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.decoding.speculation.acceptance import Acceptance
from serving.decoding.speculation.adaptive import MARGIN, GoodputLength
from serving.decoding.speculation.chance import Chance
from serving.decoding.speculation.config import SpeculativeConfig
from serving.decoding.speculation.drafter import DraftLength
from serving.decoding.speculation.lengths import FixedLength, TableLength
from serving.decoding.speculation.make import make_length

Of = Callable[[int], float]  # of a step's number


def expected_tokens(length: int, acceptance: float) -> float:
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


def measured(lengths: tuple[int, ...], seconds: Callable[[int], float], rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
             ) -> dict[tuple[int, int], float]:  # fmt: skip
    """What a runner measures at its start."""
    return {(n, k): seconds(k) for n in rows for k in (0, *lengths)}


class Simulation:
    """`rows` sequences whose steps take `seconds(drafts of a row)`, times a noise; a row's drafts are accepted with a
    chance that may change from step to step. Each drafts what its own are worth, on_host."""

    def __init__(self, length: DraftLength, rows: int, seconds: Callable[[int], float], *, noise: float = 0.05,
                 speed: Of = lambda step: 1.0, on_host: bool = True):  # fmt: skip
        self.length, self.rows, self.seconds, self.noise, self.speed = length, rows, seconds, noise, speed
        self.chosen: list[int] = []
        self.chances = [Chance() for _ in range(rows)] if on_host else []
        self.num_tokens = [0] * rows
        self._rng = Random(0)

    def run(self, num_steps: int, acceptance: float | tuple[float, ...], among: tuple[int, ...]) -> float:
        """Returns tokens a second, as a share of what the best of some lengths would have brought. Several acceptances
        are those of the rows in turn."""
        of_rows = acceptance if isinstance(acceptance, tuple) else (acceptance,)
        of_rows = [of_rows[row % len(of_rows)] for row in range(self.rows)]
        tokens = time = 0.0
        best = max(sum(expected_tokens(k, one) for one in of_rows) / self.seconds(k) for k in (0, *among))
        for _ in range(num_steps):
            k = self.length.choose(self.rows)
            speed = self.speed(len(self.chosen))
            drafts = [self.drafts_of(row, k) for row in range(self.rows)]
            took = self.seconds(sum(drafts) / self.rows) / speed
            took *= self._rng.uniform(1 - 2 * self.noise, 1 + 2 * self.noise)
            accepted = [min(most, int(math.log(1 - self._rng.random(), one)))
                        for most, one in zip(drafts, of_rows, strict=True)]  # fmt: skip
            if k:
                self.length.observe_rows(k, accepted)
            for row, chance in enumerate(self.chances):
                if drafts[row]:
                    chance.observe(drafts[row], accepted[row], self.num_tokens[row])
                self.num_tokens[row] += 1 + accepted[row]
            self.length.observe_step(self.rows, k, sum(drafts) / self.rows, took)
            self.chosen.append(k)
            tokens, time = tokens + self.rows + sum(accepted), time + took * speed
        return tokens / time / best

    def drafts_of(self, row: int, length: int) -> int:
        if not self.chances:
            return length
        return min(length, self.chances[row].worth(self.length.least_chance, self.num_tokens[row]))

    def most_chosen(self, last: int) -> int:
        return max(self.chosen, key=self.chosen[-last:].count)


def simulated(lengths: tuple[int, ...], rows: int, seconds: Callable[[int], float], *, on_device: bool = False
              ) -> Simulation:  # fmt: skip
    length = GoodputLength(lengths, measured(lengths, seconds), on_device=on_device)
    return Simulation(length, rows, seconds, on_host=not on_device)


LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 24)
BEST = {  # by cost of a draft, for acceptances of 0.5, 0.6, ... 0.9
    0.01: (5, 7, 9, 14, 24),
    0.05: (3, 4, 6, 8, 13),
    0.10: (2, 3, 4, 6, 10),
    0.20: (1, 2, 3, 4, 7),
    0.30: (1, 1, 2, 3, 5),
}


@pytest.mark.parametrize("cost", BEST)
def test_finds_the_best_length(cost):
    for acceptance, best in zip((0.5, 0.6, 0.7, 0.8, 0.9), BEST[cost], strict=True):
        simulation = simulated(LENGTHS, 8, lambda k: 0.01 * (1 + cost * k))
        share = simulation.run(700, acceptance, LENGTHS)
        goodput = {k: expected_tokens(k, acceptance) / (1 + cost * k) for k in LENGTHS}
        nearest = LENGTHS.index(min(LENGTHS, key=lambda k: abs(k - best)))
        chosen = simulation.most_chosen(last=350)
        # The optimum is flat: what is as good within the margin need not be left.
        as_good = goodput[chosen] > (1 - MARGIN) * max(goodput.values())
        assert abs(LENGTHS.index(chosen) - nearest) <= 1 or as_good, (acceptance, best, chosen)
        assert share > 0.95, (acceptance, share)


@pytest.mark.parametrize("lengths", [(1, 3, 8), (3, 8, 24), (5,)])
@pytest.mark.parametrize(("rows", "cost"), [(1, 0.2), (4, 0.15), (16, 0.3), (32, 0.9)])
def test_costs_little_where_it_never_pays(lengths, rows, cost):
    simulation = simulated(lengths, rows, lambda k: 0.02 * (1 + cost * k))
    assert simulation.run(48, 0.05, lengths) > (0.97 if rows > 4 else 0.8)  # acceptance is learned from rows
    assert simulation.run(600, 0.05, lengths) > 0.97
    assert simulation.most_chosen(last=300) == 0


@pytest.mark.parametrize(("rows", "cost"), [(4, 0.2), (16, 0.3), (32, 0.4)])
def test_some_sequences_copy_and_others_say_something_new(rows, cost):
    """One length for all would have to do for both."""
    lengths = (1, 3, 8)
    simulation = simulated(lengths, rows, lambda k: 0.02 * (1 + cost * k))
    simulation.run(200, (0.95, 0.05), lengths)
    assert simulation.run(500, (0.95, 0.05), lengths) > 1.2


def test_follows_the_workload_both_ways():
    lengths = (1, 3, 8)
    for rows, share in ((1, 0.88), (8, 0.95)):
        simulation = simulated(lengths, rows, lambda k: 0.02 * (1 + 0.15 * k))
        for acceptance in (0.05, 0.95, 0.05, 0.95):
            assert simulation.run(1000, acceptance, lengths) > share, (rows, acceptance)


def test_does_not_go_back_and_forth():
    """Two lengths are nearly as good, and the machine's speed moves by a half."""
    lengths = (2, 3)
    simulation = simulated(lengths, 8, lambda k: 0.02 * (1 + 0.1 * k))
    simulation.speed = lambda step: 1.25 + 0.25 * math.sin(step / 50)
    assert simulation.run(3000, 0.55, lengths) > 0.95
    settled = [k for k, before in zip(simulation.chosen[1:], simulation.chosen, strict=False) if k == before]
    runs = 1 + sum(a != b for a, b in pairwise(settled))
    assert runs <= 2 * 3000 // 64 * 1.2  # trials and the way back; one more change of mind in ten of them


def test_drafters_on_the_device_are_rarely_stopped_to_see_what_that_is_like():
    lengths = (1, 3, 8)
    simulation = simulated(lengths, 4, lambda k: 0.02 * (1 + 0.1 * k), on_device=True)
    assert simulation.run(2000, 0.8, lengths) > 0.95
    assert set(simulation.chosen[20:]) == {0, *lengths} and simulation.chosen[20:].count(0) <= 2 * 5


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_what_was_measured_at_the_start_may_be_wrong(rows, wrong):
    """For the machine was slow then, or contexts are long and hardly a token more costs anything."""
    lengths = (1, 3, 8)
    for acceptance, cost, best in ((0.9, 0.05, 8), (0.2, 0.3, 0)):
        told = measured(lengths, lambda k, cost=cost: 0.02 * (1 + cost * k) * (wrong if k else 1))
        simulation = Simulation(GoodputLength(lengths, told), rows, lambda k, cost=cost: 0.02 * (1 + cost * k))
        simulation.run(600, acceptance, lengths)
        assert simulation.run(600, acceptance, lengths) > 0.95
        assert simulation.most_chosen(last=300) == best


def test_more_drafts_do_not_make_a_step_shorter():
    told = {(4, 0): 0.02, (4, 1): 0.08, (4, 3): 0.024, (4, 8): 0.2}  # the first was held up
    assert GoodputLength((1, 3, 8), told).choose(4) == 3
    assert GoodputLength((1,), {(4, 0): 0.02, (4, 1): 0.08}).choose(4) == 0


def test_rows_beyond_what_was_measured():
    """Lengths that no step of so many rows was compiled for are not chosen."""
    length = GoodputLength((2, 8), {(1, 0): 0.02, (1, 2): 0.02, (1, 8): 0.021, (4, 0): 0.02, (4, 2): 0.021})
    assert [length.choose(n) for n in (1, 2, 4, 5, 99)] == [8, 2, 2, 2, 2]


def test_rows_of_other_numbers_have_other_lengths():
    cheap, costly = (lambda k: 0.01 * (1 + 0.02 * k)), (lambda k: 0.02 * (1 + 0.9 * k))
    length = GoodputLength((1, 3, 8), measured((1, 3, 8), cheap, (1, 2, 4, 8)) | measured((1, 3, 8), costly, (16, 32)))
    few, many = Simulation(length, 1, cheap), Simulation(length, 32, costly)
    for _ in range(3):
        few.run(300, 0.7, (1, 3, 8))
        many.run(300, 0.7, (1, 3, 8))
    assert (few.most_chosen(last=200), many.most_chosen(last=200)) == (8, 0)


def test_same_observations_same_choices():
    def chosen() -> list[int]:
        simulation = simulated((1, 3, 8), 4, lambda k: 0.02 * (1 + 0.2 * k))
        simulation.run(500, 0.6, (1, 3, 8))
        return simulation.chosen

    assert chosen() == chosen()


def test_choices_need_no_observations():
    """Steps that also compute prompts are not observed: the server may have no others for a while."""
    for cost, first in ((0.02, 4), (0.9, 0)):
        length = GoodputLength((2, 4), measured((2, 4), lambda k, cost=cost: 0.01 * (1 + cost * k)))
        assert [length.choose(3) for _ in range(100)] == [first] * 100
        length.observe_rows(4, [])
        assert length.choose(3) == first


def test_nothing_is_tried_at_the_cost_of_prompts():
    """A trial waits for steps in which all rows decode, and then has as many steps as ever; what is best is used."""
    def choices(may_try: Callable[[int], bool]) -> list[tuple[bool, int]]:
        length, made = GoodputLength((4,), measured((4,), lambda k: 0.01 * (1 + 0.5 * k))), []
        for step in range(400):
            made.append((may_try(step), length.choose(3, may_try(step))))
            length.observe_step(3, made[-1][1], float(made[-1][1]), 0.01 * (1 + 0.5 * made[-1][1]))
            if made[-1][1]:
                length.observe_rows(4, [0, 0, 0])
        return made

    always, at_times, never = (choices(x) for x in (lambda n: True, lambda n: n % 2 == 0, lambda n: False))
    assert 0 < sum(k > 0 for _, k in always) == sum(k > 0 for _, k in at_times)
    assert not any(k for tried, k in (*at_times, *never) if not tried)


def test_a_draft_is_worth_what_it_costs():
    """A tenth of a step each, where three of four are right: 3.4 times as many tokens in 1.8 times the time."""
    length = GoodputLength((8,), measured((8,), lambda k: 0.01 * (1 + 0.1 * k)))
    for _ in range(200):
        length.observe_rows(8, [min(8, n) for n in (0, 1, 2, 8)])
    assert length.choose(4) == 8
    assert length.least_chance == pytest.approx(0.1 * (1 + 11 / 4) / 1.8, rel=0.2)  # a first guess still counts
    free = GoodputLength((8,), measured((8,), lambda k: 0.01))
    assert free.choose(4) == 8 and free.least_chance == 0


@given(st.lists(st.tuples(st.integers(1, 24), st.integers(0, 24), st.integers(1, 400)), max_size=60))
def test_chances_follow_a_sequence(drafts):
    chance, num_tokens, before = Chance(), 5, 0
    for tried, accepted, gap in drafts:
        num_tokens, accepted = num_tokens + gap, min(accepted, tried)
        before = chance.worth(0.5, num_tokens)
        assert chance.worth(0.0, num_tokens) >= 1000 >= before >= chance.worth(0.9, num_tokens) >= 0
        assert chance.worth(1.0, num_tokens) == 0
        chance.observe(tried, accepted, num_tokens)
        after = chance.worth(0.5, num_tokens)
        assert after >= before if accepted == tried else accepted or after <= before
    assert chance.worth(0.5, num_tokens + 100_000) == Chance().worth(0.5, 0) == 6


def test_a_sequence_that_drafts_badly_soon_stops_and_tries_again_later():
    chance = Chance()
    for num_tokens in range(10):
        assert chance.worth(0.5, num_tokens) > 0
        chance.observe(2, 0, num_tokens)
    assert chance.worth(0.5, 10) == 0 < chance.worth(0.1, 10)
    assert chance.worth(0.5, 40) > 0
    for num_tokens in range(41, 68, 9):
        chance.observe(8, 8, num_tokens)
    assert chance.worth(0.5, 70) >= 8


@given(
    calls=st.lists(
        st.one_of(
            st.tuples(st.just("choose"), st.integers(0, 40)),
            st.tuples(st.just("step"), st.integers(1, 40), st.sampled_from([0, 2, 6]), st.floats(0, 6),
                      st.floats(1e-4, 10)),  # fmt: skip
            st.tuples(st.just("rows"), st.sampled_from([2, 6]), st.lists(st.integers(0, 2), max_size=5)),
        ),
        max_size=200,
    ),
    on_device=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_any_observations_in_any_order(calls, on_device):
    """Steps come back late, with fewer rows than they were chosen for, or not at all."""
    length = GoodputLength((2, 6), measured((2, 6), lambda k: 0.01 * (1 + k)), on_device=on_device)
    for kind, *values in calls:
        if kind == "choose":
            assert length.choose(*values) in (0, 2, 6)
        else:
            {"step": length.observe_step, "rows": length.observe_rows}[kind](*values)
            assert 0 <= length.least_chance <= 1


def test_acceptance_is_of_all_rows():
    acceptance = Acceptance(4)
    for _ in range(200):
        acceptance.observe(4, [0, 0, 4, 2])
    assert acceptance.expected_tokens(4) == pytest.approx(1 + (4 + 2) / 4, abs=0.06)
    assert acceptance.expected_tokens(2) == pytest.approx(1 + (2 + 2) / 4, abs=0.06)
    assert acceptance.expected_tokens(0) == 1
    acceptance.age()
    for _ in range(8):
        acceptance.observe(4, [0, 0, 0, 0])
    assert acceptance.expected_tokens(4) < 1.6  # what is old counts for less


def test_table():
    """Ranges are inclusive, a gap goes on with the one before, and so do both ends."""
    length = TableLength(((4, 16, 3), (64, 128, 2), (256, 4096, 0)))
    rows = (1, 4, 16, 17, 63, 64, 128, 200, 256, 4096, 9000)
    assert [length.choose(n) for n in rows] == [3, 3, 3, 3, 3, 2, 2, 2, 0, 0, 0]


def test_the_config_says_which():
    given, seconds = {"method": "ngram", "num_speculative_tokens": 8}, measured((2, 4, 8), lambda k: 0.01)
    assert type(make_length(SpeculativeConfig.of(given), seconds)) is GoodputLength
    fixed = make_length(SpeculativeConfig.of(given | {"adaptive": False}), {})
    assert type(fixed) is FixedLength and fixed.choose(7) == 8
    with_table = SpeculativeConfig.of(given | {"num_speculative_tokens_per_batch_size": {"1-4": 2, "5": 0}})
    table = make_length(with_table, {})
    assert [table.choose(n) for n in (1, 4, 5, 6)] == [2, 2, 0, 0]
