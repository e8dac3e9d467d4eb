"""Draft lengths by goodput (after SmartSpec; Liu et al., arXiv 2406.14066): the length with the most expected tokens a
second, by measured acceptance and measured step times, each for its number of rows.

A step takes a plain step's time, and a share of it more for each draft of a row. Both begin with what the runner
measured at its start, and follow what steps take. Each length that is not the best is tried from time to time, for a
few steps: as often as what that loses stays within TRIAL_SHARE of the time. Steps with chunks of prompts, whose times
are not known here, are left out of it.

Without drafts a drafter on the device is not run, prompts' chunks included, and has gaps in its own cache afterwards:
there none at all is tried rarely.

Nothing here is random, and nothing asks a clock: what is chosen follows from what was observed.
"""

from collections.abc import Mapping, Sequence

from serving.decoding.speculation.acceptance import Acceptance
from serving.decoding.speculation.chance import FIRST

TRIAL_SHARE = 0.01  # of the time, lost by trying lengths that are not the best
TRIAL_INTERVAL = 64  # steps between two trials, though they cost nothing
RARELY = 16  # times as many steps
MARGIN = 0.03  # by which another length must be better: the estimates are noisy
ENTRY_STEPS = 16  # after a change, in which only the new length's time is learned
ENTRY_RATE, RATE = 0.25, 0.05  # how fast estimates of step times follow
OUTLIER = 2.0  # a step counts as at most so many times longer or shorter than expected
FEW = 0.25  # drafts of a row; of fewer nothing is learned


class GoodputLength:
    """See `serving.decoding.speculation.drafter.DraftLength`."""

    def __init__(self, lengths: Sequence[int], decode_seconds: Mapping[tuple[int, int], float], *,
                 on_device: bool = False):  # fmt: skip
        """lengths: ascending, without 0. decode_seconds: see `serving.engine.plan.Runner`. on_device: the drafter
        is."""
        self._batches: dict[int, _Batch] = {}  # by the most rows that they are of
        for rows in sorted({rows for rows, _ in decode_seconds}):
            seconds = {k: decode_seconds[rows, k] for k in (0, *lengths) if (rows, k) in decode_seconds}
            if 0 in seconds:
                self._batches[rows] = _Batch(seconds, 3 + 5 // rows, RARELY if on_device else 1)
        if not self._batches:
            raise ValueError("no times of steps without drafts")
        self._chosen = self._batches[max(self._batches)]
        self._last: tuple[_Batch, int] | None = None
        self.least_chance = 0.0

    def choose(self, num_rows: int, may_try: bool = True) -> int:
        self._chosen = self._batch(num_rows)
        length = self._chosen.choose(may_try)
        self.least_chance = self._chosen.least_chance(length)
        return length

    def observe_step(self, num_rows: int, num_drafts: int, mean_drafts: float, seconds: float) -> None:
        kind = self._batch(num_rows), num_drafts
        if kind == self._last:  # the first of a kind paid for the change, too
            kind[0].observe(num_drafts, mean_drafts, seconds)
        self._last = kind

    def observe_rows(self, num_drafts: int, accepted: Sequence[int]) -> None:
        self._chosen.acceptance.observe(num_drafts, accepted)

    def _batch(self, num_rows: int) -> "_Batch":
        return self._batches[next((rows for rows in self._batches if rows >= num_rows), max(self._batches))]


class _Batch:
    """What is known of steps with one number of rows."""

    def __init__(self, seconds: Mapping[int, float], trial_steps: int, rarely: int):
        """seconds: of a step, by length: those that may be chosen. rarely: as many times the usual interval passes
        before no drafts at all are tried."""
        lengths = sorted(seconds)
        # Drafts do not make a step shorter: the others were held up.
        shortest = {k: min(seconds[more] for more in lengths if more >= k) for k in lengths}
        self._plain = shortest[0]
        self._cost = {k: (shortest[k] / self._plain - 1) / k for k in lengths if k}  # of a draft, in plain steps
        self._drafts = {k: float(k) for k in lengths if k}  # of a row, on average
        self.acceptance = Acceptance(max(lengths[-1], 1))
        self._trial_steps = trial_steps
        self._intervals = dict.fromkeys(lengths, TRIAL_INTERVAL)  # steps between two trials at least
        self._intervals[0] *= rarely
        self._age = dict.fromkeys(lengths, 0)  # steps since it was tried
        self._current = max(lengths, key=self._goodput)
        self._num_entered = ENTRY_STEPS  # steps observed since the current one was chosen
        self._num_scaled = 0  # steps observed of a settled choice
        self._trial, self._trial_left = 0, 0
        self._credit = 0.0  # seconds that may be lost by trying

    def choose(self, may_try: bool) -> int:
        if not self._trial_left:
            self._settle()
            if may_try:
                self._begin_trial()
        if may_try and self._trial_left:
            self._trial_left -= 1
            return self._trial
        return self._current

    def least_chance(self, length: int) -> float:
        """What a draft costs, as a share of what a row gets in that time. A sequence's first draft is always worth it:
        nothing would be learned otherwise."""
        return min(self._cost[length] * self._goodput(self._current) * self._plain, FIRST) if length else 0.0

    def observe(self, length: int, drafts: float, seconds: float) -> None:
        if length not in self._age:  # of a step that was planned for more rows
            return
        self._credit += TRIAL_SHARE * seconds
        for other in self._age:
            self._age[other] += 1
        self._age[length] = 0
        self._num_entered += length == self._current
        expected = self._plain * (1 + self._cost[length] * drafts if length else 1)
        usual = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        if length == self._current and self._num_entered > ENTRY_STEPS:
            # Contexts grow and machines slow down: what lasts longer than it did would with other lengths, too.
            self._num_scaled += 1
            self._plain *= 1 + max(RATE, 1 / self._num_scaled) * (usual / expected - 1)
        elif not length:
            self._learn_plain(self._plain + ENTRY_RATE * (usual - expected))
        elif drafts > FEW:
            cost = (usual / self._plain - 1) / drafts
            self._cost[length] = max(0.0, self._cost[length] + ENTRY_RATE * (cost - self._cost[length]))
        if length:
            self._drafts[length] += ENTRY_RATE * (drafts - self._drafts[length])

    def _learn_plain(self, seconds: float) -> None:
        """The steps of other lengths take as long as they did."""
        for length, drafts in self._drafts.items():
            if drafts > FEW:
                self._cost[length] = max(0.0, (self._seconds(length) / seconds - 1) / drafts)
        self._plain = seconds

    def _seconds(self, length: int) -> float:
        return self._plain * (1 + self._cost[length] * self._drafts[length]) if length else self._plain

    def _goodput(self, length: int) -> float:
        return self.acceptance.expected_tokens(length) / self._seconds(length)

    def _settle(self) -> None:
        best = max(self._age, key=self._goodput)
        if self._goodput(best) > (1 + MARGIN) * self._goodput(self._current):
            self._current, self._num_entered = best, 0

    def _begin_trial(self) -> None:
        """If one is due and may be paid."""
        others = [k for k, interval in self._intervals.items() if k != self._current and self._age[k] >= interval]
        if not others or min(age for k, age in self._age.items() if k != self._current) < TRIAL_INTERVAL:
            return
        losses = {k: self._loss(k) for k in others}
        length = min(losses, key=lambda k: losses[k] / self._age[k])
        if losses[length] <= self._credit:
            self._credit -= losses[length]
            if length > self._current:
                self.acceptance.age()
            self._trial, self._trial_left, self._age[length] = length, self._trial_steps, 0

    def _loss(self, length: int) -> float:
        """Seconds that a trial takes longer than the current length would, for as many tokens."""
        each = self._seconds(length) - self.acceptance.expected_tokens(length) / self._goodput(self._current)
        return max(0.0, self._trial_steps * each)
