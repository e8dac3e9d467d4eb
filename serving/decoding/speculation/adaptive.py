"""Draft lengths by goodput (after SmartSpec; Liu et al., arXiv 2406.14066): the length with the most expected tokens a
second, by measured acceptance and measured step times.

Acceptance is a property of the text and of the drafter, step times are of the number of rows too. A number of rows (to
the next power of two) that is new begins with what the nearest one does and tries the other lengths in turn, short ones
first, without those that could not pay even if they cost no more than the one before. Later each other length is tried
again from time to time, for a few steps: as often as what that loses stays within TRIAL_SHARE of the time.

Without drafts a drafter on the device is not run, and has gaps in its own cache afterwards: there none at all is tried
again rarely.

Nothing here is random, and nothing asks a clock: what is chosen follows from what was observed.
"""

from collections.abc import Sequence

from serving.decoding.speculation.acceptance import Acceptance

FIRST_STEPS = 3  # of the first trial of a length; one is not observed, as the first after a change
TRIAL_SHARE = 0.01  # of the time, lost by trying lengths that are not the best
TRIAL_INTERVAL = 64  # steps between two trials, though they cost nothing
RARELY = 16  # times as many steps
MARGIN = 0.03  # by which another length must be better: the estimates are noisy
ENTRY_STEPS = 16  # after a change, in which only the new length's time is learned
ENTRY_RATE, RATE = 0.25, 0.05  # how fast estimates of step times follow
OUTLIER = 2.0  # a step counts as at most so many times longer or shorter than expected


class GoodputLength:
    """See `serving.decoding.speculation.drafter.DraftLength`."""

    def __init__(self, lengths: Sequence[int], *, on_device: bool = False):
        """lengths: ascending, without 0. on_device: the drafter is."""
        self._lengths, self._on_device = (0, *lengths), on_device
        self._acceptance = Acceptance(lengths[-1])
        self._batches: dict[int, _Batch] = {}
        self._last: tuple[int, int] | None = None

    def choose(self, num_rows: int) -> int:
        return self._batch(num_rows).choose(self._acceptance)

    def observe_step(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        kind = _power(num_rows), num_drafts
        if kind == self._last:  # the first of a kind paid for the change, too
            self._batch(num_rows).observe(num_drafts, seconds)
        self._last = kind

    def observe_rows(self, num_drafts: int, accepted: Sequence[int]) -> None:
        self._acceptance.observe(num_drafts, accepted)

    def _batch(self, num_rows: int) -> "_Batch":
        rows = _power(num_rows)
        if rows not in self._batches:
            intervals = dict.fromkeys(self._lengths, TRIAL_INTERVAL)
            intervals[0] *= RARELY if self._on_device else 1
            nearest = min(self._batches, key=lambda other: max(other, rows) // min(other, rows), default=None)
            start = 0 if nearest is None else self._batches[nearest].current
            self._batches[rows] = _Batch(intervals, trial_steps=4 + 4 // rows, start=start)
        return self._batches[rows]


class _Batch:
    """What is known of steps with one number of rows."""

    def __init__(self, intervals: dict[int, int], trial_steps: int, start: int):
        """intervals: the lengths, with the steps between two trials of each at least. start: the first length."""
        self._lengths, self._intervals, self._trial_steps = tuple(intervals), intervals, trial_steps
        self._seconds: dict[int, float] = {}  # of a step, by length
        self._num_seen = dict.fromkeys(intervals, 0)
        self._age = dict.fromkeys(intervals, 0)  # steps since it was tried
        self.current = start
        self._num_entered = 0  # steps observed since the current one was chosen
        self._trial, self._trial_left = 0, 0
        self._credit = 0.0  # seconds that may be lost by trying

    def choose(self, acceptance: Acceptance) -> int:
        if not self._trial_left:
            self._decide(acceptance)
        if self._trial_left:
            self._trial_left -= 1
            return self._trial
        return self.current

    def observe(self, length: int, seconds: float) -> None:
        self._credit += TRIAL_SHARE * seconds
        for other in self._lengths:
            self._age[other] += 1
        self._age[length] = 0
        self._num_seen[length] += 1
        expected = self._seconds.setdefault(length, seconds)
        usual = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        if length == self.current:
            self._num_entered += 1
        if self._num_seen[length] < FIRST_STEPS:
            self._seconds[length] = min(seconds, expected)  # one that is slow by accident would not be tried again soon
        elif length != self.current or self._num_entered <= ENTRY_STEPS:
            self._seconds[length] += ENTRY_RATE * (usual - expected)
        else:  # contexts grow and machines slow down: what lasts longer than it did would with other lengths, too
            change = 1 + RATE * (usual / expected - 1)
            for other in self._seconds:
                self._seconds[other] *= change

    def _decide(self, acceptance: Acceptance) -> None:
        goodput = {k: acceptance.expected_tokens(k) / seconds for k, seconds in self._seconds.items()}
        for length in (self.current, *self._lengths):
            if length not in self._seconds and self._could_pay(length, acceptance, max(goodput.values(), default=0.0)):
                self._try(length, FIRST_STEPS)
                return
        best = max(goodput, key=goodput.__getitem__)
        if goodput[best] > (1 + MARGIN) * goodput.get(self.current, 0.0):
            self.current, self._num_entered = best, 0
        others = [k for k, interval in self._intervals.items() if k != self.current and self._age[k] >= interval]
        if not others or min(age for k, age in self._age.items() if k != self.current) < TRIAL_INTERVAL:
            return
        losses = {k: self._loss(k, acceptance, goodput[self.current]) for k in others}
        length = min(losses, key=lambda k: losses[k] / self._age[k])
        if losses[length] <= self._credit:
            self._credit -= losses[length]
            if length > self.current:
                acceptance.age()
            self._try(length, self._trial_steps)

    def _try(self, length: int, num_steps: int) -> None:
        self._trial, self._trial_left = length, num_steps
        self._age[length] = 0

    def _could_pay(self, length: int, acceptance: Acceptance, best: float) -> bool:
        """Whether it would beat the best if its steps took no longer than those of the next shorter length."""
        shorter = [self._seconds[k] for k in self._lengths if k < length and k in self._seconds]
        return not shorter or acceptance.expected_tokens(length) / max(shorter) > best

    def _loss(self, length: int, acceptance: Acceptance, goodput: float) -> float:
        """Seconds that a trial takes longer than the current length would, for as many tokens."""
        each = self._expected_seconds(length) - acceptance.expected_tokens(length) / goodput
        return max(0.0, self._trial_steps * each)

    def _expected_seconds(self, length: int) -> float:
        """Of one that was never tried, as if each draft cost as much as those of the longest that was."""
        if length in self._seconds:
            return self._seconds[length]
        none, longest = self._seconds[0], max(self._seconds)
        each = max(0.0, self._seconds[longest] - none) / longest if longest else none
        return none + length * each


def _power(num_rows: int) -> int:
    """The next power of two."""
    return 1 << max(num_rows - 1, 0).bit_length()
