"""The contract between scheduler and runner: a `StepPlan` goes down, a `StepResult` comes back."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from serving.request import ExpertStats, Logprobs, SamplingParams

Tokens = Seq[int] | np.ndarray  # int32; an array is a view, not to be kept after `dispatch`


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow a sequence, to be verified by the model. A chain, or a tree whose tokens come after their
    parents."""

    tokens: np.ndarray  # int32
    parents: np.ndarray | None = None  # int32, index among the tokens; -1: the last known token. None: a chain

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def parent_of(self) -> np.ndarray:
        """Of each token, -1 for the last known one, also of a chain."""
        return np.arange(-1, len(self.tokens) - 1, dtype=np.int32) if self.parents is None else self.parents

    def first(self, count: int) -> "Draft":
        """The first tokens; parents come before their children."""
        return Draft(self.tokens[:count], None if self.parents is None else self.parents[:count])

    def up_to(self, depth: int) -> "Draft":
        """Without the tokens that have `depth` tokens or more before them."""
        if self.parents is None:
            return self if len(self.tokens) <= depth else self.first(depth)
        depths = np.ones(len(self.tokens), np.int32)
        for i, parent in enumerate(self.parents.tolist()):
            depths[i] += depths[parent] if parent >= 0 else 0
        return self.only(depths <= depth)

    def only(self, kept: np.ndarray) -> "Draft":
        """Some of the tokens, with the parents of all of them."""
        if self.parents is None:
            return Draft(self.tokens[kept])
        number = np.concatenate([np.cumsum(kept) - 1, [-1]]).astype(np.int32)  # the last is the parent -1
        return Draft(self.tokens[kept], number[self.parents[kept]])

    def after(self, tokens: Seq[int]) -> "Draft | None":
        """What it says of the time after these tokens, if it has them: its first ones, or of a branch."""
        at, parents = -1, self.parent_of
        for token in tokens:
            found = np.flatnonzero((parents == at) & (self.tokens == token))
            if not len(found):
                return None
            at = int(found[0])
        kept = parents == at
        for i in range(at + 1, len(self)):
            kept[i] |= parents[i] >= 0 and kept[parents[i]]
        return self.only(kept) if kept.any() else None


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """One sequence's share of a step: `num_tokens` tokens at cache indices start .. start + num_tokens - 1.

    `token_ids` holds them, or is None for a decode row whose single input token was sampled by an earlier step and
    may not have reached the host yet: the runner takes it from the device, at `slot`.

    The last `len(draft)` of them are guesses. The device verifies each against what it samples after the draft's
    parent, and samples one more token after the last that it accepts.
    """

    request_id: str
    slot: int  # this sequence's index in its group's device state arrays, 0 .. max_num_seqs - 1
    token_ids: Tokens | None
    start: int
    num_tokens: int
    # int32, the group's pages of positions 0 .. start + num_tokens - 1, in order (a view: not to be kept)
    page_ids: np.ndarray
    sampling: SamplingParams
    samples: bool  # the row's last token is the newest known: sample its successor
    output_index: int  # index of the first sampled token among the sequence's output tokens (feeds the seed)
    # Known tokens to score: those that follow the row's first tokens, with prompt_logprobs or, where a grammar has
    # forced some, with logprobs. There may be fewer targets than tokens.
    targets: Tokens | None = None
    draft: Draft | None = None
    # The tokens allowed after the last known token and after each draft: int32 [1 + drafts, V / 32 rounded up], bit
    # i % 32 of word i // 32. None: all
    mask: np.ndarray | None = None
    following: int = 0  # the known token after the row's last, where it does not sample: for drafters on the device

    @property
    def num_drafts(self) -> int:
        return 0 if self.draft is None else len(self.draft)


@dataclass(frozen=True, kw_only=True)
class SlotUpdate:
    """Sets a slot's dense sampling state before the step. Sent only for requests that use such fields, and to clean
    a slot that the previous owner used.

    Every update replaces biases, bans and the allowed set. The tokens counted for the penalties are replaced only when
    `reset_counts` is set (a new owner): the device then starts from `prompt_token_ids` and `output_token_ids` and adds
    each token it samples for the slot, right after sampling it."""

    slot: int
    logit_bias: dict[int, float] = field(default_factory=dict)  # added to the logits
    banned_token_ids: Seq[int] = ()  # -inf
    allowed_token_ids: Seq[int] | None = None  # None: all
    reset_counts: bool = True
    prompt_token_ids: Tokens = ()  # for the repetition penalty
    output_token_ids: Tokens = ()  # for all three penalties; later outputs are counted on the device


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """One data group's share of a step: rows with one token come first (`num_decode` of them), the rest are chunks of
    prompts. Slots and pages are the group's own."""

    rows: list[RowPlan] = field(default_factory=list)
    num_decode: int = 0
    slot_updates: list[SlotUpdate] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What all data groups do in one step. A group without rows only pads along."""

    groups: list[GroupPlan]  # always one for each of the runner's groups
    draft_length: int = 0  # how many tokens a drafter on the device should propose to each row's next step

    @cached_property
    def rows(self) -> list[RowPlan]:
        """All rows, group after group."""
        return [row for group in self.groups for row in group.rows]

    @property
    def num_tokens(self) -> int:
        return sum(group.num_tokens for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Aligned with the plan's rows."""

    token_ids: list[list[int]]  # the accepted drafts and the token after them; none where `samples` is false
    logprobs: list[list[Logprobs] | None]  # one entry a token
    target_logprobs: list[list[Logprobs] | None]  # one entry for each of the row's targets
    num_kept: list[int]  # accepted drafts, from the first on, whose K/V is where the next token expects it
    drafts: list[Draft | None]  # what the device proposes to follow, where it has a drafter
    device_seconds: float = 0.0  # waiting for the device
    fetch_seconds: float = 0.0  # copying and unpacking
    experts: ExpertStats | None = None  # where there is news of them


class Runner(Protocol):
    """Executes plans in the order of dispatch. One plan may be in flight while the next is dispatched.

    `num_pages`, `max_num_seqs` and `max_num_batched_tokens` are of each data group."""

    num_groups: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    # Measured at the start, of a step of so many decoding rows (a power of two) with so many drafts each, contexts left
    # out. For every number of drafts that may be chosen; empty where there is no choice.
    decode_seconds: Mapping[tuple[int, int], float]

    def dispatch(self, plan: StepPlan) -> Any:
        """Packs and starts a step without waiting for it; returns a handle for `fetch`."""
        ...

    def fetch(self, handle: Any) -> StepResult:
        """Waits for a step; handles must be fetched in the order of dispatch."""
        ...

    @property
    def drafts_on_device(self) -> bool:
        """A step's results bring drafts for the next."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters: compile_misses, pack_seconds, dispatch_seconds, padding_tokens."""
        ...

    def close(self, reason: str = "") -> None:
        """Nothing follows. Lets other hosts go, where there are any; `reason`: why, if not by intention."""
        ...
