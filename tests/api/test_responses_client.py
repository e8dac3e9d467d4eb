"""/v1/responses with the `openai` package, unmodified: what its helpers make of answers and streams."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from openai.lib.streaming.responses import ResponseTextDeltaEvent
from pydantic import BaseModel

from serving.api.service import Service
from tests.api.conftest import SECONDS, Serve, listening
from tests.api.test_responses_tools import CONFIG, TEXT

pytestmark = pytest.mark.anyio
PORTS = {"port": 0, "grpc_port": 0}


class Sum(BaseModel):
    a: int


@asynccontextmanager
async def client_to(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with listening(service) as ports:
        url = f"http://127.0.0.1:{ports.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=SECONDS, max_retries=0) as client:
            yield client


async def test_answers_and_streams(serve: Serve) -> None:
    async with client_to(serve(config=PORTS)) as client:
        response = await client.responses.create(model="tiny", input="hi", instructions="Be brief")
        assert response.output_text == "Hello world"
        stream = await client.responses.create(model="tiny", input="hi", previous_response_id=response.id, stream=True)
        events = [event async for event in stream]
        assert [event.type for event in events][:: len(events) - 1] == ["response.created", "response.completed"]
        again = await client.responses.retrieve(response.id)
        assert again == response
        await client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError, match=response.id):
            await client.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match="web_search") as caught:
            await client.responses.create(model="tiny", input="hi", tools=[{"type": "web_search"}])
        assert caught.value.param == "tools[0]"


async def test_in_the_background(serve: Serve) -> None:
    async with client_to(serve(config=PORTS)) as client:
        stream = await client.responses.create(model="tiny", input="hi", background=True, stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        response = await client.responses.create(model="tiny", input="hi", background=True)
        while response.status in ("queued", "in_progress"):
            response = await client.responses.retrieve(response.id)
        assert response.status == "completed" and response.output_text == "Hello world"
        assert (await client.responses.cancel(response.id)).status == "completed"
        async with client.responses.stream(model="tiny", input="hi", background=True) as helper:
            text = "".join([e.delta async for e in helper if isinstance(e, ResponseTextDeltaEvent)])
            final = await helper.get_final_response()
        assert text == final.output_text == "Hello world"
        stream = await client.responses.retrieve(final.id, stream=True, starting_after=2,
                                                 include=["reasoning.encrypted_content"])  # fmt: skip
        numbers = [event.sequence_number async for event in stream]
        assert numbers == list(range(3, numbers[-1] + 1))


async def test_parsed_output(serve: Serve) -> None:
    service = serve('{"a": 42}', config=PORTS)
    async with client_to(service) as client:
        parsed = await client.responses.parse(model="tiny", input="hi", text_format=Sum)
        assert parsed.output_parsed == Sum(a=42) and "integer" in service.engine.seen[-1].grammar
        async with client.responses.stream(model="tiny", input="hi", text_format=Sum) as stream:
            assert (await stream.get_final_response()).output_parsed == Sum(a=42)
        await client.responses.create(model="tiny", input=[*parsed.output, {"role": "user", "content": "more"}])  # type: ignore[list-item]
        assert '{"a": 42}' in service.tokenizer.decode(service.engine.seen[-1].prompt_token_ids)


async def test_tools(serve: Serve) -> None:
    """The whole round: a call, its output, and all of it sent back, as the helpers keep it."""
    service = serve(TEXT, config={**CONFIG, **PORTS}, max_model_len=1024)
    tools = [openai.pydantic_function_tool(Sum, name="add"), openai.pydantic_function_tool(Sum, name="sub")]
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    async with client_to(service) as client:
        async with client.responses.stream(model="tiny", input="hi", tools=flat) as stream:  # type: ignore[arg-type]
            arguments = [event.snapshot async for event in stream
                         if event.type == "response.function_call_arguments.delta"]  # fmt: skip
            final = await stream.get_final_response()
        assert '{"a": 1}' in arguments and arguments[-1] == '{"a": 2}'
        calls = [item for item in final.output if item.type == "function_call"]
        assert [(call.name, call.parsed_arguments) for call in calls] == [("add", {"a": 1}), ("sub", {"a": 2})]
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "7"} for call in calls]
        items = [{"role": "user", "content": "hi"}, *final.output, *outputs]
        await client.responses.create(model="tiny", tools=flat, input=items)  # type: ignore[arg-type]
        whole = service.engine.seen[-1].prompt_token_ids
        await client.responses.create(model="tiny", tools=flat, input=outputs, previous_response_id=final.id)  # type: ignore[arg-type]
        assert service.engine.seen[-1].prompt_token_ids == whole
