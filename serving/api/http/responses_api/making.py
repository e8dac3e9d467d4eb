"""From a request to its response: a chat in other words."""

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from serving.api.http.chat import Chat, prepare
from serving.api.http.chat_prompt import chat_prompt_ids
from serving.api.http.logprobs import chat_logprobs
from serving.api.http.responses_api.as_chat import renamed, to_chat
from serving.api.http.responses_api.conversation import input_items, turns, without_turns_before
from serving.api.http.responses_api.events import Event
from serving.api.http.responses_api.items import Item
from serving.api.http.responses_api.objects import (
    InputTokensDetails,
    OutputLogprob,
    OutputTokensDetails,
    OutputTopLogprob,
    ResponseObject,
    ResponseUsage,
)
from serving.api.http.responses_api.request import ResponsesRequest
from serving.api.http.responses_api.store import ResponseStore
from serving.api.http.responses_api.token_parts import TokenParts
from serving.api.http.responses_api.writer import ResponseWriter
from serving.api.service import Service
from serving.errors import EngineDead, InvalidRequest, PageloomError
from serving.request import Logprobs

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Making:
    """A response on its way."""

    body: ResponsesRequest
    response: ResponseObject
    chat: Chat
    conversation: Sequence[Item]  # before the output; nothing is missing that truncation left out of the prompt


def _continued(body: ResponsesRequest, store: ResponseStore) -> list[Item]:
    """The whole conversation, with what came before `previous_response_id`."""
    items = input_items(body.input)
    if body.previous_response_id is None:
        return items
    previous = store.get(body.previous_response_id)
    status = previous.response.status
    if status not in ("completed", "incomplete"):
        raise InvalidRequest(f"previous_response_id is a response that is {status}, must be one that is completed or "
                             "incomplete", "previous_response_id")
    return [*previous.conversation, *items]


async def _truncated(service: Service, body: ResponsesRequest, items: Sequence[Item]) -> Sequence[Item]:
    """The items without as few of the oldest turns as leave room for the output: what it may take at most, or a
    quarter of the context, but never more than half."""
    limit = service.engine.info.max_model_len
    room = limit - min(body.max_output_tokens or limit // 4, limit // 2)

    async def fits(some: Sequence[Item]) -> bool:
        return len(await chat_prompt_ids(service, to_chat(body, some), needs_tools=False)) <= room

    if await fits(items):
        return items
    starts = turns(items)
    low, high = 0, len(starts) - 1  # the answer is in low..high, if there is one
    while low < high:
        middle = (low + high) // 2
        if await fits(without_turns_before(items, starts[middle])):
            high = middle
        else:
            low = middle + 1
    return without_turns_before(items, starts[low]) if starts else items


def _new_response(service: Service, body: ResponsesRequest) -> ResponseObject:
    reasoning, text = body.reasoning, body.text
    choice = body.tool_choice or "auto"
    form = text.format.model_dump(by_alias=True, exclude_none=True) if text and text.format else {"type": "text"}
    return ResponseObject(
        id=f"resp_{uuid.uuid4().hex}", created_at=int(time.time()), status="in_progress", model=service.model_name,
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": reasoning.effort if reasoning else None, "summary": None},
        safety_identifier=body.safety_identifier,
        store=body.stored,
        temperature=1.0 if body.temperature is None else body.temperature,
        text={"format": form, "verbosity": "medium"},
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        tools=[tool.model_dump(exclude={"output_schema", "allowed_callers", "defer_loading"})
               for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )  # fmt: skip


async def prepare_response(service: Service, body: ResponsesRequest, store: ResponseStore) -> Making:
    service.check_model(body.model)
    conversation = _continued(body, store)
    try:
        shown = await _truncated(service, body, conversation) if body.truncation == "auto" else conversation
        chat = await prepare(service, to_chat(body, shown), default_max_tokens=body.max_output_tokens)
    except InvalidRequest as error:
        raise renamed(error) from error
    return Making(body=body, response=_new_response(service, body), chat=chat, conversation=conversation)


def _logprobs(service: Service, logprobs: Sequence[Logprobs]) -> list[OutputLogprob]:
    return [
        OutputLogprob(token.token, token.logprob, token.bytes,
                      [OutputTopLogprob(top.token, top.logprob, top.bytes) for top in token.top_logprobs])
        for token in chat_logprobs(service.tokenizer, logprobs).content
    ]  # fmt: skip


def _usage(making: Making, cached: int, generated: int, reasoning: int) -> ResponseUsage:
    prompt = len(making.chat.prompt_token_ids)
    return ResponseUsage(input_tokens=prompt, input_tokens_details=InputTokensDetails(cached), output_tokens=generated,
                         output_tokens_details=OutputTokensDetails(reasoning), total_tokens=prompt + generated)


async def _written(service: Service, making: Making, writer: ResponseWriter,
                   interval: int | None) -> AsyncGenerator[Event]:
    reader = TokenParts(making.chat.reader.parser())
    cached = generated = 0
    started = False
    async with aclosing(making.chat.generate(service, interval)) as stream:
        async for delta in stream:
            if not started:
                started, cached = True, delta.num_cached_tokens
                for event in writer.start():
                    yield event
            generated += len(delta.token_ids)
            for part, logprobs in reader.feed(delta):
                for event in writer.add(part, _logprobs(service, logprobs)):
                    yield event
            if delta.finish_reason == "abort":
                raise EngineDead("the server shut down before the response was complete")
            if delta.finish_reason is not None:
                usage = _usage(making, cached, generated, reader.num_reasoning_tokens)
                for event in writer.finish(delta.finish_reason, usage):
                    yield event


def report(response: ResponseObject, error: BaseException) -> None:
    """That it failed, with a traceback if that was a bug."""
    known = isinstance(error, PageloomError)
    log.error("response %s failed: %s", response.id, error, exc_info=None if known else error)


async def make_response(service: Service, making: Making, writer: ResponseWriter,
                        interval: int | None) -> AsyncGenerator[Event]:
    """The events of making it; `making.response` is complete with the last. An error after the first event makes it a
    response that failed, an error before is raised."""
    started = False
    async with aclosing(_written(service, making, writer, interval)) as written:
        try:
            async for event in written:
                started = True
                yield event
            return
        except Exception as error:
            failure = renamed(error) if isinstance(error, InvalidRequest) else error
    if not started:
        raise failure
    report(making.response, failure)
    for event in writer.fail(failure):
        yield event
