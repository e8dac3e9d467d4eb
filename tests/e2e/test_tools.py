"""Tools through the `openai` package, called by the default model itself."""

import json
from typing import Any

import jsonschema
import openai
import pytest

# As SmolLM2 was taught: https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B-Instruct
TEMPLATE = """{% if tools %}<|im_start|>system
You may call these tools:
<tools>{{ tools | map(attribute='function') | list | tojson }}</tools>
To call one, answer <tool_call>[{"name": "...", "arguments": {...}}]</tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% if m.tool_calls %}<tool_call>{{ m.tool_calls | map(attribute='function') | list | tojson }}\
</tool_call>{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]},
                   "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 7}, "maxItems": 3}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}  # fmt: skip
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": NOTHING}}
TOOLS: Any = [WEATHER, TIME]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def check(call: Any) -> None:
    schema = {"get_weather": PARAMETERS, "get_time": NOTHING}[call.function.name]
    jsonschema.validate(json.loads(call.function.arguments), schema)


def question(city: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is the weather in {city}, in Celsius?"}


@pytest.mark.parametrize("choice, finish", [("required", "tool_calls"), (NAMED, "stop")])
def test_forced_calls_keep_to_the_schema_when_hot(client: openai.OpenAI, choice: Any, finish: str) -> None:
    model = client.models.list().data[0].id
    fields: Any = {"model": model, "messages": [question("Paris")], "tools": TOOLS, "tool_choice": choice,
                   "temperature": 1.5, "seed": 7, "max_tokens": 200}  # fmt: skip
    answer = client.chat.completions.create(**fields, n=3, parallel_tool_calls=False)
    for one in answer.choices:
        assert one.finish_reason == finish and one.message.content is None
        [call] = one.message.tool_calls or []
        check(call)
    first = (answer.choices[0].message.tool_calls or [])[0].function
    with client.chat.completions.stream(**fields, parallel_tool_calls=False) as stream:
        events = [event.type for event in stream]
        [streamed] = stream.get_final_completion().choices
    [call] = streamed.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == (first.name, first.arguments)
    assert streamed.finish_reason == finish and "tool_calls.function.arguments.done" in events


def test_the_model_calls_when_it_wants_to(client: openai.OpenAI) -> None:
    """Shown twice how it is done, it does so, and answers from the result."""
    messages: Any = []
    for city, degrees in (("Rome", 21), ("Oslo", 5)):
        call = {"name": "get_weather", "arguments": json.dumps({"city": city, "unit": "C"})}
        messages += [
            question(city),
            {"role": "assistant", "tool_calls": [{"id": city, "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": city, "content": f"{degrees} degrees"},
            {"role": "assistant", "content": f"It is {degrees} degrees in {city}."},
        ]
    fields: Any = {"model": client.models.list().data[0].id, "tools": TOOLS, "temperature": 0, "max_tokens": 60,
                   "extra_body": {"chat_template": TEMPLATE}}  # fmt: skip
    [answer] = client.chat.completions.create(messages=[*messages, question("Paris")], **fields).choices
    [call] = answer.message.tool_calls or []
    assert answer.finish_reason == "tool_calls" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] == "Paris"
    with client.chat.completions.stream(messages=[*messages, question("Paris")], **fields) as stream:
        [streamed] = stream.get_final_completion().choices
    assert streamed.finish_reason == "tool_calls"
    assert (streamed.message.tool_calls or [])[0].function.arguments == call.function.arguments

    messages += [question("Paris"), answer.message.model_dump(exclude_none=True)]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "17 degrees"})
    [final] = client.chat.completions.create(messages=messages, **fields).choices
    assert final.finish_reason == "stop" and "17" in (final.message.content or "")
