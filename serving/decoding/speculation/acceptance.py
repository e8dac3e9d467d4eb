"""How many drafts of a row are accepted, by position, as lately measured."""

from collections.abc import Sequence

WINDOW = 48.0  # rows that an estimate forgets over, but no fewer than of four steps
STALE_ROWS = 16.0  # what was measured some time ago counts like so many rows
PRIOR_ROWS = 4.0  # what is expected of a draft before it is measured counts like so many rows:
FIRST_GUESS = 0.7  # that the first is accepted so often, and the others as often as the one before


class Acceptance:
    """The chance of each draft, given that the one before it was accepted. Of all rows that might have had drafts: for
    one that had none, or fewer, it is as if the next one had been rejected."""

    def __init__(self, most: int):
        self._tried = [PRIOR_ROWS, *[0.0] * (most - 1)]
        self._accepted = [PRIOR_ROWS * FIRST_GUESS, *[0.0] * (most - 1)]

    def observe(self, most: int, accepted: Sequence[int]) -> None:
        """most: drafts that each of the rows might have had."""
        fade = max(0.75, 1 - len(accepted) / WINDOW)
        for position in range(most):
            tried = sum(count >= position for count in accepted)
            if not tried:
                break
            self._tried[position] = fade * self._tried[position] + tried
            self._accepted[position] = fade * self._accepted[position] + sum(count > position for count in accepted)

    def age(self) -> None:
        """Nothing was measured for a while: what comes now counts for more."""
        for position, tried in enumerate(self._tried):
            if tried > STALE_ROWS:
                self._tried[position] = STALE_ROWS
                self._accepted[position] *= STALE_ROWS / tried

    def expected_tokens(self, length: int) -> float:
        """Of a row that may have so many drafts: accepted ones, and the one that is sampled after them."""
        conditional = self._accepted[0] / self._tried[0]
        total = 1 + conditional
        chance = conditional
        for tried, accepted in zip(self._tried[1:length], self._accepted[1:length], strict=True):
            conditional = (accepted + PRIOR_ROWS * conditional) / (tried + PRIOR_ROWS)
            chance *= conditional
            total += chance
        return total if length else 1.0
