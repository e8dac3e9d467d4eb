"""What the scheduler asks of whoever guesses tokens on the host, and of whoever decides how many."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from serving.engine.plan import Draft


class Drafter(Protocol):
    """`tokens` are all known tokens of a sequence (an int32 view, not to be kept)."""

    def propose(self, request_id: str, tokens: np.ndarray, most: int) -> Draft | None:
        """At most `most` tokens that may follow. Cheap: it is called for every decoding row of every step."""
        ...

    def forget(self, request_id: str, tokens: np.ndarray, prompt_len: int) -> None:
        """The sequence is over (or was never asked about). prompt_len: tokens of it that are the prompt."""
        ...


class DraftLength(Protocol):
    """Decides how many drafts each row of a step may have."""

    @property
    def least_chance(self) -> float:
        """A draft of the step that was chosen last is worth verifying if it is accepted with at least this chance."""
        ...

    def choose(self, num_rows: int, may_try: bool = True) -> int:
        """0: none, the step is an ordinary one. Otherwise one of the compiled lengths. num_rows: that decode, in the
        fullest data group. may_try: not only what is thought to be best."""
        ...

    def observe_step(self, num_rows: int, num_drafts: int, mean_drafts: float, seconds: float) -> None:
        """How long a step of only decoding rows took, from one result to the next. num_drafts: as chosen;
        mean_drafts: that rows had on average."""
        ...

    def observe_rows(self, num_drafts: int, accepted: Sequence[int]) -> None:
        """Of each decoding row of a step: how many drafts were accepted, 0 too where it had none, of the `num_drafts`
        that it might have had."""
        ...
