"""Continuous batching: decides, for each step, which sequences run and with how many tokens.

A step has a token budget. Running sequences that decode come first and always get their token; then prompts in
progress and after them waiting requests share what remains, in chunks; drafts leave them at least half of it. A prompt
gets all its pages when it is admitted; only decoding asks for more, and if none can be had the lowest-ranked running
sequences are preempted: they lose their pages, keep their tokens and wait at the place their rank gives them, to be
computed again.

Steps overlap: `schedule` is called again before the results of the last step are known, and `update` gets them
later. Until then a sampled token is pending (see `sequence.py`). A result for a sequence that has ended meanwhile is
dropped; one for a sequence that was preempted meanwhile counts. Sequences whose next row depends on their newest token,
for a grammar or for drafts, are planned once it is known, and the others meanwhile.

A grammar often leaves no choice. Tokens that it forces are appended as soon as that is known, without being sampled;
the next row feeds them all.

Plain Python over integers; one thread calls it.
"""

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable

from serving.decoding.matcher import Matcher
from serving.engine.group import Group
from serving.engine.outputs import Outputs
from serving.engine.placement import choose, find_places
from serving.engine.plan import StepResult
from serving.engine.policies import POLICIES
from serving.engine.sampling_state import sampling_state
from serving.engine.scheduler_config import SchedulerConfig
from serving.engine.sequence import Sequence, by_rank
from serving.engine.shared_prefixes import Leaders, leader_of
from serving.engine.speculating import Speculation
from serving.engine.step import Step
from serving.engine.timed_matcher import TimedMatcher
from serving.errors import InvalidRequest, Overloaded
from serving.request import EngineRequest, EngineStats, FinishReason, GroupStats, TokenEvent

WAITING_SHARE = 8  # steps are read before the next is planned where one in so many sequences would miss that one
MAX_PASSED = 16  # sequences that a step may pass over: each costs a look into every group's prefix cache


class Scheduler:
    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.time):
        self.config = config
        self.stats = EngineStats()
        self.speculation = Speculation(config.speculation, self.stats)
        self.groups = [Group(config, index, self.speculation) for index in range(config.num_groups)]
        self._clock = clock
        self._policy = POLICIES[config.policy]()
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # in order of rank
        self._siblings: Counter[str] = Counter()  # live sequences by group_id, where only they share pages
        self._num_arrived = 0
        self._outputs = Outputs(config, self.stats, self._finish)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def waits_for_result(self) -> bool:
        """Whether the step in flight had better be read before the next is planned: too many sequences would miss it.
        What that costs is the time between steps, a few percent of one."""
        if self.speculation.is_on:
            return True
        waiting = sum(group.num_waiting_for_host for group in self.groups)
        return waiting > 0 and waiting * WAITING_SHARE >= sum(len(group.running) for group in self.groups)

    def check_room(self, num_elsewhere: int = 0) -> None:
        """Raises `Overloaded` if too many requests wait, here and elsewhere."""
        num_waiting = len(self._waiting) + num_elsewhere
        if num_waiting >= self.config.max_num_waiting:
            raise Overloaded(f"{num_waiting} requests are waiting, the limit is {self.config.max_num_waiting}")

    def add(self, request: EngineRequest, matcher: Matcher | None = None) -> None:
        """Queues a request, for which there was room when it came. matcher: of its grammar, if it has one. Raises
        `InvalidRequest` if it can never run."""
        config = self.config
        if request.request_id in self._sequences:
            raise InvalidRequest(f"a request with id {request.request_id!r} is already live", "request_id")
        if not 0 < len(request.prompt_token_ids) < config.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(request.prompt_token_ids)} tokens, but must have at least 1 and fewer than the "
                f"context length of {config.max_model_len}",
                "prompt",
            )
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
            matcher=None if matcher is None else TimedMatcher(matcher, self.stats),
            mask_words=-(-config.vocab_size // 32),
        )
        needed, kv = -(-seq.end // config.page_size), self.groups[0].kv
        if needed > kv.pool.num_usable:
            raise InvalidRequest(
                f"the request needs {needed} KV pages for {seq.max_len} tokens (prompt {seq.prompt_len} and output), "
                f"but the cache has only {kv.pool.num_usable} pages of {config.page_size} tokens",
                "max_tokens",
            )
        self._num_arrived += 1
        seq.rank = self._policy.rank(seq)
        self._sequences[request.request_id] = seq
        if self._shares_with_siblings_only(seq):
            self._siblings[request.group_id] += 1
        self._outputs.force(seq)
        insort(self._waiting, seq, key=by_rank)

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
        prompts = [group.has_prompts or (bool(self._waiting) and group.is_open) for group in self.groups]
        self.speculation.begin_step(max(len(group.running) for group in self.groups), any(prompts))
        for group, has_prompts in zip(self.groups, prompts, strict=True):
            for seq in group.plan_running(has_prompts):
                insort(self._waiting, seq, key=by_rank)
                self.stats.num_preemptions += 1
        if self._waiting:
            self._admit_waiting()
        for group in self.groups:
            group.publish_prefilled()
        return Step.of([group.share for group in self.groups], self.speculation.length)

    def update(self, step: Step, result: StepResult) -> list[TokenEvent]:
        """Takes in the results of a step, in the order of scheduling."""
        events: list[TokenEvent] = []
        accepted: dict[int, int] = {}  # drafts of rows that had some, or might have had
        for i, (seq, row) in enumerate(zip(step.sequences, step.plan.rows, strict=True)):
            if seq.finish_reason is not None:
                continue
            if row.draft is not None:
                accepted[i] = len(result.token_ids[i]) - 1
                self.speculation.count(seq, row.draft, accepted[i])
            elif row.samples and row.num_tokens == 1:
                accepted[i] = 0
            event = self._outputs.take(seq, row, result, i)
            if event is not None:
                if row.draft is not None:
                    event.draft_tokens, event.accepted_tokens = len(row.draft), accepted[i]
                events.append(event)
        self.speculation.observe_rows(step.plan, accepted)
        return events

    def flush(self) -> bool:
        """Frees every cached page that no sequence uses. True when nothing stays cached."""
        return all([group.kv.flush() for group in self.groups])

    def snapshot(self) -> EngineStats:
        """The books with the gauges brought up to date. The same object each time."""
        stats = self.stats
        stats.num_waiting = len(self._waiting)
        stats.groups = [GroupStats(num_running=len(g.running), kv_cache_usage=g.kv.usage) for g in self.groups]
        stats.num_running = sum(group.num_running for group in stats.groups)
        stats.kv_cache_usage = sum(group.kv_cache_usage for group in stats.groups) / len(stats.groups)
        return stats

    def check_integrity(self) -> None:
        """Checks all books; raises AssertionError. Holds after every call from outside."""
        assert [seq.rank for seq in self._waiting] == sorted({seq.rank for seq in self._waiting}), "out of order"
        seqs = self._waiting + [seq for group in self.groups for seq in group.running]
        assert len(seqs) == len(self._sequences) and set(seqs) == set(self._sequences.values())
        for seq in self._waiting:
            assert seq.slot == -1 and not seq.table.num_pages and not seq.num_computed
        for seq in seqs:
            assert seq.finish_reason is None and 0 <= seq.num_pending <= 2 and seq.total <= seq.max_len
            assert not seq.verifying or seq.num_pending == 1
            assert 0 <= seq.num_untold <= seq.num_tokens - seq.prompt_len
        for group in self.groups:
            group.check_integrity()

    # ---- planning

    def _admit_waiting(self) -> None:
        """Lets waiting sequences run, in order of rank, each in the group that suits it best. Where none has room for
        it, one group takes nobody of lower rank until it has."""
        leaders = Leaders(self.config.page_size)
        for group in self.groups:
            for seq in group.share.prefilled:
                leaders.add(seq)
        open_groups = [group for group in self.groups if group.is_open]
        num_admitted = num_passed = 0
        for seq in self._waiting[: 2 * self.config.max_num_seqs * len(self.groups)]:
            if num_passed > MAX_PASSED or not any(group.share.budget for group in open_groups):
                break
            if seq.num_pending:  # it was preempted just now: a token of it is still under way
                continue
            if (leader := leader_of(seq)) is not None and leader.group is not None:
                leader.group.num_expected += 1
                continue
            places = find_places(seq, open_groups, leaders)
            place = choose(places, self.config.max_num_batched_tokens)
            if place is None:
                seq.group = seq.group or places[0].group
                open_groups = [group for group in open_groups if group is not seq.group]
                num_passed += 1
            elif place.leader is not None:
                seq.leader, seq.leader_pages = place.leader, place.leader_pages
                place.group.num_expected += 1
            elif not place.group.share.budget:
                place.group.num_expected += 1
                num_passed += 1
            else:
                place.group.admit(seq, place.match)
                self._count_admitted(seq)
                leaders.add(seq)
                num_admitted += 1
                open_groups = [group for group in open_groups if group.is_open]
        if num_admitted:
            self._waiting = [seq for seq in self._waiting if seq.slot < 0]

    def _count_admitted(self, seq: Sequence) -> None:
        if seq.num_cached >= 0:  # not for the first time
            return
        stats = self.stats
        seq.num_cached = seq.table.num_shared * self.config.page_size
        seq.queue_time = max(0.0, self._clock() - seq.request.arrival_time)
        stats.prompt_tokens += seq.prompt_len
        stats.prompt_tokens_cached += seq.num_cached
        if seq.namespace is not None:
            stats.prefix_cache_queries += seq.prompt_len
            stats.prefix_cache_hits += seq.num_cached

    # ---- life of a sequence

    def _finish(self, seq: Sequence, reason: FinishReason, event: TokenEvent) -> TokenEvent:
        """Frees all that the sequence holds. Steps in flight may still write its pages: later ones overwrite them."""
        seq.finish_reason = event.finish_reason = reason
        self.speculation.forget(seq)
        del self._sequences[seq.request.request_id]
        if seq.group is not None and seq.slot >= 0:
            seq.group.leave(seq)
        else:
            del self._waiting[bisect_left(self._waiting, seq.rank, key=by_rank)]
        if self._shares_with_siblings_only(seq):
            group_id = seq.request.group_id
            self._siblings[group_id] -= 1
            if not self._siblings[group_id]:
                del self._siblings[group_id]
                for group in self.groups:
                    group.kv.drop(("group", group_id))
        return event

    def _shares_with_siblings_only(self, seq: Sequence) -> bool:
        return bool(seq.request.group_id) and not self.config.enable_prefix_caching
