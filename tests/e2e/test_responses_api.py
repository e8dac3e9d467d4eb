"""/v1/responses of the default model, with the `openai` package, unmodified."""

import json
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.servers import Server, wait_until

FRANCE = "What is the capital of France?"
TOOL = {"type": "function", "name": "get_weather", "strict": True, "parameters": {
    "type": "object", "additionalProperties": False, "required": ["city", "unit"],
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
}}  # fmt: skip


class City(BaseModel):
    country: Literal["France", "Spain", "Italy"]
    millions: Annotated[int, Field(ge=0, le=99)]


def test_a_conversation(client: openai.OpenAI, model: str):
    first = client.responses.create(model=model, input=FRANCE, temperature=0)
    assert first.output_text == "The capital of France is Paris."
    with client.responses.stream(model=model, input="And of Italy?", previous_response_id=first.id,
                                 temperature=0) as stream:  # fmt: skip
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        second = stream.get_final_response()
    assert text == second.output_text and "Rome" in text
    items = [{"role": "user", "content": FRANCE}, *first.output, {"role": "user", "content": "And of Italy?"}]
    by_hand = client.responses.create(model=model, input=items, temperature=0)  # type: ignore[arg-type]
    assert by_hand.output_text == text and by_hand.usage is not None and second.usage is not None
    assert by_hand.usage.input_tokens == second.usage.input_tokens
    assert by_hand.usage.input_tokens_details.cached_tokens > 0, "the same tokens, from the prefix cache"


def test_output_that_keeps_to_a_schema(client: openai.OpenAI, model: str):
    for temperature in (0, 1):
        parsed = client.responses.parse(model=model, input="Describe Rome", text_format=City, temperature=temperature)
        assert isinstance(parsed.output_parsed, City)
    with client.responses.stream(model=model, input="Describe Paris", text_format=City, temperature=0) as stream:
        assert isinstance(stream.get_final_response().output_parsed, City)
    with pytest.raises(openai.BadRequestError, match="thing") as caught:
        bad = {"type": "json_schema", "name": "bad", "schema": {"type": "thing"}}
        client.responses.create(model=model, input="x", text={"format": bad})  # type: ignore[typeddict-item]
    assert caught.value.param == "text.format"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_call_that_is_forced(client: openai.OpenAI, model: str, choice: str):
    fields = {"model": model, "input": "How warm is it in Paris?", "tools": [TOOL], "tool_choice": choice,
              "temperature": 0, "parallel_tool_calls": False}  # fmt: skip
    [call] = client.responses.create(**fields).output
    assert call.type == "function_call" and call.name == "get_weather"
    assert json.loads(call.arguments).keys() == {"city", "unit"} and call.status == "completed"
    events = list(client.responses.create(**fields, stream=True))
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert json.loads(done.arguments) == json.loads(call.arguments)


def test_work_in_the_background_can_be_cancelled(client: openai.OpenAI, model: str, server: Server):
    long = client.responses.create(model=model, input="Count to a million", background=True,
                                   extra_body={"ignore_eos": True})  # fmt: skip
    wait_until(lambda: not server.is_idle(), 60, "it is being made")
    assert client.responses.cancel(long.id).status == "cancelled"
    server.wait_idle()
    assert client.responses.retrieve(long.id).status == "cancelled"
