"""The step being planned: rows are added to each data group's share one by one, then it becomes a `StepPlan`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from serving.engine.plan import Draft, GroupPlan, RowPlan, SlotUpdate, StepPlan
from serving.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Step:
    """A plan and the sequences of its rows, to be handed to `Scheduler.update` with the result."""

    plan: StepPlan
    sequences: list[Sequence]

    @classmethod
    def of(cls, shares: list["GroupBuilder"], draft_length: int) -> "Step | None":
        """The shares of all data groups, in order; None if there is no row in any."""
        if not any(share.num_rows for share in shares):
            return None
        plan = StepPlan(groups=[share.plan() for share in shares], draft_length=draft_length)
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

    def add_chunk(self, seq: Sequence, limit: int, mask: Callable[[], np.ndarray | None]) -> None:
        """Adds as many of the known tokens as the budget and `limit` (0: none) allow. mask: of the token sampled."""
        num_tokens = min(seq.num_tokens - seq.num_computed, self.budget)
        num_tokens = min(num_tokens, limit) if limit else num_tokens
        samples = seq.num_computed + num_tokens == seq.num_tokens
        # A copy of the table: publishing may replace pages in it before the plan is dispatched.
        self._add(seq, num_tokens, seq.table.pages.copy(), None, mask() if samples else None)
        self.prefilled.append(seq)

    def add_decode(self, seq: Sequence, num_tokens: int, draft: Draft | None, mask: np.ndarray | None) -> None:
        """Adds the next tokens of `seq`, of which the last may be pending, and a draft after all of them."""
        self._add(seq, num_tokens, seq.table.pages, draft, mask)

    def _add(self, seq: Sequence, num_tokens: int, pages: np.ndarray, draft: Draft | None,
             mask: np.ndarray | None) -> None:  # fmt: skip
        """Adds the next `num_tokens` tokens of `seq`, which has pages for them and the draft, and counts them as
        computed."""
        start, total = seq.num_computed, seq.num_tokens + seq.num_pending
        end, num_drafts = start + num_tokens, 0 if draft is None else len(draft)
        samples = end == total and total < seq.max_len
        output_index = total - seq.prompt_len
        if samples and seq.sampling_state is not None:
            update = seq.sampling_state.update(seq, output_index)
            if update is not None:
                self.slot_updates.append(update)
        token_ids = None if end > seq.num_tokens else seq.tokens[start:end]
        if draft is not None and token_ids is not None:
            token_ids = np.concatenate([token_ids, draft.tokens])
        row = RowPlan(
            request_id=seq.request.request_id,
            slot=seq.slot,
            token_ids=token_ids,
            start=start,
            num_tokens=num_tokens + num_drafts,
            page_ids=pages[: -(-(end + num_drafts) // self._page_size)],
            sampling=seq.request.sampling,
            samples=samples,
            output_index=output_index,
            targets=seq.next_targets(start, end),
            draft=draft,
            mask=mask if samples else None,
            following=int(seq.tokens[end]) if end < seq.num_tokens else 0,
        )
        (self._short if row.num_tokens == 1 else self._long).append((seq, row))
        self.budget -= row.num_tokens
        seq.num_computed = end
        seq.num_pending += samples
        seq.verifying, seq.draft = draft is not None, None

    @property
    def num_rows(self) -> int:
        return len(self._short) + len(self._long)

    @property
    def sequences(self) -> list[Sequence]:
        return [seq for seq, _ in self._short + self._long]

    def plan(self) -> GroupPlan:
        rows = [row for _, row in self._short + self._long]
        return GroupPlan(rows=rows, num_decode=len(self._short), slot_updates=self.slot_updates)
