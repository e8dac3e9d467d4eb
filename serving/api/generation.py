"""The one pipeline from engine requests to text, shared by HTTP, gRPC and the `LLM` class.

    EngineRequest -> EngineClient.generate -> TokenEvent -> SequenceOutput -> Delta -> (merged over sequences) -> caller

Leaving `generate` early, in whatever way and at whatever moment, ends the sequences in the engine.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from serving.api.service import Service
from serving.errors import InvalidRequest, Overloaded, PageloomError
from serving.request import EngineRequest, FinishReason, Logprobs, TokenEvent
from serving.tokenizer.detokenizer import IncrementalDetokenizer
from serving.tokenizer.stop_strings import StopStringMatcher
from serving.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class Delta:
    """News of one sequence. Lists are aligned: entry i of each belongs to token i.

    Where a stop string ended the sequence, `text`, `token_ids`, `token_texts` and `logprobs` all end where the text
    ends (a token that is partly cut stays, with the rest of its text); the tokens that only spell the stop string are
    in `stop_ids` and `stop_logprobs`, for clients that find stop strings themselves.
    """

    sequence: int  # index into the requests
    text: str
    token_ids: list[int]
    token_texts: list[str]  # what each token added to the text; together they spell it
    logprobs: list[Logprobs]  # empty unless asked for
    num_cached_tokens: int
    num_drafts: int = 0  # verified so far
    num_accepted: int = 0  # of those
    prompt_logprobs: list[Logprobs | None] | None = None  # with the first delta
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or the stop string that ended it
    stop_ids: list[int] | None = None
    stop_logprobs: list[Logprobs] | None = None


@dataclass(slots=True)
class _Token:
    token_id: int
    text: str
    start: int  # characters of output text before it
    logprobs: Logprobs | None


class SequenceOutput:
    """Turns one sequence's events into deltas: detokenizes, finds stop strings, and holds back text (and the tokens
    that spell it) that may turn out to be the start of one.

    A delta is due with the first token, then after `interval` tokens, and at the end; None: only at the end.
    `shown_ids` are special tokens that stay in the text in any case.
    """

    def __init__(self, tokenizer: Tokenizer, request: EngineRequest, sequence: int, interval: int | None,
                 shown_ids: frozenset[int] = frozenset()):
        sampling = request.sampling
        self._sequence, self._interval = sequence, interval
        self._sampling = sampling
        self._eos_ids = frozenset(tokenizer.eos_ids)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            shown_ids=shown_ids,
        )
        self._matcher = StopStringMatcher(sampling.stop, sampling.include_stop_str_in_output)
        self._generated = 0  # tokens seen
        self._fed = 0  # characters detokenized
        self._held: list[_Token] = []
        self._text: list[str] = []
        self._tokens: list[_Token] = []  # released, not yet delivered
        self._delivered = False
        self._cached = self._drafts = self._accepted = 0
        self._prompt_logprobs: list[Logprobs | None] | None = None

    def add(self, event: TokenEvent) -> Delta | None:
        """The delta that is due, if any. After one with a finish reason the sequence is over, also in the engine's eyes
        when the event says so; otherwise (a stop string) the caller has to end it."""
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        if not self._generated:
            self._cached = event.num_cached_tokens
        self._drafts += event.draft_tokens
        self._accepted += event.accepted_tokens
        stop = self._add_tokens(event)
        finish, reason = event.finish_reason, event.stop_token_id
        if stop is None and finish is not None:
            stop = self._finish_text()
        if stop is not None:
            return self._deliver("stop", stop)
        if finish is not None or self._is_due():
            return self._deliver(finish, reason)
        return None

    def _is_due(self) -> bool:
        if self._interval is None or not (self._tokens or self._text):
            return False
        return not self._delivered or len(self._tokens) >= self._interval

    def _add_tokens(self, event: TokenEvent) -> str | None:
        """Returns the stop string that was completed; tokens after it are dropped."""
        ids, logprobs = event.new_token_ids, event.logprobs
        last = len(ids) - 1
        for i, token_id in enumerate(ids):
            self._generated += 1
            silent = i == last and self._is_terminator(event, token_id)
            text = "" if silent else self._detokenizer.add([token_id])
            self._held.append(_Token(token_id, text, self._fed, logprobs[i] if logprobs else None))
            stop = self._feed(text)
            if stop is not None:
                return stop
        return None

    def _is_terminator(self, event: TokenEvent, token_id: int) -> bool:
        """Whether the text leaves out this last token because it ended the sequence."""
        if event.finish_reason != "stop" or self._sampling.include_stop_str_in_output:
            return False
        return token_id == event.stop_token_id or (event.stop_token_id is None and token_id in self._eos_ids)

    def _feed(self, text: str) -> str | None:
        self._fed += len(text)
        may_stop = self._generated > self._sampling.min_tokens
        self._release(self._matcher.add(text) if may_stop else self._matcher.pass_by(text))
        return self._matcher.stop

    def _release(self, text: str) -> None:
        self._text.append(text)
        shown = self._matcher.length
        self._release_tokens(lambda token: token.start + len(token.text) <= shown)

    def _release_tokens(self, is_free: Callable[[_Token], bool]) -> None:
        free = 0
        while free < len(self._held) and is_free(self._held[free]):
            free += 1
        self._tokens += self._held[:free]
        del self._held[:free]

    def _finish_text(self) -> str | None:
        rest = self._detokenizer.finish()
        if rest and self._held:
            self._held[-1].text += rest
        elif rest and self._tokens:
            self._tokens[-1].text += rest
        stop = self._feed(rest)
        if stop is None:
            self._release(self._matcher.finish())
        return stop

    def _deliver(self, finish: FinishReason | None, reason: int | str | None) -> Delta:
        if isinstance(reason, str):
            cut = self._matcher.length
            self._release_tokens(lambda token: token.start < cut)
            if self._tokens:  # the stop string may begin or end within the last token
                last = self._tokens[-1]
                last.text = last.text[: cut - last.start]
        tokens, dropped = self._tokens, self._held
        delta = Delta(
            sequence=self._sequence,
            text="".join(self._text),
            token_ids=[token.token_id for token in tokens],
            token_texts=[token.text for token in tokens],
            logprobs=[token.logprobs for token in tokens if token.logprobs is not None],
            num_cached_tokens=self._cached,
            num_drafts=self._drafts,
            num_accepted=self._accepted,
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=finish,
            stop_reason=reason,
        )
        if isinstance(reason, str):
            delta.stop_ids = [token.token_id for token in dropped]
            delta.stop_logprobs = [token.logprobs for token in dropped if token.logprobs is not None]
        self._text, self._tokens, self._prompt_logprobs, self._delivered = [], [], None, True
        return delta


async def _run_sequence(service: Service, request: EngineRequest, sequence: int, interval: int | None,
                        shown_ids: frozenset[int]) -> AsyncGenerator[Delta]:
    output = SequenceOutput(service.tokenizer, request, sequence, interval, shown_ids)
    timer = service.metrics.sequence(request)
    reason: FinishReason | None = "abort"  # unless it gets to an end
    try:
        async with aclosing(service.engine.generate(request)) as events:
            async for event in events:
                timer.event(event)
                if event.finish_reason == "error":
                    reason = "error"
                    if event.error_param:
                        raise InvalidRequest(event.error, event.error_param)
                    raise PageloomError(event.error or "the engine failed on this request")
                delta = output.add(event)
                if delta is None:
                    continue
                if delta.finish_reason is not None:
                    reason = delta.finish_reason
                    if event.finish_reason is None:  # a stop string: the engine does not know
                        await events.aclose()
                    yield delta
                    return
                yield delta
        raise PageloomError("the engine ended a sequence without a finish reason")
    except (Overloaded, InvalidRequest) as error:
        if reason == "abort":
            reason = None  # it never began
        if isinstance(error, Overloaded):
            service.metrics.rejected()
        raise
    finally:
        if reason is not None:
            timer.end(reason)


async def _merge(streams: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[Delta]:
    """All deltas as they come; the first error ends everything."""
    queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Delta]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    queue.put_nowait(delta)
            queue.put_nowait(None)
        except Exception as error:  # handed to the consumer, which raises it
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    left = len(tasks)
    try:
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def generate(service: Service, requests: Sequence[EngineRequest], interval: int | None = 1,
                   shown_ids: frozenset[int] = frozenset()) -> AsyncGenerator[Delta]:
    """Runs the sequences side by side and yields their deltas as they come; with `interval` None one delta each, at
    its end. Close it (`aclosing`) to abort. `shown_ids`: special tokens that stay in the text in any case.

    Raises `Overloaded` or `EngineDead` before the first delta when the requests are not admitted, `EngineDead` at any
    time when the core dies.
    """
    service.check_admission()
    sizes = Counter(request.group_id for request in requests)
    for one in {request.group_id: request for request in requests}.values():
        service.metrics.request(sizes[one.group_id], one.sampling.max_tokens or 0, len(one.prompt_token_ids))
    streams = [_run_sequence(service, request, i, interval, shown_ids) for i, request in enumerate(requests)]
    service.lifecycle.live += 1
    try:
        async with aclosing(streams[0] if len(streams) == 1 else _merge(streams)) as merged:
            async for delta in merged:
                yield delta
    finally:
        service.lifecycle.live -= 1
