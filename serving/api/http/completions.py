"""POST /v1/completions."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from serving.api.generation import Delta, generate
from serving.api.http.body import read_body
from serving.api.http.logprobs import completion_logprobs, prompt_logprobs
from serving.api.http.requests import CompletionRequest
from serving.api.http.responses import (
    CompletionChoice,
    CompletionResponse,
    Usage,
    usage,
)
from serving.api.http.sending import (
    SSE_DONE,
    event_stream,
    json_when_done,
    sse,
)
from serving.api.service import Service
from serving.errors import InvalidRequest
from serving.request import EngineRequest
from serving.tokenizer.detokenizer import IncrementalDetokenizer
from serving.tokenizer.tokenizer import Tokenizer
from serving.validation import MAX_SEQUENCES

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A request on its way: `requests[i]` makes the choice of index i."""

    body: CompletionRequest
    id: str
    created: int
    requests: list[EngineRequest]
    echoes: list[list[str]]  # with echo: for each request, what each prompt token adds to the text
    sequences_per_prompt: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests[:: self.sequences_per_prompt])

    def source(self, sequence: int) -> int:
        """The sequence that brings the prompt's log-probabilities for this one."""
        return sequence - sequence % self.sequences_per_prompt


async def _prompt_ids(service: Service, body: CompletionRequest) -> list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [await service.encode(prompt, True)]
    if isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return [await service.encode(one, True) if isinstance(one, str) else one for one in prompt]  # type: ignore[misc]


def echo_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """What each prompt token adds to the text: all but a leading BOS, which the tokenizer put there. A character that
    the prompt leaves unfinished is the output's to finish."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    texts = [""] if ids[0] == tokenizer.bos_id else []
    return texts + detokenizer.add_tokens(ids[len(texts) :])


async def prepare(service: Service, body: CompletionRequest) -> Completion:
    service.check_model(body.model)
    wants_prompt_logprobs = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    sampling = body.sampling(
        max_tokens=1 if body.max_tokens == 0 else body.max_tokens,  # the engine makes one, which is thrown away
        logprobs=body.logprobs,
        prompt_logprobs=wants_prompt_logprobs,
    )
    prompts = await _prompt_ids(service, body)
    if len(prompts) * sampling.n > MAX_SEQUENCES:
        raise InvalidRequest(f"n is {sampling.n} for {len(prompts)} prompts, at most {MAX_SEQUENCES} completions "
                             "may be asked for at a time", "n")
    requests: list[EngineRequest] = []
    echoes: list[list[str]] = []
    for ids in prompts:
        split = body.to_engine(ids, sampling, service, DEFAULT_MAX_TOKENS)
        requests += split
        if body.echo:
            texts = await asyncio.to_thread(echo_texts, service.tokenizer, split[0].prompt_token_ids)
            echoes += [texts] * len(split)
    return Completion(
        body=body,
        id=f"cmpl-{body.request_id or uuid.uuid4().hex}",
        created=int(time.time()),
        requests=requests,
        echoes=echoes,
        sequences_per_prompt=sampling.n,
    )


class ChoiceWriter:
    """Turns a completion's deltas into choices, the first of each sequence with the echo."""

    def __init__(self, service: Service, completion: Completion):
        self._tokenizer = service.tokenizer
        self._completion = completion
        self._offsets = [0] * len(completion.requests)
        self._started = [False] * len(completion.requests)
        self.prompt_logprobs: dict[int, list] = {}  # by the sequence that brought them

    def write(self, delta: Delta) -> CompletionChoice:
        completion, body, sequence = self._completion, self._completion.body, delta.sequence
        texts, logprobs = delta.token_texts, list(delta.logprobs)
        choice = CompletionChoice(index=sequence, text=delta.text, finish_reason=delta.finish_reason,
                                  stop_reason=delta.stop_reason)
        if body.max_tokens == 0:
            texts, logprobs, delta.token_ids = [], [], []
            choice.text, choice.finish_reason, choice.stop_reason = "", "length", None
        if not self._started[sequence]:
            self._started[sequence] = True
            if body.echo:
                echo = completion.echoes[sequence]
                choice.text = "".join(echo) + choice.text
                texts = echo + texts
                if body.logprobs is not None:
                    logprobs = [*self.prompt_logprobs[completion.source(sequence)], *logprobs]
            if body.return_token_ids:
                choice.prompt_token_ids = completion.requests[sequence].prompt_token_ids
            if body.prompt_logprobs is not None:
                known = self.prompt_logprobs[completion.source(sequence)]
                choice.prompt_logprobs = prompt_logprobs(self._tokenizer, known)
        if body.logprobs is not None:
            choice.logprobs = completion_logprobs(self._tokenizer, texts, logprobs, self._offsets[sequence])
        if body.return_token_ids:
            choice.token_ids = delta.token_ids
        self._offsets[sequence] += len(choice.text)
        return choice

    def take_prompt(self, delta: Delta) -> None:
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[delta.sequence] = delta.prompt_logprobs

    def is_ready(self, delta: Delta) -> bool:
        """Whether the prompt's log-probabilities, if wanted, have come (with the first of the sequences)."""
        wanted = self._completion.requests[self._completion.source(delta.sequence)].sampling.prompt_logprobs is not None
        return not wanted or self._completion.source(delta.sequence) in self.prompt_logprobs


async def _collect(service: Service, completion: Completion) -> CompletionResponse:
    writer = ChoiceWriter(service, completion)
    deltas: list[Delta] = []
    async with aclosing(generate(service, completion.requests, interval=None)) as stream:
        async for delta in stream:
            writer.take_prompt(delta)
            deltas.append(delta)
    deltas.sort(key=lambda delta: delta.sequence)
    choices = [writer.write(delta) for delta in deltas]
    generated = sum(len(delta.token_ids) for delta in deltas)
    cached = sum(delta.num_cached_tokens for delta in deltas[:: completion.sequences_per_prompt])
    return CompletionResponse(
        id=completion.id, created=completion.created, model=service.model_name,
        system_fingerprint=service.fingerprint, choices=choices,
        usage=usage(completion.prompt_tokens, generated, cached),
    )


async def _frames(service: Service, completion: Completion) -> AsyncGenerator[bytes]:
    options = completion.body.stream_options
    every, at_end = bool(options and options.continuous_usage_stats), bool(options and options.include_usage)
    chunk = CompletionResponse(id=completion.id, created=completion.created, model=service.model_name,
                               system_fingerprint=service.fingerprint, choices=[])
    writer = ChoiceWriter(service, completion)
    waiting: list[Delta] = []
    cached: dict[int, int] = {}
    generated = 0

    def totals() -> Usage:
        return usage(completion.prompt_tokens, generated, sum(cached.values()))

    async with aclosing(generate(service, completion.requests, service.config.stream_interval)) as stream:
        async for new in stream:
            writer.take_prompt(new)
            waiting.append(new)
            ready = [delta for delta in waiting if writer.is_ready(delta)]
            waiting = [delta for delta in waiting if not writer.is_ready(delta)] if len(ready) < len(waiting) else []
            for delta in ready:
                if delta.sequence % completion.sequences_per_prompt == 0:
                    cached[delta.sequence] = delta.num_cached_tokens
                chunk.choices = [writer.write(delta)]
                generated += len(delta.token_ids)
                if every:
                    chunk.usage = totals()
                elif at_end:
                    chunk.usage = None
                yield sse(chunk)
    if at_end:
        chunk.choices, chunk.usage = [], totals()
        yield sse(chunk)
    yield SSE_DONE


async def completions(service: Service, request: Request) -> Response:
    body = await read_body(request, CompletionRequest, service.config.max_body_bytes)
    completion = await prepare(service, body)
    if body.stream:
        return await event_stream(request, _frames(service, completion))
    return await json_when_done(request, _collect(service, completion))

