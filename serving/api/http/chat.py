"""POST /v1/chat/completions."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from serving.api.generation import Delta, generate
from serving.api.http.body import read_body
from serving.api.http.logprobs import chat_logprobs, prompt_logprobs
from serving.api.http.requests import ChatCompletionRequest, ChatPrompt
from serving.api.http.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
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
from serving.errors import InvalidRequest
from serving.request import EngineRequest
from serving.tokenizer.foreign_template import render_foreign
from serving.validation import to_engine_requests

FOREIGN_TEMPLATES = ThreadPoolExecutor(2, "foreign-template")  # at a time, and never in the way of other threads' work
TEMPLATE_OWN_NAMES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
)


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A request on its way: `requests[i]` makes the choice of index i."""

    body: ChatCompletionRequest
    id: str
    created: int
    requests: list[EngineRequest]

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.requests[0].prompt_token_ids


async def chat_prompt_ids(service: Service, chat: ChatPrompt, documents: list[dict[str, Any]] | None = None,
                          add_special_tokens: bool = False) -> list[int]:
    """Renders the chat template and tokenizes. The template writes BOS and the like itself."""
    kwargs = dict(chat.chat_template_kwargs or {})
    if taken := TEMPLATE_OWN_NAMES & kwargs.keys():
        raise InvalidRequest(f"chat_template_kwargs sets {sorted(taken)[0]!r}, which is a request field of its own",
                             "chat_template_kwargs")
    tokenizer = service.tokenizer
    template = chat.chat_template or service.config.chat_template or tokenizer.chat_template
    if documents and "documents" not in (template or ""):
        raise InvalidRequest("documents are not used by this model's chat template", "documents")
    continues = bool(chat.continue_final_message)
    generation_prompt = chat.add_generation_prompt
    messages = [message.for_template() for message in chat.messages]
    options: dict[str, Any] = {
        "tools": None,
        "documents": documents,
        "add_generation_prompt": not continues if generation_prompt is None else generation_prompt,
        "continue_final_message": continues,
    }
    if chat.chat_template is not None:
        options["variables"] = {**tokenizer.special_tokens, **kwargs}
        render = partial(render_foreign, chat.chat_template, messages, **options)
        text = await asyncio.get_running_loop().run_in_executor(FOREIGN_TEMPLATES, render)
    else:
        text = tokenizer.apply_chat_template(messages, chat_template=template, **options, **kwargs)
    return await service.encode(text, add_special_tokens)


async def prepare(service: Service, body: ChatCompletionRequest, default_max_tokens: int | None = None) -> Chat:
    """`default_max_tokens`: as far as there is room for them."""
    service.check_model(body.model)
    ids = await chat_prompt_ids(service, body, body.documents)
    sampling = body.sampling(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    requests = to_engine_requests(
        ids, sampling, service.limits, service.tokenizer,
        request_id=body.request_id or "",
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        default_max_tokens=default_max_tokens,
    )
    return Chat(body=body, id=f"chatcmpl-{body.request_id or uuid.uuid4().hex}", created=int(time.time()),
                requests=requests)


def _logprobs(service: Service, body: ChatCompletionRequest, delta: Delta) -> ChatLogprobs | None:
    return chat_logprobs(service.tokenizer, delta.logprobs) if body.logprobs else None


async def _collect(service: Service, chat: Chat) -> ChatResponse:
    body = chat.body
    deltas: list[Delta] = []
    async with aclosing(generate(service, chat.requests, interval=None)) as stream:
        async for delta in stream:
            deltas.append(delta)
    deltas.sort(key=lambda delta: delta.sequence)
    choices = []
    for delta in deltas:
        assert delta.finish_reason is not None
        choice = ChatChoice(index=delta.sequence, message=ChatAnswer(content=delta.text),
                            logprobs=_logprobs(service, body, delta), finish_reason=delta.finish_reason,
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

    async with aclosing(generate(service, chat.requests, service.config.stream_interval)) as stream:
        async for delta in stream:
            if delta.sequence not in started:
                started.add(delta.sequence)
                cached = max(cached, delta.num_cached_tokens if delta.sequence == 0 else 0)
                if body.return_token_ids and len(started) == 1:
                    chunk.prompt_token_ids = chat.prompt_token_ids
                yield frame(ChatChunkChoice(index=delta.sequence, delta=ChatDelta(role="assistant", content="")))
                chunk.prompt_token_ids = UNSET
            choice = ChatChunkChoice(index=delta.sequence, delta=ChatDelta(content=delta.text),
                                     logprobs=_logprobs(service, body, delta), finish_reason=delta.finish_reason)
            if delta.finish_reason is not None:
                choice.stop_reason = delta.stop_reason
            if body.return_token_ids:
                choice.token_ids = delta.token_ids
            generated += len(delta.token_ids)
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
