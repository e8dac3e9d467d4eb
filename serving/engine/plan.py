"""The contract between scheduler and runner: a `StepPlan` goes down, a `StepResult` comes back."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from serving.request import ExpertStats, Logprobs, SamplingParams

Tokens = Seq[int] | np.ndarray  # int32; an array is a view, not to be kept after `dispatch`


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """One sequence's share of a step: `num_tokens` tokens at positions start .. start + num_tokens - 1.

    `token_ids` holds them, or is None for a decode row whose single input token was sampled by an earlier step and
    may not have reached the host yet: the runner takes it from the device, at `slot`.
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
    output_index: int  # index of the sampled token among the sequence's output tokens (feeds the seed)
    # With prompt_logprobs: the prompt token that follows each of the row's first tokens. The last token of the prompt
    # has no such successor, so there may be fewer targets than tokens.
    prompt_targets: Tokens | None = None


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

    @cached_property
    def rows(self) -> list[RowPlan]:
        """All rows, group after group."""
        return [row for group in self.groups for row in group.rows]

    @property
    def num_tokens(self) -> int:
        return sum(group.num_tokens for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Aligned with the plan's rows. `token_ids[i]` means nothing where `rows[i].samples` is false."""

    token_ids: list[int]
    logprobs: list[Logprobs | None]
    prompt_logprobs: list[list[Logprobs] | None]  # one entry for each of the row's prompt_targets
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

    def dispatch(self, plan: StepPlan) -> Any:
        """Packs and starts a step without waiting for it; returns a handle for `fetch`."""
        ...

    def fetch(self, handle: Any) -> StepResult:
        """Waits for a step; handles must be fetched in the order of dispatch."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters: compile_misses, pack_seconds, dispatch_seconds, padding_tokens."""
        ...

    def close(self, reason: str = "") -> None:
        """Nothing follows. Lets other hosts go, where there are any; `reason`: why, if not by intention."""
        ...
