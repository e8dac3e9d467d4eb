"""POST /v1/responses and its stored responses. All that is sent is held against the types of the `openai` package,
strictly, and may have no field that those do not know."""

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from serving.api.http.app import create_app
from serving.api.http.responses_api.conversation import turns, without_turns_before
from serving.api.http.responses_api.request import ResponsesRequest
from serving.api.http.responses_api.store import ResponseStore
from serving.api.service import Service
from tests.api.conftest import SECONDS, Serve, client_of, listening, until
from tests.api.test_http import assert_error

pytestmark = pytest.mark.anyio
URL = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
KNOWN_EXTRA = {"store"}  # OpenAI sends it, the package does not know it
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def no_extras(value: Any) -> None:
    if isinstance(value, BaseModel):
        assert set(value.model_extra or ()) <= KNOWN_EXTRA, f"{type(value).__name__}: {value.model_extra}"
        for name in type(value).model_fields:
            no_extras(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            no_extras(one)


def checked(body: dict[str, Any]) -> Response:
    response = Response.model_validate(body, strict=True)
    no_extras(response)
    return response


def events_of(text: str) -> list[Any]:
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = EVENT.validate_python(json.loads(data.removeprefix("data: ")), strict=True)
        no_extras(event)
        assert event.type == name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
        events.append(event)
    assert [event.sequence_number for event in events] == list(range(events[0].sequence_number,
                                                                     events[0].sequence_number + len(events)))
    return events


async def respond(service: Service, **body: Any) -> Response:
    async with client_of(service) as client:
        answer = await client.post(URL, json={"input": "hi", **body})
    assert answer.status_code == 200, answer.text
    return checked(answer.json())


async def stream(service: Service, **body: Any) -> list[Any]:
    async with client_of(service) as client:
        answer = await client.post(URL, json={"input": "hi", **body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(answer.text)


def prompt_of(service: Service) -> str:
    return service.tokenizer.decode(service.engine.seen[-1].prompt_token_ids, skip_special_tokens=False)


async def test_a_response(serve: Serve) -> None:
    service = serve()
    response = await respond(service, instructions="Be brief", metadata={"a": "b"}, temperature=0.5, user="me")
    assert prompt_of(service) == ("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
                                  "<|im_start|>assistant\n")
    assert response.id.startswith("resp_") and response.status == "completed" and response.output_text == "Hello world"
    [message] = response.output
    assert message.type == "message" and message.status == "completed" and message.id.startswith("msg_")
    assert response.instructions == "Be brief" and response.metadata == {"a": "b"} and response.temperature == 0.5
    assert response.completed_at is not None and response.error is None and response.incomplete_details is None
    usage = response.usage
    assert usage is not None and (usage.output_tokens, usage.input_tokens_details.cached_tokens) == (3, 4)
    assert usage.total_tokens == usage.input_tokens + 3 and usage.output_tokens_details.reasoning_tokens == 0


async def test_a_streamed_response(serve: Serve) -> None:
    events = await stream(serve())
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert events[0].sequence_number == 0 and events[0].response.output == [] and events[2].item.content == []
    assert [event.delta for event in events[4:6]] == ["Hello", " world"] and events[6].text == "Hello world"
    assert len({event.item_id for event in events[3:8]} | {events[2].item.id, events[8].item.id}) == 1
    final = events[-1].response
    assert final.output_text == "Hello world" and final.usage.output_tokens == 3 and final.status == "completed"
    assert len({event.response.id for event in (*events[:2], events[-1])}) == 1


async def test_the_limit_makes_it_incomplete(serve: Serve) -> None:
    response = await respond(serve(), max_output_tokens=1)
    assert response.status == "incomplete" and response.output_text == "Hello" and response.completed_at is None
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert (await stream(serve(), max_output_tokens=1))[-1].type == "response.incomplete"
    service = serve()  # no more than there is room for: it is an upper bound
    assert (await respond(service, max_output_tokens=100_000)).status == "completed"
    assert service.engine.seen[0].sampling.max_tokens == 256 - len(service.engine.seen[0].prompt_token_ids)


async def test_logprobs(serve: Serve) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await respond(serve("a€"), **fields)
    [part] = response.output[0].content  # type: ignore[union-attr]
    assert b"".join(bytes(token.bytes) for token in part.logprobs).decode().startswith("a€")
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
    events = await stream(serve("a€"), **fields)
    assert [token.token for event in events if event.type == "response.output_text.delta"
            for token in event.logprobs] == [token.token for token in part.logprobs]  # fmt: skip
    plain = await respond(serve("a€"))
    assert plain.output[0].content[0].logprobs is None  # type: ignore[union-attr]


async def test_items_become_messages(serve: Serve) -> None:
    service = serve()
    await respond(service, instructions="one", input=[
        {"role": "system", "content": "two"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "three"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "m", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "four", "annotations": [], "logprobs": []},
                     {"type": "refusal", "refusal": "five"}]},
        {"role": "user", "content": "six"},
    ])  # fmt: skip
    assert prompt_of(service) == (
        "<|im_start|>system\none\n\ntwo<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n"
        "<|im_start|>assistant\nfour\nfive<|im_end|>\n<|im_start|>user\nsix<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_response_goes_on_from_another(serve: Serve) -> None:
    service = serve()
    async with client_of(service) as client:
        async def say(text: str, **fields: Any) -> Response:
            answer = await client.post(URL, json={"input": text, **fields})
            assert answer.status_code == 200, answer.text
            return checked(answer.json())

        first = await say("one", instructions="Be brief")
        second = await say("two", previous_response_id=first.id)
        await client.delete(f"{URL}/{first.id}")
        third = await say("three", previous_response_id=second.id, stream=False)
        assert third.previous_response_id == second.id
        spoken = "".join(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\nHello world<|im_end|>\n"
                         for text in ("one", "two", "three"))  # fmt: skip
        assert prompt_of(service) == spoken.removesuffix("Hello world<|im_end|>\n"), "instructions do not carry over"
        assert checked((await client.get(f"{URL}/{third.id}")).json()) == third
        secret = await say("one", store=False)
        for missing in (first.id, secret.id, "resp_other"):
            assert_error(await client.get(f"{URL}/{missing}"), 404, None, missing)
            assert_error(await client.post(URL, json={"input": "x", "previous_response_id": missing}), 404, None)


async def test_truncation_drops_the_oldest_turns(serve: Serve) -> None:
    service = serve()
    turns = [{"role": role, "content": f"{i:02d}" + "x" * 30} for i in range(10) for role in ("user", "assistant")]
    body = {"input": [{"role": "system", "content": "stay"}, *turns, {"role": "user", "content": "last"}]}
    async with client_of(service) as client:
        assert_error(await client.post(URL, json=body), 400, "input", "context length")
        response = checked((await client.post(URL, json={**body, "truncation": "auto"})).json())
        prompt = prompt_of(service)
        assert prompt.startswith("<|im_start|>system\nstay<|im_end|>\n<|im_start|>user\n") and "last" in prompt
        assert "09x" in prompt and "00x" not in prompt
        assert 192 - 80 < len(service.engine.seen[-1].prompt_token_ids) <= 192, "a quarter of 256 is kept free"
        await client.post(URL, json={"input": "x" * 20, "previous_response_id": response.id, "truncation": "auto"})
        assert "last" in prompt_of(service)
        too_long = {"input": "x" * 300, "truncation": "auto"}
        assert_error(await client.post(URL, json=too_long), 400, "input", "context length")


def test_calls_that_truncation_drops_take_their_outputs_along() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    say = {"role": "user", "content": "x"}
    items = ResponsesRequest.model_validate({"input": [say, call, say, output, {**call, "call_id": "d"}]}).input
    assert not isinstance(items, str) and turns(items) == [0, 2]
    assert [item.type for item in without_turns_before(items, 2)] == [None, "function_call"]
    assert without_turns_before(items, 0) == items


async def test_in_the_background(serve: Serve) -> None:
    service = serve(gate=asyncio.Event())
    async with client_of(service) as client:
        response = checked((await client.post(URL, json={"input": "hi", "background": True})).json())
        assert response.status == "queued" and response.background
        await until(lambda: bool(service.engine.live))
        assert_error(await client.post(URL, json={"input": "x", "previous_response_id": response.id}), 400,
                     "previous_response_id", "queued")
        service.engine.gate.set()
        await until(lambda: not service.lifecycle.background)
        response = checked((await client.get(f"{URL}/{response.id}")).json())
        assert response.status == "completed" and response.output_text == "Hello world"
        assert checked((await client.post(f"{URL}/{response.id}/cancel")).json()) == response, "it is over"
        await client.post(URL, json={"input": "two", "previous_response_id": response.id})
        assert "assistant\nHello world" in prompt_of(service)


async def test_a_stream_can_be_taken_up_again(serve: Serve) -> None:
    service = serve("Hello world")
    async with client_of(service) as client:
        body = {"input": "hi", "background": True, "stream": True}
        events = events_of((await client.post(URL, json=body)).text)
        assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
        assert events[-1].type == "response.completed"
        url = f"{URL}/{events[0].response.id}"
        whole = events_of((await client.get(url, params={"stream": "true"})).text)
        rest = events_of((await client.get(url, params={"stream": "true", "starting_after": 4})).text)
        assert whole == events and rest == events[5:]
        assert checked((await client.get(url)).json()) == events[-1].response
        last = {"stream": "true", "starting_after": len(events) - 1}
        assert_error(await client.get(url, params=last), 400, "starting_after", str(len(events) - 1))
        other = (await client.post(URL, json={"input": "hi"})).json()["id"]
        assert_error(await client.get(f"{URL}/{other}", params={"stream": "true"}), 400, "stream", "background")
        for params, param in (({"starting_after": "1"}, "starting_after"), ({"stream": "perhaps"}, "stream"),
                              ({"include[]": "message.output_text.logprobs"}, "include"), ({"x": "1"}, "x"),
                              ({"include": "nothing"}, "include[0]")):
            assert_error(await client.get(url, params=params), 400, param)


async def _after(delay: int, work: Awaitable[httpx.Response]) -> httpx.Response:
    """delay: turns of the event loop."""
    for _ in range(delay):
        await asyncio.sleep(0)
    return await work


@pytest.mark.parametrize("started", [True, False])
async def test_cancel_and_delete_end_the_work(serve: Serve, started: bool) -> None:
    service = serve("abcdefgh", gate=asyncio.Event())
    async with client_of(service) as client:
        for end in ("cancel", "delete"):
            body = {"input": "hi", "background": True}
            response = checked((await client.post(URL, json=body)).json())
            if started:
                await until(lambda: bool(service.engine.live))
            if end == "cancel":
                path = f"{URL}/{response.id}/cancel"
                answers = await asyncio.gather(*(_after(delay, client.post(path)) for delay in range(12)))
                for answer in [checked(answer.json()) for answer in answers]:
                    assert answer.status == "cancelled" and answer.id == response.id
                assert checked((await client.get(f"{URL}/{response.id}")).json()).status == "cancelled"
            else:
                answer = (await client.delete(f"{URL}/{response.id}")).json()
                assert answer == {"id": response.id, "object": "response", "deleted": True}
                assert_error(await client.get(f"{URL}/{response.id}"), 404, None)
            assert not service.engine.live and not service.lifecycle.background and not service.lifecycle.live
        foreground = serve()
        async with client_of(foreground) as other:
            response = (await other.post(URL, json={"input": "hi"})).json()
            assert_error(await other.post(f"{URL}/{response['id']}/cancel"), 400, "response_id", "background")
            assert_error(await other.post(f"{URL}/nothing/cancel"), 404, None)
            assert_error(await other.delete(f"{URL}/nothing"), 404, None)


async def test_one_that_is_streamed_may_be_deleted(serve: Serve) -> None:
    service = serve("abc", gate=asyncio.Event())
    app = create_app(service)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        call = asyncio.ensure_future(client.post(URL, json={"input": "hi", "stream": True}))
        await until(lambda: bool(app.state.responses.coming))
        [response_id] = app.state.responses.coming
        assert (await client.delete(f"{URL}/{response_id}")).json()["deleted"]
        service.engine.gate.set()
        assert events_of((await call).text)[-1].response.id == response_id
        assert_error(await client.get(f"{URL}/{response_id}"), 404, None, "deleted")
        assert_error(await client.delete(f"{URL}/{response_id}"), 404, None, "deleted")


async def test_who_follows_a_cancelled_one_is_told(serve: Serve) -> None:
    service = serve("abcdefgh" * 20, gate=asyncio.Event(), config={"port": 0, "grpc_port": 0})
    service.engine.gate.set()
    async with listening(service) as ports:
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.http_port}", timeout=SECONDS)
        body = {"input": "hi", "background": True, "stream": True}
        async with client, client.stream("POST", URL, json=body) as answer:
            lines = answer.aiter_lines()
            text = ""
            while "output_text.delta" not in text:
                text += await anext(lines) + "\n"
            service.engine.gate.clear()
            response_id = text.split('"id":"')[1].split('"')[0]
            await client.post(f"{URL}/{response_id}/cancel")
            text += "\n".join([line async for line in lines])
    last = events_of(text)[-1]
    assert last.type == "response.incomplete" and last.response.status == "cancelled"
    assert last.response.output[0].status == "incomplete" and last.response.output_text


async def test_an_error_in_mid_stream_fails_the_response(serve: Serve) -> None:
    for background in (False, True):
        service = serve("abcdef" * 10)
        die_at = iter([False] * 8 + [True] * 1000)
        service.engine.check_health = lambda die_at=die_at, service=service: (
            setattr(service.engine, "dead", next(die_at)), type(service.engine).check_health(service.engine))[0]
        events = await stream(service, background=background)
        failed = events[-1]
        assert failed.type == "response.failed" and failed.response.status == "failed"
        assert failed.response.error.code == "server_error" and "engine" in failed.response.error.message
        assert failed.response.output[0].status == "incomplete" and failed.response.output_text
        assert not service.engine.live and not service.lifecycle.live


async def test_refusals_have_their_status(serve: Serve) -> None:
    service = serve(room=0)
    async with client_of(service) as client:
        for fields in ({}, {"stream": True}):
            assert_error(await client.post(URL, json={"input": "x", **fields}), 429, None, "waiting")
        response = (await client.post(URL, json={"input": "x", "background": True})).json()
        await until(lambda: not service.lifecycle.background)
        response = checked((await client.get(f"{URL}/{response['id']}")).json())
        assert response.status == "failed" and response.error is not None
        assert response.error.code == "rate_limit_exceeded"
        service.engine.dead = True
        for fields in ({}, {"stream": True}, {"background": True}):
            assert_error(await client.post(URL, json={"input": "x", **fields}), 503, None)
        assert_error(await client.post(URL, json={"input": "x", "model": "other"}), 404, None, "other")


@pytest.mark.parametrize("background", [True, False])
async def test_clients_that_leave(serve: Serve, background: bool) -> None:
    """Whoever leaves ends the work, unless it is in the background; that ends with the server."""
    service = serve("abcdefgh", gate=asyncio.Event(), config={"port": 0, "grpc_port": 0})
    async with listening(service) as ports, httpx.AsyncClient(timeout=SECONDS) as client:
        url = f"http://127.0.0.1:{ports.http_port}{URL}"
        body = {"input": "x", "background": background}
        calls = [asyncio.ensure_future(client.post(url, json={**body, "stream": stream}))
                 for stream in (True, False, True)]  # fmt: skip
        await until(lambda: len(service.engine.live) == 3)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        if background:
            await asyncio.sleep(0.1)
            assert len(service.engine.live) == len(service.lifecycle.background) == 3
        else:
            await until(lambda: not service.engine.live and not service.lifecycle.live)
    assert not service.engine.live and not service.lifecycle.background and not service.lifecycle.live
    assert len(service.engine.aborted) == 3


async def test_the_store_is_bounded(serve: Serve) -> None:
    service = serve()
    app = create_app(service)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        async def ids(count: int, **how: bool) -> list[str]:
            answers = [(await client.post(URL, json={"input": "hi", **how})).text for _ in range(count)]
            return [answer.split('"id":"')[1].split('"')[0] for answer in answers]

        async def kept(names: list[str]) -> list[bool]:
            return [(await client.get(f"{URL}/{name}")).status_code == 200 for name in names]

        app.state.responses = ResponseStore(max_responses=3)
        assert await kept(await ids(5)) == [False, False, True, True, True]
        for streamed in (False, True):
            app.state.responses = ResponseStore(max_bytes=10_000)
            assert (await kept(await ids(10, stream=streamed))).count(True) in range(2, 6)
        service.engine.gate = asyncio.Event()
        app.state.responses = ResponseStore(max_responses=2)
        for status in (200, 200, 429):
            answer = await client.post(URL, json={"input": "hi", "background": True})
            assert answer.status_code == status
        service.engine.gate.set()
        await until(lambda: not service.lifecycle.background)
        assert all(await kept(await ids(2)))


TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}


@pytest.mark.parametrize(
    "fields, param, word",
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": 5}, "input", "valid string"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]", "'web_search_call' is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "'input_image'"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input[0].role", "'user'"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood", "not a known field"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input", "'c'"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input", "encrypted_content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search' is not supported"),
        ({"tools": [{"type": "function", "name": "not a name"}]}, "tools[0].name", "pattern"),
        ({"tools": [TOOL, TOOL]}, "tools", "twice"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice", "'g'"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp'"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "'grammar'"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
        ({"include": ["file_search_call.results"]}, "include[0]", "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "20"),
        ({"temperature": 2.5}, "temperature", "2.5"),
        ({"max_output_tokens": 0}, "max_output_tokens", "0"),
        ({"max_tokens": 5}, "max_tokens", "not a known field"),
        ({"min_tokens": 5, "max_output_tokens": 4}, "min_tokens", "max_output_tokens"),
        ({"background": True, "store": False}, "background", "store"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "auto"),
        ({"service_tier": "flex"}, "service_tier", "flex"),
        ({"truncation": "yes"}, "truncation", "disabled"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a", "512"),
        ({"stop": [""]}, "stop[0]", "at least 1"),
        ({"stop_token_ids": [99999]}, "stop_token_ids", "99999"),
        ({"input": "x" * 300}, "input", "319"),
    ],
)  # fmt: skip
async def test_a_broken_rule_is_named(serve: Serve, fields: dict[str, Any], param: str, word: str) -> None:
    async with client_of(serve()) as client:
        assert_error(await client.post(URL, json={"input": "hi", **fields}), 400, param, word)
