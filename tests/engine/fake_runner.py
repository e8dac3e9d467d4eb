"""A runner without a model: sampled tokens are a function of (prompt, seed, output index), and every access that a real
runner would make to the KV pages and to the slots' state is made on plain arrays and checked.

A page table that is wrong, a page freed too early, a page read in the step that writes it, a lost or repeated token, a
ban or a count that is missing: each fails here, in `dispatch`.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from serving.engine.plan import RowPlan, SlotUpdate, StepPlan, StepResult
from serving.request import EngineRequest, Logprobs

VOCAB = 32
EOS = (1,)

Language = Callable[[list[int]], set[int]]  # the tokens that a grammar allows after some outputs


def raw_token(request: EngineRequest, output_index: int) -> int:
    key = repr((request.prompt_token_ids, request.sampling.seed, output_index)).encode()
    return zlib.crc32(key) % VOCAB


def banned_tokens(request: EngineRequest, outputs: list[int]) -> set[int]:
    """What the request forbids after `outputs`, straight from the meaning of its fields."""
    sampling = request.sampling
    banned = {word[-1] for word in request.bad_words_token_ids if (outputs + [-1])[-len(word) : -1] == list(word[:-1])}
    if len(outputs) < sampling.min_tokens:
        banned.update(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            banned.update(EOS)
    return banned


def choose(token: int, allowed, banned, by_grammar: set[int] | None = None) -> int:
    """The first token from `token` on, going round, that may be sampled. Where the bans leave none that the grammar
    allows, the grammar counts."""
    tokens = [candidate % VOCAB for candidate in range(token, token + VOCAB)]
    tokens = [token for token in tokens if by_grammar is None or token in by_grammar]
    left = [token for token in tokens if token not in banned and (allowed is None or token in allowed)]
    assert left or by_grammar, "every token is banned"
    return (left or tokens)[0]


def expected_outputs(request: EngineRequest, max_model_len: int, language: Language | None = None
                     ) -> tuple[list[int], str, int | None]:  # fmt: skip
    """The oracle: all output tokens, the finish reason and the stop token."""
    sampling, outputs = request.sampling, []
    limit = max_model_len - len(request.prompt_token_ids)
    limit = min(limit, sampling.max_tokens) if sampling.max_tokens is not None else limit
    while len(outputs) < limit:
        token = choose(raw_token(request, len(outputs)), sampling.allowed_token_ids, banned_tokens(request, outputs),
                       language and language(outputs))  # fmt: skip
        outputs.append(token)
        if token in EOS and not sampling.ignore_eos:
            return outputs, "stop", None
        if token in EOS and language is not None:
            return outputs, "stop", token if token in sampling.stop_token_ids else None
        if token in sampling.stop_token_ids:
            return outputs, "stop", token
    return outputs, "length", None


@dataclass
class SlotState:
    banned: frozenset[int] = frozenset()
    allowed: frozenset[int] | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    prompt: tuple[int, ...] = ()
    counts: Counter = field(default_factory=Counter)
    last_token: int = -1


class Group:
    """A data group's memory: its pages and its slots."""

    def __init__(self, num_pages: int, page_size: int, max_num_seqs: int):
        self.kv = np.full((num_pages, page_size), -1, np.int64)
        self.slots = [SlotState() for _ in range(max_num_seqs)]
        self.before: np.ndarray = self.kv  # at the start of the step
        self.written: dict[tuple[int, int], str] = {}  # in the step, and by whom


class FakeRunner:
    def __init__(
        self,
        *,
        num_groups: int = 1,
        num_pages: int = 64,
        page_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 64,
    ):
        self.num_groups, self.num_pages, self.page_size = num_groups, num_pages, page_size
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len, self.vocab_size, self.drafts_on_device = max_model_len, VOCAB, False
        self.decode_seconds: dict[tuple[int, int], float] = {}
        self.groups = [Group(num_pages, page_size, max_num_seqs) for _ in range(num_groups)]
        self.requests: dict[str, tuple[EngineRequest, list[int]]] = {}
        self.languages: dict[str, Language] = {}
        self.tokens_computed = 0
        self.steps = 0
        self._dispatched = self._fetched = 0

    def register(self, request: EngineRequest, language: Language | None = None) -> None:
        outputs = expected_outputs(request, self.max_model_len, language)[0]
        if language is not None:
            self.languages[request.request_id] = language
        self.requests[request.request_id] = (request, list(request.prompt_token_ids) + outputs)

    def dispatch(self, plan: StepPlan) -> tuple[int, StepResult]:
        assert self._dispatched - self._fetched <= 1, "more than one step in flight"
        self._check_shape(plan)
        for group, its_plan in zip(self.groups, plan.groups, strict=True):
            group.before, group.written = group.kv.copy(), {}
            for update in its_plan.slot_updates:
                self._apply(group, update)
        for group, row in self._rows(plan):
            self._write(group, row)
        for group, row in self._rows(plan):
            self._check_reads(group, row)
        accepted = [self._verify(group, row) if row.samples else [] for group, row in self._rows(plan)]
        tokens = [[token for token, _ in row] for row in accepted]
        handle = self._dispatched
        self._dispatched += 1
        self.steps += 1
        self.tokens_computed += plan.num_tokens
        return handle, StepResult(
            token_ids=tokens,
            logprobs=[
                [Logprobs(t, -1.0, 1, [], []) for t in of_row]
                if row.samples and row.sampling.logprobs is not None else None
                for row, of_row in zip(plan.rows, tokens, strict=True)
            ],
            target_logprobs=[
                None
                if row.targets is None
                else [Logprobs(int(t), -float(row.start + i + 1), 1, [], []) for i, t in enumerate(row.targets)]
                for row in plan.rows
            ],
            num_kept=[num_in_place([place for _, place in row[:-1]]) for row in accepted],
            drafts=[None] * len(plan.rows),
        )  # fmt: skip

    def fetch(self, handle: object) -> StepResult:
        assert isinstance(handle, tuple) and handle[0] == self._fetched, "fetched out of order"
        self._fetched += 1
        return handle[1]

    def stats(self) -> dict[str, float]:
        return {"compile_misses": 0, "pack_seconds": 0.0, "dispatch_seconds": 0.0, "padding_tokens": 0}

    def close(self, reason: str = "") -> None:
        pass

    def _rows(self, plan: StepPlan) -> Iterator[tuple[Group, RowPlan]]:
        return ((group, row) for group, its in zip(self.groups, plan.groups, strict=True) for row in its.rows)

    def _check_shape(self, plan: StepPlan) -> None:
        assert plan.num_tokens == sum(row.num_tokens for row in plan.rows) > 0
        assert len({row.request_id for row in plan.rows}) == len(plan.rows)
        for group in plan.groups:
            assert group.num_tokens <= self.max_num_batched_tokens, "the step is over its budget"
            lengths = [row.num_tokens for row in group.rows]
            assert all(n == 1 for n in lengths[: group.num_decode]) and all(n > 1 for n in lengths[group.num_decode :])
            slots = [row.slot for row in group.rows]
            assert len(set(slots)) == len(slots) and all(0 <= slot < self.max_num_seqs for slot in slots)

    def _tokens(self, group: Group, row: RowPlan) -> list[int]:
        """What the row feeds, checked against the sequence's true tokens where it has them (a row after a stop token
        that the host had not seen goes past them)."""
        true = self.requests[row.request_id][1]
        fed = [group.slots[row.slot].last_token] if row.token_ids is None else [int(t) for t in row.token_ids]
        assert len(fed) == row.num_tokens
        expected = true[row.start : row.start + row.num_tokens - row.num_drafts]
        assert fed[: len(expected)] == expected, f"{row.request_id} feeds wrong tokens at {row.start}"
        return fed

    def _write(self, group: Group, row: RowPlan) -> None:
        assert len(row.page_ids) == -(-(row.start + row.num_tokens) // self.page_size)
        assert len(set(row.page_ids.tolist())) == len(row.page_ids) and 0 not in row.page_ids
        for position, token in enumerate(self._tokens(group, row), row.start):
            where = int(row.page_ids[position // self.page_size]), position % self.page_size
            other = group.written.setdefault(where, row.request_id)
            assert other == row.request_id, f"{row.request_id} and {other} write the same place"
            group.kv[where] = token

    def _check_reads(self, group: Group, row: RowPlan) -> None:
        true = self.requests[row.request_id][1]
        for position in range(min(row.start, len(true))):
            where = int(row.page_ids[position // self.page_size]), position % self.page_size
            assert where not in group.written, f"{row.request_id} reads what this very step writes"
            assert group.before[where] == true[position], f"{row.request_id} reads a foreign token at {position}"

    def _apply(self, group: Group, update: SlotUpdate) -> None:
        state = group.slots[update.slot]
        state.banned = frozenset(update.banned_token_ids)
        state.allowed = None if update.allowed_token_ids is None else frozenset(update.allowed_token_ids)
        state.logit_bias = dict(update.logit_bias)
        if update.reset_counts:
            state.prompt = tuple(int(t) for t in update.prompt_token_ids)
            state.counts = Counter(int(t) for t in update.output_token_ids)
        else:
            assert len(update.prompt_token_ids) == 0 and len(update.output_token_ids) == 0

    def _verify(self, group: Group, row: RowPlan) -> list[tuple[int, int]]:
        """The accepted drafts and the token after them, each with the draft's number (of the last one -1)."""
        path: list[tuple[int, int]] = []
        at = -1
        while True:
            token = self._sample(group, row, len(path), None if row.mask is None else _tokens_of(row.mask[at + 1]))
            drafts = enumerate(zip(row.draft.tokens, row.draft.parent_of, strict=True)) if row.draft else ()
            fitting = [i for i, (draft, parent) in drafts if parent == at and draft == token]
            path.append((token, fitting[0] if fitting else -1))
            if not fitting:
                return path
            at = fitting[0]

    def _sample(self, group: Group, row: RowPlan, depth: int, mask: set[int] | None) -> int:
        request, true = self.requests[row.request_id]
        state, outputs = group.slots[row.slot], true[len(request.prompt_token_ids) :]
        index = row.output_index + depth
        assert row.output_index == row.start + row.num_tokens - row.num_drafts - len(request.prompt_token_ids)
        assert row.sampling is request.sampling or row.sampling == request.sampling
        language = self.languages.get(row.request_id)
        assert (mask is None) == (language is None)
        if index < len(outputs):  # else the host will drop the token
            assert state.banned == banned_tokens(request, outputs[:index]), f"{row.request_id}: wrong bans at {index}"
            assert state.logit_bias == request.sampling.logit_bias
            if request.sampling.is_penalized:
                assert state.prompt == tuple(request.prompt_token_ids)
                assert state.counts == Counter(outputs[:index]), f"{row.request_id}: wrong counts at {index}"
            assert language is None or mask == language(outputs[:index]), f"{row.request_id}: wrong mask at {index}"
        token = choose(raw_token(request, index), state.allowed, state.banned, mask)
        state.counts[token] += 1
        state.last_token = token
        return token


def _tokens_of(mask: np.ndarray) -> set[int]:
    return {token for token in range(VOCAB) if int(mask[token // 32]) >> token % 32 & 1}


def num_in_place(path: list[int]) -> int:
    """Of the accepted drafts, given by their numbers, those from the first on that stand where they belong."""
    kept = 0
    while kept < len(path) and path[kept] == kept:
        kept += 1
    return kept
