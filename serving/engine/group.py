"""A data group: a pool of pages with its prefix cache, slots, and the sequences that run there.

All groups step together in one program, each on its own memory. Nothing moves from one to another: a sequence that is
preempted starts again wherever the scheduler places it next.
"""

from bisect import bisect_left, insort

from serving.engine.plan import SlotUpdate
from serving.engine.scheduler_config import SchedulerConfig
from serving.engine.sequence import Sequence, by_rank
from serving.engine.speculating import Speculation
from serving.engine.step import GroupBuilder
from serving.kv.cache import KVCache, Match


class Group:
    """For each step `plan_running` comes first, then any number of `admit`, then `publish_prefilled`; meanwhile `share`
    is the step's share being planned."""

    def __init__(self, config: SchedulerConfig, index: int, speculation: Speculation):
        self.index = index
        self._speculation = speculation
        self.kv = KVCache(config.num_pages, config.page_size)
        self.running: list[Sequence] = []  # in order of rank
        self.share = GroupBuilder(0, config.page_size)
        self.short_of_pages = False  # a sequence could not grow in this step
        self.num_outstanding = 0  # tokens that this step and later ones have to compute before any of a newcomer
        self.num_waiting_for_host = 0  # of those that run
        self.num_expected = 0  # sequences that wait in order to run here
        self._config = config
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._dirty_slots: set[int] = set()  # their sampling state is not the neutral one

    @property
    def is_open(self) -> bool:
        """Whether it may take a newcomer, if that finds room for its pages."""
        return bool(self._free_slots) and not self.short_of_pages

    @property
    def has_prompts(self) -> bool:
        """Whether some are in progress."""
        return any(map(_has_chunk, self.running))

    def plan_running(self, has_prompts: bool) -> list[Sequence]:
        """Begins a step: every decoding sequence gets its token, prompts in progress share what remains. Returns the
        sequences that were preempted, which wait now. has_prompts: some are in progress, or may be admitted after."""
        self.share = GroupBuilder(self._config.max_num_batched_tokens, self._config.page_size)
        self.short_of_pages, self.num_expected = False, 0
        prefills, preempted = self._plan_decodes(has_prompts)
        self.num_outstanding = self.share.num_rows
        for seq in prefills:
            self._plan_chunk(seq)
        return preempted

    def match(self, seq: Sequence) -> Match | None:
        """What the prefix cache has of it; None if it is to share nothing."""
        if seq.namespace is None:
            return None
        # What log-probabilities are asked for is computed: of a prompt, all but one token of it are not looked for.
        wanted = 1 if seq.wants_prompt_logprobs else seq.num_tokens - seq.num_unscored
        return self.kv.match(seq.namespace, seq.tokens[:wanted])

    def has_room(self, match: Match | None, num_tokens: int) -> bool:
        """Whether a newcomer of so many tokens gets its pages. Each running sequence keeps one to grow into: else it
        would soon preempt the newcomer."""
        return self.kv.has_room(match, num_tokens, headroom=len(self.running))

    def admit(self, seq: Sequence, match: Match | None) -> None:
        """Lets a waiting sequence run, for which there is a slot and room."""
        self.kv.admit(seq.table, match, seq.num_tokens)
        seq.group, seq.slot = self, self._free_slots.pop()
        seq.num_computed = seq.table.num_shared * self.kv.page_size
        seq.prefill_end = seq.num_tokens
        insort(self.running, seq, key=by_rank)
        self.num_waiting_for_host += seq.waits_for_host
        if seq.sampling_state is not None:
            self._dirty_slots.add(seq.slot)
        elif seq.slot in self._dirty_slots:
            self._dirty_slots.remove(seq.slot)
            self.share.slot_updates.append(SlotUpdate(slot=seq.slot))
        self._plan_chunk(seq)

    def publish_prefilled(self) -> None:
        """Not before the step is planned: pages may be read by later steps only."""
        for seq in self.share.prefilled:
            self.kv.publish(seq.table, seq.tokens, seq.num_computed)

    def leave(self, seq: Sequence) -> None:
        """Ends its running here: its slot and pages are free."""
        del self.running[bisect_left(self.running, seq.rank, key=by_rank)]
        self._free_slots.append(seq.slot)
        self.num_waiting_for_host -= seq.waits_for_host
        seq.group, seq.slot, seq.num_computed, seq.verifying = None, -1, 0, False
        if seq.sampling_state is not None:
            seq.sampling_state.left_slot()
        self.kv.release(seq.table)

    def check_integrity(self) -> None:
        assert [seq.rank for seq in self.running] == sorted({seq.rank for seq in self.running}), "out of order"
        slots = [seq.slot for seq in self.running] + self._free_slots
        assert sorted(slots) == list(range(self._config.max_num_seqs)), "a slot is lost or used twice"
        assert self.num_waiting_for_host == sum(seq.waits_for_host for seq in self.running)
        for seq in self.running:
            assert seq.group is self
            assert 0 <= seq.num_computed <= min(seq.total, seq.end)
            assert self.kv.pages_for(seq.num_computed) <= seq.table.num_pages
            assert seq.table.num_shared * self.kv.page_size <= min(seq.num_computed, seq.num_tokens)
        self.kv.check_integrity(seq.table for seq in self.running)

    def _plan_decodes(self, has_prompts: bool) -> tuple[list[Sequence], list[Sequence]]:
        """Returns the sequences that still have a chunk of tokens to compute, and those that were preempted."""
        prefills: list[Sequence] = []
        preempted: list[Sequence] = []
        spare = self.share.budget - len(self.running)  # tokens beyond one of each sequence
        # Drafts leave half of them to prompts, which would starve else: a step's drafts may be as many as its budget.
        for_drafts = spare // 2 if has_prompts else spare
        for seq in tuple(self.running):
            if seq.slot < 0:  # preempted just now, and so were all after it
                break
            start = seq.num_computed
            if start >= seq.end:  # whatever comes back is its last token
                continue
            if _has_chunk(seq):
                prefills.append(seq)
                continue
            if seq.num_pending and (seq.needs_newest or self._speculation.is_on):
                continue
            num_tokens = 1 + min(seq.total - start - 1, spare)
            if not self._grow(seq, start + num_tokens) and not self._preempt_for(seq, num_tokens, preempted):
                break
            spare -= num_tokens - 1
            num_drafts = self._add_row(seq, num_tokens, min(spare, for_drafts))
            spare, for_drafts = spare - num_drafts, for_drafts - num_drafts
        return prefills, preempted

    def _add_row(self, seq: Sequence, num_tokens: int, room: int) -> int:
        """Adds a row of `num_tokens` known or pending tokens, for which there are pages, with a draft where there is
        one and room for it. Returns the draft's length."""
        draft = mask = None
        room = min(room, len(seq.table.pages) * self.kv.page_size - seq.num_computed - num_tokens)  # a tree may be wide
        if not seq.num_pending and seq.num_computed + num_tokens == seq.num_tokens:
            draft, mask = self._speculation.propose(seq, num_tokens, room)
        if draft is not None and not self.kv.grow(seq.table, seq.num_computed + num_tokens + len(draft)):
            draft, mask = None, None if mask is None else mask[:1]
        self.share.add_decode(seq, num_tokens, draft, mask)
        return 0 if draft is None else len(draft)

    def _grow(self, seq: Sequence, num_tokens: int) -> bool:
        if num_tokens <= seq.table.num_pages * self.kv.page_size or self.kv.grow(seq.table, num_tokens):
            return True
        self.short_of_pages = True
        return False

    def _preempt_for(self, seq: Sequence, num_tokens: int, preempted: list[Sequence]) -> bool:
        """Preempts sequences of lower rank until `seq` can grow. None of them is in the step yet: they are planned in
        order of rank. False: it is the last one itself; it keeps its pages and waits."""
        while self.running[-1] is not seq:
            victim = self.running[-1]
            self.leave(victim)
            preempted.append(victim)
            if self.kv.grow(seq.table, seq.num_computed + num_tokens):
                return True
        return False

    def _plan_chunk(self, seq: Sequence) -> None:
        self.num_outstanding += seq.num_tokens - seq.num_computed
        if self.share.budget:
            limit = self._config.long_prefill_token_threshold
            self.share.add_chunk(seq, limit, lambda: self._speculation.propose(seq, 0, 0)[1])


def _has_chunk(seq: Sequence) -> bool:
    """A prompt in progress: more than its last token is still to be computed."""
    return seq.num_computed < seq.prefill_end and seq.total - seq.num_computed > 1
