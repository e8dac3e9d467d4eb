"""What the scheduler asks of a grammar that a sequence's output has to follow."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Matcher(Protocol):
    """Where the output of one sequence is in its grammar."""

    @property
    def error(self) -> str:
        """Why it had to give up, if it had to; then only an end-of-sequence token is allowed."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Moves on by output tokens, each allowed by the mask that it was sampled with."""
        ...

    def forced(self) -> list[int]:
        """The tokens that have to follow now, spelled as the tokenizer would. An end-of-sequence token where nothing
        else may follow. Empty where there is a choice."""
        ...

    def masks(self, tokens: np.ndarray, parents: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Writes which tokens are allowed now, and after each of `tokens` (int32; a tree: token i follows
        parents[i] < i, or the present state where that is -1), as bits into `out`, int32 [1 + len(tokens), W]. Returns
        which of them are allowed themselves, bool; the masks after the others mean nothing. The state stays."""
        ...
