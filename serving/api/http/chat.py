"""POST /v1/chat/completions."""

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from serving.api.generation import Delta, generate
from serving.api.http.body import read_body
from serving.api.http.chat_prompt import chat_prompt_ids
from serving.api.http.logprobs import chat_logprobs, prompt_logprobs
from serving.api.http.message_parts import OutputReader, chat_answer, chat_delta, output_format
from serving.api.http.requests import ChatCompletionRequest
from serving.api.http.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    ChatResponse,
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
from serving.decoding.output_parser import OutputParser
from serving.decoding.parts import Message
from serving.errors import InvalidRequest
from serving.request import EngineRequest


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A request on its way: `requests[i]` makes the choice of index i."""

    body: ChatCompletionRequest
    id: str
    created: int
    requests: list[EngineRequest]
    reader: OutputReader

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.requests[0].prompt_token_ids

    def generate(self, service: Service, interval: int | None) -> AsyncGenerator[Delta]:
        """As `generate`, with the text that `reader.parser()` reads."""
        return generate(service, self.requests, interval, self.reader.shown_ids)


async def prepare(service: Service, body: ChatCompletionRequest, default_max_tokens: int | None = None) -> Chat:
    """`default_max_tokens`: as far as there is room for them."""
    service.check_model(body.model)
    form = output_format(service, body)
    ids = await chat_prompt_ids(service, body, body.documents, needs_tools=form.calls == "auto")
    sampling = body.sampling(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    outputs = form.structured_outputs(sampling.structured_outputs, service.tokenizer.special_token_ids)
    sampling = msgspec.structs.replace(sampling, structured_outputs=outputs)
    reader = OutputReader.make(service.tokenizer, form, body, ids)
    try:
        requests = body.to_engine(ids, sampling, service, default_max_tokens, reader.grammar_after)
    except InvalidRequest as error:
        if body.max_completion_tokens is None or error.param not in ("max_tokens", "min_tokens"):
            raise
        raise InvalidRequest(str(error).replace("max_tokens", "max_completion_tokens"),
                             error.param.replace("max_tokens", "max_completion_tokens")) from error
    return Chat(body=body, id=f"chatcmpl-{body.request_id or uuid.uuid4().hex}", created=int(time.time()),
                requests=requests, reader=reader)


def _logprobs(service: Service, body: ChatCompletionRequest, delta: Delta) -> ChatLogprobs | None:
    return chat_logprobs(service.tokenizer, delta.logprobs) if body.logprobs else None


def _finish_reason(chat: Chat, delta: Delta, parser: OutputParser) -> ChatFinishReason | None:
    """A call of the one function that was asked for is no reason of the model's own: "stop", as in OpenAI's API."""
    calls = parser.num_tool_calls and chat.reader.form.calls != "named"
    return "tool_calls" if calls and delta.finish_reason == "stop" else delta.finish_reason


async def _collect(service: Service, chat: Chat) -> ChatResponse:
    body = chat.body
    deltas: list[Delta] = []
    async with aclosing(chat.generate(service, None)) as stream:
        async for delta in stream:
            deltas.append(delta)
    deltas.sort(key=lambda delta: delta.sequence)
    choices = []
    for delta in deltas:
        parser = chat.reader.parser()
        message = Message().add(parser.feed(delta.text)).add(parser.finish())
        finish_reason = _finish_reason(chat, delta, parser)
        assert finish_reason is not None
        choice = ChatChoice(index=delta.sequence, message=chat_answer(message, body.include_reasoning is not False),
                            logprobs=_logprobs(service, body, delta), finish_reason=finish_reason,
                            stop_reason=delta.stop_reason)
        if body.return_token_ids:
            choice.token_ids = delta.token_ids
        choices.append(choice)
    response = ChatResponse(
        id=chat.id, created=chat.created, model=service.model_name, system_fingerprint=service.fingerprint,
        choices=choices,
        usage=usage(len(chat.prompt_token_ids), sum(len(delta.token_ids) for delta in deltas),
                    deltas[0].num_cached_tokens),
    )
    if body.prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs(service.tokenizer, deltas[0].prompt_logprobs or [])
    if body.return_token_ids:
        response.prompt_token_ids = chat.prompt_token_ids
    return response


async def _frames(service: Service, chat: Chat) -> AsyncGenerator[bytes]:
    body, options = chat.body, chat.body.stream_options
    every, at_end = bool(options and options.continuous_usage_stats), bool(options and options.include_usage)
    chunk = ChatChunk(id=chat.id, created=chat.created, model=service.model_name,
                      system_fingerprint=service.fingerprint, choices=[])
    started: set[int] = set()
    parsers: defaultdict[int, OutputParser] = defaultdict(chat.reader.parser)
    generated = cached = 0

    def totals() -> Usage:
        return usage(len(chat.prompt_token_ids), generated, cached)

    def frame(choice: ChatChunkChoice) -> bytes:
        chunk.choices = [choice]
        if every:
            chunk.usage = totals()
        elif at_end:
            chunk.usage = None
        return sse(chunk)

    async with aclosing(chat.generate(service, service.config.stream_interval)) as stream:
        async for delta in stream:
            if delta.sequence not in started:
                started.add(delta.sequence)
                cached = max(cached, delta.num_cached_tokens if delta.sequence == 0 else 0)
                if body.return_token_ids and len(started) == 1:
                    chunk.prompt_token_ids = chat.prompt_token_ids
                yield frame(ChatChunkChoice(index=delta.sequence, delta=ChatDelta(role="assistant", content="")))
                chunk.prompt_token_ids = UNSET
            parser = parsers[delta.sequence]
            parts = parser.feed(delta.text) + (parser.finish() if delta.finish_reason else [])
            news = chat_delta(parts, body.include_reasoning is not False)
            generated += len(delta.token_ids)
            if not (news.says_something or delta.finish_reason or body.logprobs or body.return_token_ids):
                continue  # the text is held back until it is clear what it is
            if not news.says_something:
                news.content = ""
            choice = ChatChunkChoice(index=delta.sequence, delta=news, logprobs=_logprobs(service, body, delta),
                                     finish_reason=_finish_reason(chat, delta, parser))
            if delta.finish_reason is not None:
                choice.stop_reason = delta.stop_reason
            if body.return_token_ids:
                choice.token_ids = delta.token_ids
            yield frame(choice)
    if at_end:
        chunk.choices, chunk.usage = [], totals()
        yield sse(chunk)
    yield SSE_DONE


async def chat_completions(service: Service, request: Request) -> Response:
    body = await read_body(request, ChatCompletionRequest, service.config.max_body_bytes)
    chat = await prepare(service, body)
    if body.stream:
        return await event_stream(request, _frames(service, chat))
    return await json_when_done(request, _collect(service, chat))
