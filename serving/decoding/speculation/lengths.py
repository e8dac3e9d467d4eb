"""Draft lengths that do not depend on what is measured."""

from bisect import bisect_right
from collections.abc import Sequence


class FixedLength:
    """See `serving.decoding.speculation.drafter.DraftLength`."""

    least_chance = 0.0  # as many as there are

    def __init__(self, length: int):
        self._length = length

    def choose(self, num_rows: int, may_try: bool = True) -> int:
        return self._length

    def observe_step(self, num_rows: int, num_drafts: int, mean_drafts: float, seconds: float) -> None:
        pass

    def observe_rows(self, num_drafts: int, accepted: Sequence[int]) -> None:
        pass


class TableLength(FixedLength):
    """By the number of rows: a gap between ranges goes on with the one before, the first and the last reach on."""

    def __init__(self, ranges: Sequence[tuple[int, int, int]]):
        """(fewest rows, most rows, drafts), ascending, without overlaps."""
        self._first_rows = [first for first, _, _ in ranges]
        self._lengths = [length for _, _, length in ranges]

    def choose(self, num_rows: int, may_try: bool = True) -> int:
        return self._lengths[max(bisect_right(self._first_rows, num_rows) - 1, 0)]
