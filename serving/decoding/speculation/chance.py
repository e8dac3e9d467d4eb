"""How likely one sequence's drafts are right: some copy what they were given, others beside them say something new."""

import math

FIRST = 0.8  # of a sequence that had no drafts yet
RATE = 1 / 8  # how fast the estimate follows what is seen
MEMORY = 64.0  # tokens after which most of what was seen counts no more
SUREST = 0.999
BENEFIT = 2  # times as many drafts as the estimate gives: it is rough, and good drafts cut short cost most


class Chance:
    """Of a draft, given that the one before it was right."""

    def __init__(self) -> None:
        self._value, self._at = FIRST, 0

    def observe(self, num_drafts: int, num_accepted: int, num_tokens: int) -> None:
        """num_tokens: of the sequence then."""
        value = 1 - (1 - self._now(num_tokens)) * (1 - RATE) ** num_accepted
        self._value = min(value if num_accepted == num_drafts else value * (1 - RATE), SUREST)
        self._at = num_tokens

    def worth(self, least: float, num_tokens: int) -> int:
        """How many drafts in a row may all be right with a chance of at least `least`, 0 to 1. A large number where
        anything will do."""
        if least <= 0:
            return 1 << 30
        return int(BENEFIT * math.log(least) / math.log(self._now(num_tokens)))

    def _now(self, num_tokens: int) -> float:
        return FIRST + (self._value - FIRST) * math.exp((self._at - num_tokens) / MEMORY)
