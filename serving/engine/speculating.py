"""Drafts for the rows of a step: how many, from whom, and only those that can be accepted.

A draft is cut where the tokens after it would be chosen by other rules than a verifying step applies to the whole row
(`min_tokens`), where the sequence has to end, and where the grammar does not allow it. But drafts that
rejection verifies may not be cut by what they are: in place of a forbidden token one has to be drawn from what p has
more of than q, and where the draft ended before it, it would be drawn from p.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from serving.decoding.speculation.config import SpeculativeConfig
from serving.decoding.speculation.drafter import Drafter, DraftLength
from serving.decoding.speculation.make import make_drafter, make_length
from serving.engine.plan import Draft, StepPlan
from serving.engine.sequence import Sequence
from serving.request import EngineStats


@dataclass(frozen=True, kw_only=True)
class SpeculationParts:
    """drafter: on the host; None: the device sends drafts with its results. tree_tokens: of a row, known ones and
    drafts, that a tree has to be among; 0: drafts are chains. rejects: drafts are verified by rejection."""

    length: DraftLength
    drafter: Drafter | None
    tree_tokens: int = 0
    rejects: bool = False


class Speculation:
    """parts: None where there is no speculation; every step then has 0 drafts a row."""

    def __init__(self, parts: SpeculationParts | None, stats: EngineStats):
        self._parts, self._stats = parts, stats
        self.length = 0  # drafts that a row of the step being planned may have

    @property
    def is_on(self) -> bool:
        return self.length > 0

    def begin_step(self, num_rows: int, has_prompts: bool) -> None:
        """num_rows: sequences that run, in the fullest data group. has_prompts: not all of them decode."""
        if self._parts is not None:
            length = self._parts.length.choose(num_rows, may_try=not has_prompts)
            self._stats.draft_length = self.length = length

    def propose(self, seq: Sequence, num_known: int, room: int) -> tuple[Draft | None, np.ndarray | None]:
        """(a draft of at most `room` tokens, if there is one; what the grammar, if there is one, allows after the last
        known token and after each of the draft). All tokens of `seq` are known, num_known of them are in the row."""
        draft = self._allowed(seq, self._proposed(seq, num_known, room))
        matcher = seq.matcher
        if matcher is None:
            return draft, None
        tokens, parents = (draft.tokens, draft.parent_of) if draft is not None else (_NOTHING, _NOTHING)
        masks = np.full((len(tokens) + 1, seq.mask_words), -1, np.int32)  # after tokens not allowed: anything
        valid = matcher.masks(tokens, parents, masks)
        if draft is None or valid.all() or (self._parts is not None and self._parts.rejects):
            return draft, masks
        kept = draft.only(valid)
        return (kept, masks[np.concatenate([[True], valid])]) if len(kept) else (None, masks[:1])

    def count(self, seq: Sequence, draft: Draft, num_accepted: int) -> None:
        seq.draft_chance.observe(len(draft), num_accepted, seq.num_tokens)
        stats, per_position = self._stats, self._stats.accepted_per_position
        stats.num_drafts += 1
        stats.draft_tokens += len(draft)
        stats.accepted_tokens += num_accepted
        per_position.extend([0] * (num_accepted - len(per_position)))
        for position in range(num_accepted):
            per_position[position] += 1

    def observe_rows(self, step: StepPlan, accepted: dict[int, int]) -> None:
        """accepted: drafts, of the step's rows that are still alive. On the host each row might have had drafts; of
        those on the device it is not known which step asked for them."""
        if self._parts is None or not step.draft_length:
            return
        drafts = [len(step.rows[i].draft or ()) for i in accepted]
        if self._parts.drafter is not None:
            self._parts.length.observe_rows(step.draft_length, list(accepted.values()))
        elif any(drafts):
            had = [count for count, draft in zip(accepted.values(), drafts, strict=True) if draft]
            self._parts.length.observe_rows(min(max(drafts), step.draft_length), had)

    def observe_step(self, step: StepPlan, seconds: float) -> None:
        """A step of decoding rows only."""
        if self._parts is not None:
            num_rows = max(len(group.rows) for group in step.groups)
            mean_drafts = sum(row.num_drafts for row in step.rows) / len(step.rows)
            self._parts.length.observe_step(num_rows, step.draft_length, mean_drafts, seconds)

    def forget(self, seq: Sequence) -> None:
        if self._parts is not None and self._parts.drafter is not None:
            tokens = seq.tokens[: seq.num_tokens]
            self._parts.drafter.forget(seq.request.request_id, tokens, seq.prompt_len)

    def _proposed(self, seq: Sequence, num_known: int, room: int) -> Draft | None:
        most = min(self.length, room)
        if self._parts is None or most < 1:
            return None
        if self._parts.tree_tokens:
            most = min(most, self._parts.tree_tokens - num_known)
        if self._parts.drafter is None:  # made for all rows, and cut by the length alone, as trees are
            return None if seq.draft is None or most < 1 else seq.draft.first(most)
        if not self._parts.tree_tokens:
            most = min(most, seq.draft_chance.worth(self._parts.length.least_chance, seq.num_tokens))
        tokens, request_id = seq.tokens[: seq.num_tokens], seq.request.request_id
        return None if most < 1 else self._parts.drafter.propose(request_id, tokens, most)

    @staticmethod
    def _allowed(seq: Sequence, draft: Draft | None) -> Draft | None:
        deepest = seq.max_len - seq.num_tokens - 1  # the token after the drafts is one more
        if seq.sampling_state is not None:
            deepest = min(deepest, seq.sampling_state.most_drafts(seq.num_tokens - seq.prompt_len))
        if draft is None or deepest < 1:
            return None
        draft = draft.up_to(deepest)
        return draft if len(draft) else None


_NOTHING = np.zeros(0, np.int32)


def speculation_parts(config: SpeculativeConfig | None, decode_seconds: Mapping[tuple[int, int], float]
                      ) -> SpeculationParts | None:  # fmt: skip
    """decode_seconds: see `serving.engine.plan.Runner`."""
    if config is None:
        return None
    return SpeculationParts(length=make_length(config, decode_seconds), drafter=make_drafter(config),
                            tree_tokens=32 * tree_words(config), rejects=config.rejects)  # fmt: skip


def tree_words(config: SpeculativeConfig) -> int:
    """Of a row's tree mask, so that a longest path of forced or accepted tokens fits beside a whole tree."""
    return 1 + -(-config.most // 32) if config.has_tree else 0
