"""One sequence being generated: its tokens, its pages, and how far the device has come with it.

    tokens   |<------------ num_tokens known ----------->|<- num_pending ->|     prompt, then outputs
    KV       |<---------- num_computed ----------->|                             written by steps dispatched so far

A pending token has been sampled by a step that is still in flight; its value is known on the device only. A decode row
feeds the last token, known or pending, so num_computed is at most num_tokens + num_pending. Of a row with drafts it is
not known how many tokens are pending: one is counted, and nothing more is planned before they are known.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from serving.decoding.matcher import Matcher
from serving.decoding.speculation.chance import Chance
from serving.engine.plan import Draft
from serving.engine.sampling_state import SamplingState
from serving.kv.cache import PageTable
from serving.request import EngineRequest, FinishReason, Logprobs, TokenEvent

if TYPE_CHECKING:
    from serving.engine.group import Group

by_rank = attrgetter("rank")


class Sequence:
    def __init__(
        self,
        request: EngineRequest,
        *,
        arrival: int,
        max_model_len: int,
        page_size: int,
        namespace: Hashable | None,
        sampling_state: SamplingState | None,
        matcher: Matcher | None = None,
        mask_words: int = 0,
    ):
        sampling = request.sampling
        self.request = request
        self.arrival = arrival  # order of arrival in this engine
        self.rank: tuple[int, ...] = (arrival,)  # the policy's order among sequences, lower first
        self.prompt_len = len(request.prompt_token_ids)
        self.max_len = max_model_len
        if sampling.max_tokens is not None:
            self.max_len = min(max_model_len, self.prompt_len + sampling.max_tokens)
        self.end = max(self.prompt_len, self.max_len - 1)  # positions to compute at most: the last token is not fed
        self.tokens = np.empty(max(self.max_len, self.prompt_len), np.int32)
        self.tokens[: self.prompt_len] = request.prompt_token_ids
        self.num_tokens = self.prompt_len
        self.num_pending = 0
        self.num_computed = 0
        self.namespace = namespace  # of the prefix cache; None: it shares no pages
        self.table = PageTable(-(-self.end // page_size))
        self.slot = -1  # in its group; -1: waiting
        self.group: Group | None = None  # where it runs; of one that waits, the group that frees pages for it
        self.sampling_state = sampling_state
        # What its next token may be depends on the newest one.
        self.waits_for_host = matcher is not None or (sampling_state is not None and sampling_state.needs_outputs)
        self.matcher = matcher  # of the grammar that its output follows, moved on by all known output tokens
        self.mask_words = mask_words  # int32 words of a mask over the vocabulary
        self.draft: Draft | None = None  # proposed by the device after the last known token
        self.draft_chance = Chance()
        self.verifying = False  # a row with drafts is in flight
        self.num_untold = 0  # of the known tokens, the last ones, forced by the grammar and in no event yet
        self.prefill_end = self.prompt_len  # tokens that it had when it was let run, which have their pages since
        self.finish_reason: FinishReason | None = None
        self.leader: Sequence | None = None  # is computing pages that this one waits for ...
        self.leader_pages = 0  # ... until it has published this many
        self.num_cached = -1  # prompt tokens found in the prefix cache at first; -1: never scheduled
        self.queue_time = 0.0
        self.told_first = False  # its first event is out
        self.prompt_logprobs: list[Logprobs | None] | None = None
        self.prompt_targets_end = self.prompt_len  # prompt tokens before here have been asked to be scored
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None for _ in range(self.prompt_len)]
            self.prompt_targets_end = 1

    @property
    def total(self) -> int:
        """Tokens including pending ones."""
        return self.num_tokens + self.num_pending

    @property
    def num_unscored(self) -> int:
        """Of the known tokens, the last ones whose log-probabilities are still asked for."""
        return 0 if self.request.sampling.logprobs is None else self.num_untold

    @property
    def needs_newest(self) -> bool:
        """No row may be planned while its newest token is pending."""
        return self.verifying or self.waits_for_host

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some prompt token must still be computed for its log-probability, even if its K/V is cached."""
        return self.prompt_targets_end < self.prompt_len

    def next_targets(self, start: int, end: int) -> np.ndarray | None:
        """The known successors to score of the tokens start .. end - 1, if some have not been asked for; now they
        have."""
        if self.prompt_targets_end <= end and self.wants_prompt_logprobs:
            known = self.num_tokens if self.num_unscored else self.prompt_len
            targets = self.tokens[start + 1 : min(end + 1, known)]
            self.prompt_targets_end = min(start + 1 + len(targets), self.prompt_len)
            return targets
        if self.num_unscored and end >= self.num_tokens - self.num_unscored:
            return self.tokens[start + 1 : min(end + 1, self.num_tokens)]
        return None

    def store_prompt_logprobs(self, start: int, logprobs: list[Logprobs]) -> None:
        """Twice for a position (after a preemption) is harmless."""
        assert self.prompt_logprobs is not None
        for position, entry in enumerate(logprobs, start):
            self.prompt_logprobs[position] = entry

    def told(self, event: TokenEvent) -> TokenEvent:
        """The event; the first one carries what is told once."""
        if not self.told_first:
            self.told_first = True
            event.num_cached_tokens, event.queue_time = self.num_cached, self.queue_time
            event.prompt_logprobs = self.prompt_logprobs
        return event

    def append(self, token: int) -> None:
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1

    def output_token_ids(self) -> np.ndarray:
        return self.tokens[self.prompt_len : self.num_tokens]
