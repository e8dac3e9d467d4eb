"""Continuous batching: decides, for each step, which sequences run and with how many tokens.

A step has a token budget. Running sequences that decode come first and always get their token; then prompts in progress
and after them waiting requests share what remains, in chunks. A prompt gets all its pages when it is admitted; only
decoding asks for more, and if none can be had the lowest-ranked running sequences are preempted: they lose their pages,
keep their tokens and wait at the place their rank gives them, to be computed again.

Steps overlap: `schedule` is called again before the results of the last step are known, and `update` gets them
later. Until then a sampled token is pending (see `sequence.py`). A result for a sequence that has ended meanwhile is
dropped; one for a sequence that was preempted meanwhile counts.

Plain Python over integers; one thread calls it.
"""

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable

from serving.engine.plan import SlotUpdate, StepResult
from serving.engine.policies import POLICIES
from serving.engine.sampling_state import sampling_state
from serving.engine.scheduler_config import SchedulerConfig
from serving.engine.sequence import Sequence
from serving.engine.shared_prefixes import Leaders, follows_leader
from serving.engine.step import GroupBuilder, Step
from serving.errors import InvalidRequest, Overloaded
from serving.kv.cache import KVCache, Match
from serving.request import EngineRequest, EngineStats, FinishReason, Logprobs, TokenEvent


class Scheduler:
    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.time):
        self.config = config
        self.kv = KVCache(config.num_pages, config.page_size)
        self.stats = EngineStats()
        self._clock = clock
        self._policy = POLICIES[config.policy]()
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # both lists are in order of rank
        self._running: list[Sequence] = []
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._dirty_slots: set[int] = set()  # their sampling state is not the neutral one
        self._groups: Counter[str] = Counter()  # live sequences by group, where only a group shares pages
        self._num_arrived = 0

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def add(self, request: EngineRequest) -> None:
        """Queues a request. Raises `InvalidRequest` if it can never run and `Overloaded` if too many wait."""
        config = self.config
        if request.request_id in self._sequences:
            raise InvalidRequest(f"a request with id {request.request_id!r} is already live", "request_id")
        if not 0 < len(request.prompt_token_ids) < config.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(request.prompt_token_ids)} tokens, but must have at least 1 and fewer than the "
                f"context length of {config.max_model_len}",
                "prompt",
            )
        if len(self._waiting) >= config.max_num_waiting:
            raise Overloaded(f"{len(self._waiting)} requests are waiting, the limit is {config.max_num_waiting}")
        namespace: Hashable | None = ("group", request.group_id) if request.group_id else None
        if config.enable_prefix_caching:
            namespace = ("salt", request.cache_salt)
        seq = Sequence(
            request,
            arrival=self._num_arrived,
            max_model_len=config.max_model_len,
            page_size=config.page_size,
            namespace=namespace,
            sampling_state=sampling_state(request, config.eos_token_ids),
        )
        needed = self.kv.pages_for(seq.end)
        if needed > self.kv.pool.num_usable:
            raise InvalidRequest(
                f"the request needs {needed} KV pages for {seq.max_len} tokens (prompt {seq.prompt_len} and output), "
                f"but the cache has only {self.kv.pool.num_usable} pages of {config.page_size} tokens",
                "max_tokens",
            )
        self._num_arrived += 1
        seq.rank = self._policy.rank(seq)
        self._sequences[request.request_id] = seq
        if self._shares_in_group_only(seq):
            self._groups[request.group_id] += 1
        insort(self._waiting, seq, key=_rank)

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a sequence; None if there is none with that id (any more)."""
        seq = self._sequences.get(request_id)
        return None if seq is None else self._finish(seq, "abort", TokenEvent(request_id=request_id))

    def abort_all(self, reason: FinishReason, error: str = "") -> list[TokenEvent]:
        return [
            self._finish(seq, reason, TokenEvent(request_id=request_id, error=error))
            for request_id, seq in list(self._sequences.items())
        ]

    def schedule(self) -> Step | None:
        """Plans the next step, to be dispatched at once; None if there is nothing to run now."""
        builder = GroupBuilder(self.config.max_num_batched_tokens, self.config.page_size)
        prefills, short_of_pages = self._add_decodes(builder)
        for seq in prefills:
            if builder.budget:
                builder.add_chunk(seq, self.config.long_prefill_token_threshold)
        if self._waiting and self._free_slots and builder.budget and not short_of_pages:
            self._admit_waiting(builder)
        for seq in builder.prefilled:  # not before the step is planned: pages may be read by later steps only
            self.kv.publish(seq.table, seq.tokens, seq.num_computed)
        return Step.of([builder])

    def update(self, step: Step, result: StepResult) -> list[TokenEvent]:
        """Takes in the results of a step, in the order of scheduling."""
        events = []
        for i, (seq, row) in enumerate(zip(step.sequences, step.plan.rows, strict=True)):
            if seq.finish_reason is not None:
                continue
            if row.prompt_targets is not None:
                seq.store_prompt_logprobs(row.start + 1, result.prompt_logprobs[i] or [])
            if row.samples:
                events.append(self._take_token(seq, result.token_ids[i], result.logprobs[i]))
            elif row.start + row.num_tokens == seq.max_len:  # max_tokens is 0
                events.append(self._finish(seq, "length", seq.next_event()))
        return events

    def snapshot(self) -> EngineStats:
        """The books with the gauges brought up to date. The same object each time."""
        stats = self.stats
        stats.num_running, stats.num_waiting = len(self._running), len(self._waiting)
        stats.kv_cache_usage = self.kv.num_held / self.kv.pool.num_usable
        return stats

    def check_integrity(self) -> None:
        """Checks all books; raises AssertionError. Holds after every call from outside."""
        for queue in (self._waiting, self._running):
            assert [seq.rank for seq in queue] == sorted({seq.rank for seq in queue}), "a queue is out of order"
        live = {id(seq) for seq in self._sequences.values()}
        assert live == {id(seq) for seq in self._waiting + self._running}
        assert len(live) == len(self._waiting) + len(self._running)
        slots = [seq.slot for seq in self._running] + self._free_slots
        assert sorted(slots) == list(range(self.config.max_num_seqs)), "a slot is lost or used twice"
        for seq in self._running:
            assert 0 <= seq.num_computed <= min(seq.total, seq.end)
            assert self.kv.pages_for(seq.num_computed) <= seq.table.num_pages
            assert seq.table.num_shared * self.config.page_size <= min(seq.num_computed, seq.num_tokens)
        for seq in self._waiting:
            assert seq.slot == -1 and not seq.table.num_pages and not seq.num_computed
        for seq in self._sequences.values():
            assert seq.finish_reason is None and 0 <= seq.num_pending <= 2 and seq.total <= seq.max_len
        self.kv.check_integrity(seq.table for seq in self._running)

    # ---- planning

    def _add_decodes(self, builder: GroupBuilder) -> tuple[list[Sequence], bool]:
        """Gives every decoding sequence its token. Returns the sequences that still have a chunk of tokens to compute,
        and whether pages ran short."""
        prefills: list[Sequence] = []
        short_of_pages = False
        page_size = self.config.page_size
        for seq in tuple(self._running):
            if seq.slot < 0:  # preempted just now, and so were all after it
                break
            start = seq.num_computed
            if start >= seq.end:  # whatever comes back is its last token
                continue
            if seq.num_tokens + seq.num_pending - start > 1:
                prefills.append(seq)
                continue
            if seq.num_pending and seq.sampling_state is not None and seq.sampling_state.needs_outputs:
                continue
            if start >= seq.table.num_pages * page_size and not self.kv.grow(seq.table, start + 1):
                short_of_pages = True
                if not self._preempt_for(seq):
                    break
            builder.add_decode(seq)
        return prefills, short_of_pages

    def _preempt_for(self, seq: Sequence) -> bool:
        """Preempts sequences of lower rank until `seq` can grow. None of them is in the step yet: they are planned in
        order of rank. False: it is the last one itself; it keeps its pages and waits."""
        while self._running[-1] is not seq:
            victim = self._running[-1]
            self._leave_running(victim)
            victim.num_computed = 0
            insort(self._waiting, victim, key=_rank)
            self.stats.num_preemptions += 1
            if self.kv.grow(seq.table, seq.num_computed + 1):
                return True
        return False

    def _admit_waiting(self, builder: GroupBuilder) -> None:
        leaders = Leaders(self.config.page_size)
        for seq in builder.prefilled:
            leaders.add(seq)
        candidates = self._waiting[: 2 * self.config.max_num_seqs]  # bounds the search past those that wait for others
        num_running = len(self._running)
        for seq in candidates:
            if not builder.budget or not self._free_slots:
                break
            if follows_leader(seq):
                continue
            assert not seq.num_pending  # a step that preempts admits nothing, and the results come before the next
            match = self._match(seq)
            if match is not None and not seq.wants_prompt_logprobs and leaders.keep_waiting(seq, match):
                continue
            # Each running sequence keeps a page to grow into: else it would soon preempt the newcomer.
            if not self.kv.admit(seq.table, match, seq.num_tokens, headroom=len(self._running)):
                break
            self._enter_running(builder, seq)
            builder.add_chunk(seq, self.config.long_prefill_token_threshold)
            leaders.add(seq)
        if len(self._running) > num_running:
            self._waiting = [seq for seq in self._waiting if seq.slot < 0]

    def _match(self, seq: Sequence) -> Match | None:
        if seq.namespace is None:
            return None
        # The whole prompt is computed for its log-probabilities: all but one token of it are not looked for.
        return self.kv.match(seq.namespace, seq.tokens[: 1 if seq.wants_prompt_logprobs else seq.num_tokens])

    # ---- life of a sequence

    def _enter_running(self, builder: GroupBuilder, seq: Sequence) -> None:
        seq.slot = self._free_slots.pop()
        seq.num_computed = seq.table.num_shared * self.config.page_size
        insort(self._running, seq, key=_rank)
        if seq.sampling_state is not None:
            self._dirty_slots.add(seq.slot)
        elif seq.slot in self._dirty_slots:
            self._dirty_slots.remove(seq.slot)
            builder.slot_updates.append(SlotUpdate(slot=seq.slot))
        if seq.num_cached < 0:
            seq.num_cached = seq.num_computed
            seq.queue_time = max(0.0, self._clock() - seq.request.arrival_time)
            self.stats.prompt_tokens += seq.prompt_len
            self.stats.prompt_tokens_cached += seq.num_cached
            if seq.namespace is not None:
                self.stats.prefix_cache_queries += seq.prompt_len
                self.stats.prefix_cache_hits += seq.num_cached

    def _leave_running(self, seq: Sequence) -> None:
        del self._running[bisect_left(self._running, seq.rank, key=_rank)]
        self._free_slots.append(seq.slot)
        seq.slot = -1
        if seq.sampling_state is not None:
            seq.sampling_state.left_slot()
        self.kv.release(seq.table)

    def _take_token(self, seq: Sequence, token: int, logprobs: Logprobs | None) -> TokenEvent:
        seq.tokens[seq.num_tokens] = token
        seq.num_tokens += 1
        seq.num_pending -= 1
        self.stats.generation_tokens += 1
        event = seq.next_event()
        event.new_token_ids = [token]
        if logprobs is not None:
            event.logprobs = [logprobs]
        known = min(seq.num_computed, seq.num_tokens)
        if known >= (seq.table.num_shared + 1) * self.config.page_size:
            self.kv.publish(seq.table, seq.tokens, known)
        sampling = seq.request.sampling
        if token in self.config.eos_token_ids and not sampling.ignore_eos:
            return self._finish(seq, "stop", event)
        if token in sampling.stop_token_ids:
            event.stop_token_id = token
            return self._finish(seq, "stop", event)
        if seq.num_tokens >= seq.max_len:
            return self._finish(seq, "length", event)
        return event

    def _finish(self, seq: Sequence, reason: FinishReason, event: TokenEvent) -> TokenEvent:
        """Frees all that the sequence holds. Steps in flight may still write its pages: later ones overwrite them."""
        seq.finish_reason = event.finish_reason = reason
        del self._sequences[seq.request.request_id]
        if seq.slot >= 0:
            self._leave_running(seq)
        else:
            del self._waiting[bisect_left(self._waiting, seq.rank, key=_rank)]
        if self._shares_in_group_only(seq):
            group = seq.request.group_id
            self._groups[group] -= 1
            if not self._groups[group]:
                del self._groups[group]
                self.kv.drop(("group", group))
        return event

    def _shares_in_group_only(self, seq: Sequence) -> bool:
        return bool(seq.request.group_id) and not self.config.enable_prefix_caching


def _rank(seq: Sequence) -> tuple[int, ...]:
    return seq.rank
