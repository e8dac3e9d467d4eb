"""Keeps the device's dense sampling state of a slot (biases, bans, counts) right for the sequence that owns it.

Most requests need none of it and cost nothing here. For the others an update goes along with a step when the sequence
gets a slot, and whenever the set of banned tokens changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.engine.plan import SlotUpdate
from serving.errors import InvalidRequest
from serving.request import EngineRequest

if TYPE_CHECKING:
    from serving.engine.sequence import Sequence


class SamplingState:
    """What one sequence bans, and what its slot was last told."""

    def __init__(self, request: EngineRequest, eos_token_ids: tuple[int, ...]):
        sampling = request.sampling
        self._min_tokens = sampling.min_tokens
        self._stops = sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids)
        self._always = tuple(word[0] for word in request.bad_words_token_ids if len(word) == 1)
        self._words = tuple((word[:-1], word[-1]) for word in request.bad_words_token_ids if len(word) > 1)
        self._counts = sampling.is_penalized
        self._sent: tuple[int, ...] | None = None  # bans of the last update; None: the slot is new
        self._check_something_is_left(sampling.allowed_token_ids)

    def _check_something_is_left(self, allowed: tuple[int, ...] | None) -> None:
        """Raises `InvalidRequest` if the first token would have to be one that is allowed and banned."""
        banned = frozenset(self._always + (self._stops if self._min_tokens else ()))
        if allowed is not None and all(token in banned for token in allowed):  # looks at few: they may be many
            raise InvalidRequest(
                f"allowed_token_ids {list(allowed)} leaves no token: all of them are banned by bad_words, or stop the "
                f"sequence before min_tokens ({self._min_tokens})",
                "allowed_token_ids",
            )

    @property
    def needs_outputs(self) -> bool:
        """The bans depend on the newest output: no step may be planned while one is pending."""
        return bool(self._words)

    def most_drafts(self, output_index: int) -> int:
        """How many drafts may follow each other from there on, so that the bans are the same for all of them."""
        if self._words:
            return 0
        return self._min_tokens - output_index - 1 if output_index < self._min_tokens else 1 << 30

    def left_slot(self) -> None:
        self._sent = None

    def counts_anew(self) -> None:
        """Tokens came that the device has not sampled: it is told all counts again."""
        if self._counts:
            self._sent = None

    def update(self, seq: Sequence, output_index: int) -> SlotUpdate | None:
        """What to send along with the step that samples output `output_index` of `seq`, if anything."""
        banned = self._banned(seq, output_index)
        if banned == self._sent:
            return None
        is_new, self._sent = self._sent is None, banned
        sampling = seq.request.sampling
        counts = is_new and self._counts
        return SlotUpdate(
            slot=seq.slot,
            logit_bias=sampling.logit_bias,
            banned_token_ids=banned,
            allowed_token_ids=sampling.allowed_token_ids,
            reset_counts=is_new,
            prompt_token_ids=seq.tokens[: seq.prompt_len] if counts else (),
            output_token_ids=seq.output_token_ids() if counts else (),
        )

    def _banned(self, seq: Sequence, output_index: int) -> tuple[int, ...]:
        banned = self._always
        if output_index < self._min_tokens:
            banned += self._stops
        if self._words:
            outputs = seq.output_token_ids()
            banned += tuple(
                last
                for prefix, last in self._words
                if len(outputs) >= len(prefix) and tuple(outputs[-len(prefix) :].tolist()) == prefix
            )
        return banned


def sampling_state(request: EngineRequest, eos_token_ids: tuple[int, ...]) -> SamplingState | None:
    """None where the request uses none of the fields that need dense state."""
    sampling = request.sampling
    if (
        sampling.logit_bias
        or sampling.allowed_token_ids is not None
        or request.bad_words_token_ids
        or sampling.min_tokens > 0
        or sampling.is_penalized
    ):
        return SamplingState(request, eos_token_ids)
    return None
