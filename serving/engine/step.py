"""The step being planned: rows are added to each data group's share one by one, then it becomes a `StepPlan`."""

from dataclasses import dataclass

import numpy as np

from serving.engine.plan import GroupPlan, RowPlan, SlotUpdate, StepPlan
from serving.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Step:
    """A plan and the sequences of its rows, to be handed to `Scheduler.update` with the result."""

    plan: StepPlan
    sequences: list[Sequence]

    @classmethod
    def of(cls, shares: list["GroupBuilder"]) -> "Step | None":
        """The shares of all data groups, in order; None if there is no row in any."""
        if not any(share.num_rows for share in shares):
            return None
        plan = StepPlan(groups=[share.plan() for share in shares])
        return cls(plan, [seq for share in shares for seq in share.sequences])


class GroupBuilder:
    """One data group's share. `budget` is what remains of its tokens; `prefilled`: sequences that got a chunk of their
    known tokens."""

    def __init__(self, budget: int, page_size: int):
        self.budget = budget
        self.prefilled: list[Sequence] = []
        self.slot_updates: list[SlotUpdate] = []
        self._page_size = page_size
        self._short: list[tuple[Sequence, RowPlan]] = []  # rows of one token come first in a plan
        self._long: list[tuple[Sequence, RowPlan]] = []

    def add_chunk(self, seq: Sequence, limit: int) -> None:
        """Adds as many of the known tokens as the budget and `limit` (0: none) allow."""
        num_tokens = min(seq.num_tokens - seq.num_computed, self.budget)
        # A copy of the table: publishing may replace pages in it before the plan is dispatched.
        self._add(seq, min(num_tokens, limit) if limit else num_tokens, seq.table.pages.copy())
        self.prefilled.append(seq)

    def add_decode(self, seq: Sequence) -> None:
        """Adds the one token of `seq`, known or pending, that is not computed yet."""
        self._add(seq, 1, seq.table.pages)

    def _add(self, seq: Sequence, num_tokens: int, pages: np.ndarray) -> None:
        """Adds the next `num_tokens` tokens of `seq`, which has pages for them, and counts them as computed."""
        start, total = seq.num_computed, seq.num_tokens + seq.num_pending
        end = start + num_tokens
        samples = end == total and total < seq.max_len
        output_index = total - seq.prompt_len
        if samples and seq.sampling_state is not None:
            update = seq.sampling_state.update(seq, output_index)
            if update is not None:
                self.slot_updates.append(update)
        row = RowPlan(
            request_id=seq.request.request_id,
            slot=seq.slot,
            token_ids=None if end > seq.num_tokens else seq.tokens[start:end],
            start=start,
            num_tokens=num_tokens,
            page_ids=pages[: -(-end // self._page_size)],
            sampling=seq.request.sampling,
            samples=samples,
            output_index=output_index,
            prompt_targets=seq.next_prompt_targets(start, end) if seq.wants_prompt_logprobs else None,
        )
        (self._short if num_tokens == 1 else self._long).append((seq, row))
        self.budget -= num_tokens
        seq.num_computed = end
        seq.num_pending += samples

    @property
    def num_rows(self) -> int:
        return len(self._short) + len(self._long)

    @property
    def sequences(self) -> list[Sequence]:
        return [seq for seq, _ in self._short + self._long]

    def plan(self) -> GroupPlan:
        rows = [row for _, row in self._short + self._long]
        return GroupPlan(rows=rows, num_decode=len(self._short), slot_updates=self.slot_updates)
