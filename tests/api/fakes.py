"""A scripted engine client and a byte tokenizer: what front-end logic needs, without a model."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from serving.api.service import Service
from serving.config import ServerConfig
from serving.errors import EngineDead, Overloaded
from serving.metrics import Metrics
from serving.request import EngineInfo, EngineRequest, EngineStats, Logprobs, TokenEvent
from serving.tokenizer.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")
MERGES = ("Hello", " world")  # words of one token, beside the 256 bytes
VOCAB_SIZE = 512


def byte_tokenizer(bos: bool = False, special_tokens: Sequence[str] = SPECIAL) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in MERGES:
        spelled = word.replace(" ", "Ġ")
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocab:
                merges.append((spelled[: end - 1], spelled[end - 1]))
                vocab[spelled[:end]] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special_tokens))
    eos = backend.token_to_id("<|im_end|>")
    special = {"eos_token": "<|im_end|>"} | ({"bos_token": "<|im_start|>"} if bos else {})
    return Tokenizer(backend, special_tokens=special, eos_ids=[eos], chat_templates={"default": CHAT_TEMPLATE})


def fake_logprob(token_id: int, top: int) -> Logprobs:
    """The chosen token is the best; the others follow it in the vocabulary."""
    ids = [(token_id + i) % 256 for i in range(top)]
    return Logprobs(token_id, -0.5, 1, ids, [-0.5 - i for i in range(top)])


@dataclass
class FakeEngine:
    """Answers every request with `reply` (token ids), `per_step` tokens an event (all but one of them drafts that were
    accepted), then eos unless out of tokens.

    `gate`, where set, is waited for before each event, so that a test decides when tokens come.
    """

    reply: Callable[[EngineRequest], Sequence[int]]
    eos: int
    per_step: int = 1
    gate: asyncio.Event | None = None
    room: int = 1000  # sequences admitted at a time
    dead: bool = False
    max_model_len: int = 256
    live: set[str] = field(default_factory=set)
    seen: list[EngineRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    abort_calls: list[str] = field(default_factory=list)
    flushed: int = 0

    def __post_init__(self) -> None:
        self.stats = EngineStats()
        self.info = EngineInfo(
            max_model_len=self.max_model_len, vocab_size=VOCAB_SIZE, max_num_seqs=8, max_num_batched_tokens=64,
            num_pages=100, page_size=16, dtype="float32", kv_cache_dtype="float32", attention_backend="fake",
            mesh="1x1", model_family="llama", num_parameters=1,
        )  # fmt: skip

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        self.check_health()
        assert request.request_id not in self.live, "ids must be unique among live requests"
        if len(self.live) >= self.room:
            raise Overloaded(f"{len(self.live)} requests are waiting, at most {self.room} may", retry_after=3)
        self.seen.append(request)
        self.live.add(request.request_id)
        finished = False
        try:
            for event in self._events(request):
                if self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(0)
                self.check_health()
                if request.request_id in self.abort_calls:
                    finished = True
                    yield TokenEvent(request_id=request.request_id, finish_reason="abort")
                    return
                finished = event.finish_reason is not None
                self.stats.steps += 1
                self.stats.generation_tokens += len(event.new_token_ids)
                yield event
        finally:
            self.live.discard(request.request_id)
            if not finished:
                self.aborted.append(request.request_id)

    def _events(self, request: EngineRequest) -> list[TokenEvent]:
        sampling = request.sampling
        assert sampling.max_tokens is not None and sampling.seed is not None and sampling.n == 1
        ids = [*self.reply(request), self.eos]
        reason: Any = "stop"
        if len(ids) > sampling.max_tokens:
            ids, reason = ids[: sampling.max_tokens], "length"
        events = []
        for start in range(0, len(ids), self.per_step):
            new = ids[start : start + self.per_step]
            event = TokenEvent(request_id=request.request_id, new_token_ids=new, draft_tokens=self.per_step - 1,
                               accepted_tokens=len(new) - 1)
            if sampling.logprobs is not None:
                event.logprobs = [fake_logprob(i, sampling.logprobs) for i in new]
            events.append(event)
        first, last = events[0], events[-1]
        first.num_cached_tokens = 4
        if sampling.prompt_logprobs is not None:
            top = sampling.prompt_logprobs
            first.prompt_logprobs = [None, *(fake_logprob(i, top) for i in request.prompt_token_ids[1:])]
        last.finish_reason = reason
        if reason == "stop" and ids[-1] in sampling.stop_token_ids:
            last.stop_token_id = ids[-1]
        return events

    async def abort(self, request_id: str) -> None:
        self.abort_calls.append(request_id)

    async def flush_cache(self) -> bool:
        self.flushed += 1
        return True

    def check_health(self) -> None:
        if self.dead:
            raise EngineDead("the engine core is gone")

    async def shutdown(self, grace_seconds: float) -> None:
        self.dead = True


def make_service(engine: FakeEngine, tokenizer: Tokenizer, **config: Any) -> Service:
    return Service(
        engine=engine, tokenizer=tokenizer, config=ServerConfig(**config), model_name="tiny",
        metrics=Metrics("tiny", engine.info, lambda: engine.stats), version="0.1.0", start_time=1_700_000_000.0,
    )  # fmt: skip
