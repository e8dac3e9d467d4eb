"""POST /v1/responses, and what can be done with a response that is stored."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from serving.api.http.body import read_body
from serving.api.http.responses_api.conversation import output_as_input
from serving.api.http.responses_api.events import Event, frame
from serving.api.http.responses_api.items import Item
from serving.api.http.responses_api.making import Making, make_response, prepare_response, report
from serving.api.http.responses_api.objects import DeletedResponse, ResponseObject
from serving.api.http.responses_api.request import LOGPROBS, ResponsesRequest, RetrieveQuery
from serving.api.http.responses_api.store import EventLog, ResponseStore, Stored
from serving.api.http.responses_api.writer import ResponseWriter
from serving.api.http.sending import event_stream, json_response, json_when_done
from serving.api.service import Service
from serving.errors import InvalidRequest, Overloaded

ITEM_BYTES = 1024  # about what an object takes beside its text


def _store(request: Request) -> ResponseStore:
    return request.app.state.responses


def _size(response: ResponseObject, conversation: Iterable[Item]) -> int:
    """Bytes, about. A conversation counts whole, though responses that continue one another share it."""
    return len(msgspec.json.encode(response)) + sum(ITEM_BYTES + len(item.model_dump_json()) for item in conversation)


def _keep(store: ResponseStore, making: Making) -> None:
    conversation = [*making.conversation, *output_as_input(making.response.output)]
    size = _size(making.response, conversation)
    stored = Stored(response=making.response, conversation=conversation, num_bytes=size,
                    has_logprobs=making.body.wants_logprobs)
    with suppress(Overloaded):  # it was answered; that it cannot be asked for again is no failure
        store.add(stored)


async def _complete(service: Service, making: Making, store: ResponseStore) -> ResponseObject:
    writer = ResponseWriter(making.response, making.body.wants_logprobs)
    async with aclosing(make_response(service, making, writer, interval=None)) as events:
        async for _ in events:
            pass
    if making.body.stored:
        _keep(store, making)
    return making.response


async def _frames(service: Service, making: Making, store: ResponseStore) -> AsyncGenerator[bytes]:
    writer = ResponseWriter(making.response, making.body.wants_logprobs)
    response_id = making.response.id
    if making.body.stored:
        store.coming.add(response_id)
    try:
        async with aclosing(make_response(service, making, writer, service.config.stream_interval)) as events:
            async for event in events:
                if making.response.is_over and response_id in store.coming:  # from now on others may refer to it
                    store.coming.discard(response_id)
                    _keep(store, making)
                yield frame(event)
    finally:
        store.coming.discard(response_id)


def _start(service: Service, making: Making, store: ResponseStore) -> Stored:
    """Has it made in the background. Raises `EngineDead` or `Overloaded` where that cannot begin."""
    service.check_admission()
    response, body = making.response, making.body
    writer = ResponseWriter(response, body.wants_logprobs)
    events_log = EventLog() if body.stream else None
    stored = Stored(response=response, conversation=making.conversation, log=events_log,
                    num_bytes=_size(response, making.conversation), has_logprobs=body.wants_logprobs)
    store.add(stored)

    def tell(events: Iterable[Event]) -> None:
        for event in events:
            if events_log is not None:
                events_log.add(frame(event))

    async def make() -> None:
        interval = service.config.stream_interval if body.stream else None
        async with aclosing(make_response(service, making, writer, interval)) as events:
            async for event in events:
                tell([event])

    def settle(task: asyncio.Task[None]) -> None:
        if task.cancelled():
            tell(writer.cancel())
        elif (error := task.exception()) is not None:
            report(response, error)
            tell(writer.fail(error))
        if events_log is not None:
            events_log.end()
        output = output_as_input(response.output)
        stored.conversation = [*making.conversation, *output]
        added = _size(response, output) + sum(map(len, events_log.frames if events_log else ()))
        store.grow(stored, added)

    tell(writer.queue())
    stored.task = service.lifecycle.spawn(make())
    stored.task.add_done_callback(settle)
    return stored


async def create(service: Service, request: Request) -> Response:
    body = await read_body(request, ResponsesRequest, service.config.max_body_bytes)
    store = _store(request)
    making = await prepare_response(service, body, store)
    if body.background:
        stored = _start(service, making, store)
        if stored.log is None:
            return json_response(stored.response)
        return await event_stream(request, stored.log.follow())
    if body.stream:
        return await event_stream(request, _frames(service, making, store))
    return await json_when_done(request, _complete(service, making, store))


def _query(request: Request) -> RetrieveQuery:
    given: dict[str, object] = {}
    for name, value in request.query_params.multi_items():
        if name.removesuffix("[]") == "include":  # lists come as include=a&include=b or with brackets
            given.setdefault("include", []).append(value)  # type: ignore[attr-defined]
        else:
            given[name] = value
    return RetrieveQuery.model_validate(given)


async def retrieve(service: Service, request: Request) -> Response:
    query = _query(request)
    stored = _store(request).get(request.path_params["response_id"])
    if LOGPROBS in query.include and not stored.has_logprobs:
        raise InvalidRequest(f"include has {LOGPROBS!r}, must have been asked for when the response was made",
                             "include")
    if not query.stream:
        return json_response(stored.response)
    if stored.log is None:
        raise InvalidRequest("stream is true, must be false: the response was not made with both background and "
                             "stream", "stream")
    start = 0 if query.starting_after is None else query.starting_after + 1
    if stored.is_over and start >= len(stored.log.frames):
        raise InvalidRequest(f"starting_after is {query.starting_after}, must be below the number of the last event, "
                             f"{len(stored.log.frames) - 1}", "starting_after")
    return await event_stream(request, stored.log.follow(start))


async def _end(stored: Stored) -> None:
    """Returns when the response says what became of it, which is after the task is done."""
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.wait((stored.task,))


async def delete(service: Service, request: Request) -> Response:
    store, response_id = _store(request), request.path_params["response_id"]
    if response_id in store.coming:
        store.coming.discard(response_id)
    else:
        await _end(store.remove(response_id))
    return json_response(DeletedResponse(id=response_id))


async def cancel(service: Service, request: Request) -> Response:
    """One that is over stays as it is."""
    stored = _store(request).get(request.path_params["response_id"])
    if not stored.response.background:
        raise InvalidRequest(f"response_id is {stored.response.id!r}, must be a response that is made in the "
                             "background", "response_id")
    await _end(stored)
    return json_response(stored.response)
