"""/v1/responses: calls of functions, reasoning and forms of output, in answers, in streams and sent back."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from serving.api.generation import Delta
from serving.api.http.responses_api.token_parts import TokenParts
from serving.api.service import Service
from serving.decoding.output_parser import OutputParser
from serving.decoding.parts import ContentDelta, Part, ReasoningDelta, ToolCallDelta
from serving.decoding.reasoning.deepseek_r1 import DeepSeekR1ReasoningParser
from serving.decoding.tools.hermes import HermesToolParser
from tests.api.conftest import SECONDS, Serve, client_of
from tests.api.fakes import fake_logprob
from tests.api.test_http import assert_error
from tests.api.test_responses import SCHEMA, URL, events_of, prompt_of, respond, stream

pytestmark = pytest.mark.anyio
TEMPLATE = (
    "{% for tool in tools or () %}[{{ tool.function.name }}: {{ tool.function.description }}]\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}"
    "{{ m.content or '' }}"
    "{% for call in m.tool_calls or () %}{{ call.function.name }}({{ call.function.arguments.a }}){% endfor %}"
    "{{ '\\n' }}{% endfor %}{{ reasoning_effort }}"
)
CONFIG = {"chat_template": TEMPLATE, "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
          "reasoning_parser": "deepseek_r1"}  # fmt: skip
TOOLS = [{"type": "function", "name": name, "description": f"{name}s", "parameters": SCHEMA, "strict": True}
         for name in ("add", "sub")]  # fmt: skip
CALLS = [f'<tool_call>{{"name": "{name}", "arguments": {{"a": {i}}}}}</tool_call>'
         for name, i in (("add", 1), ("sub", 2))]  # fmt: skip
TEXT = f"hm\nso</think>\n\nI will {CALLS[0]}\n{CALLS[1]}"


@pytest.fixture
def tools(serve: Serve) -> Callable[..., Service]:
    return lambda text=TEXT, **config: serve(text, config={**CONFIG, **config}, max_model_len=1024)


async def test_reasoning_text_and_calls(tools: Callable[..., Service]) -> None:
    service = tools()
    response = await respond(service, tools=TOOLS, reasoning={"effort": "low"})
    assert prompt_of(service) == "[add: adds]\n[sub: subs]\nuser: hi\nlow"
    reasoning, message, add, sub = response.output
    assert reasoning.type == "reasoning" and reasoning.summary == [] and reasoning.encrypted_content is None
    assert [part.text for part in reasoning.content or ()] == ["hm\nso"]
    assert message.type == "message" and message.content[0].text == "I will"  # type: ignore[union-attr]
    assert add.type == sub.type == "function_call" and add.call_id != sub.call_id
    assert (add.name, add.arguments, sub.name, sub.arguments) == ("add", '{"a": 1}', "sub", '{"a": 2}')
    assert {item.status for item in response.output} == {"completed"}  # type: ignore[union-attr]
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len("hm\nso</think>\n\n")
    assert response.model_dump()["tools"][0] == {**TOOLS[0], **dict.fromkeys(
        ("allowed_callers", "async_", "defer_loading", "output_schema"))}  # fmt: skip
    assert response.reasoning is not None and response.reasoning.effort == "low"


async def test_events_of_all_kinds(tools: Callable[..., Service]) -> None:
    events = await stream(tools(), tools=TOOLS)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done") * 2,
        "completed",
    ]  # fmt: skip
    final = events[-1].response
    for index, item in enumerate(final.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        assert mine[0].item.status == "in_progress" and mine[-1].item == item
        assert {event.item_id for event in mine[1:-1]} == {item.id}
        deltas = "".join(event.delta for event in mine if event.type.endswith(".delta"))
        done = next(event for event in mine if event.type.endswith((".text.done", "_text.done", "arguments.done")))
        said = item.arguments if item.type == "function_call" else item.content[0].text
        assert deltas == said == (done.arguments if item.type == "function_call" else done.text)


async def test_the_same_with_any_interval(tools: Callable[..., Service]) -> None:
    outputs = [(await stream(tools(stream_interval=interval), tools=TOOLS))[-1].response for interval in (1, 7, 1000)]
    outputs.append(await respond(tools(), tools=TOOLS))
    plain = [[item.model_dump(exclude={"id", "call_id"}) for item in response.output] for response in outputs]
    assert plain[0] == plain[1] == plain[2] == plain[3]


async def test_calls_and_reasoning_are_sent_back(tools: Callable[..., Service]) -> None:
    service = tools()
    first = await respond(service, tools=TOOLS)
    output = [{**item.model_dump(mode="json", exclude_none=True)} for item in first.output]
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": str(i)}
               for i, item in enumerate(first.output) if item.type == "function_call"]  # fmt: skip
    expected = ("[add: adds]\n[sub: subs]\nuser: hi\nassistant: <hm\nso>I willadd(1)sub(2)\ntool: 2\ntool: 3\n")
    await respond(service, tools=TOOLS, input=[{"role": "user", "content": "hi"}, *output, *results])
    assert prompt_of(service) == expected
    service = tools()
    async with client_of(service) as client:
        first = (await client.post(URL, json={"input": "hi", "tools": TOOLS})).json()
        for result, item in zip(results, first["output"][2:], strict=True):
            result["call_id"] = item["call_id"]
        body = {"previous_response_id": first["id"], "tools": TOOLS, "input": results}
        assert (await client.post(URL, json=body)).status_code == 200
    assert prompt_of(service) == expected


@pytest.mark.parametrize("how", [{}, {"background": True}])
async def test_any_name_that_a_model_calls(tools: Callable[..., Service], how: dict[str, Any]) -> None:
    text = f'</think><tool_call>{{"name": "get weather{"!" * 64}", "arguments": {{"a": 1}}}}</tool_call>'
    async with client_of(tools(text)) as client, asyncio.timeout(SECONDS):
        streamed = await client.post(URL, json={"input": "hi", "tools": TOOLS, "stream": True, **how})
        call, last = (await client.post(URL, json={"input": "hi", "tools": TOOLS})).json(), events_of(streamed.text)[-1]
        assert last.type == "response.completed" and last.response.output[0].name == call["output"][0]["name"]
        result = {"type": "function_call_output", "call_id": last.response.output[0].call_id, "output": "rain"}
        body = {"previous_response_id": last.response.id, "input": [result], "tools": TOOLS}
        assert (await client.post(URL, json=body)).status_code == 200
        assert (await client.post(URL, json={"input": call["output"], "tools": TOOLS})).status_code == 200


async def test_calls_that_are_forced(tools: Callable[..., Service]) -> None:
    service = tools('</think>[{"name": "sub", "parameters": {"a": 3}}, {"name": "add", "parameters": {"a": 4}}]')
    response = await respond(service, tools=TOOLS, tool_choice="required")
    assert [(item.name, item.arguments) for item in response.output] == [  # type: ignore[union-attr]
        ("sub", '{"a": 3}'), ("add", '{"a": 4}')]  # fmt: skip
    assert "sub" in service.engine.seen[-1].grammar and response.tool_choice == "required"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    await respond(service, tools=TOOLS, tool_choice=allowed)
    assert "sub" not in service.engine.seen[-1].grammar and "add" in service.engine.seen[-1].grammar
    service = tools('</think>{"a": 5}')
    named = {"type": "function", "name": "add"}
    response = await respond(service, tools=TOOLS, tool_choice=named)
    assert [(item.name, item.arguments) for item in response.output] == [("add", '{"a": 5}')]  # type: ignore[union-attr]
    assert response.model_dump()["tool_choice"] == {"name": "add", "type": "function"}
    one = await respond(tools(), tools=TOOLS, parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["reasoning", "message", "function_call"]
    assert one.parallel_tool_calls is False
    none = await respond(tools(), tools=TOOLS, tool_choice="none")
    assert [item.type for item in none.output] == ["reasoning", "message"] and "<tool_call>" in none.output_text


async def test_a_call_that_is_cut(tools: Callable[..., Service]) -> None:
    response = await respond(tools(), tools=TOOLS, max_output_tokens=len(TEXT) - 20)
    assert response.status == "incomplete"
    assert [item.status for item in response.output] == [*["completed"] * 3, "incomplete"]  # type: ignore[union-attr]


async def test_text_formats(serve: Serve) -> None:
    service = serve('{"a": 1}')
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    response = await respond(service, text={"format": form})
    assert "integer" in service.engine.seen[-1].grammar
    assert response.model_dump(by_alias=True)["text"]["format"] == {**form, "description": None}
    await respond(service, text={"format": {"type": "json_object"}})
    assert service.engine.seen[-1].grammar
    await respond(service, text={"format": {"type": "text"}})
    assert not service.engine.seen[-1].grammar
    await respond(service, structured_outputs={"choice": ["yes", "no"]})
    assert "yes" in service.engine.seen[-1].grammar
    async with client_of(service) as client:
        both = {"input": "x", "text": {"format": form}, "structured_outputs": {"choice": ["a"]}}
        assert_error(await client.post(URL, json=both), 400, "structured_outputs", "text.format")


async def test_what_the_server_or_its_template_cannot(serve: Serve) -> None:
    async with client_of(serve()) as client:
        tools = {"input": "x", "tools": TOOLS}
        assert_error(await client.post(URL, json=tools), 400, "tool_choice", "--enable-auto-tool-choice")
        effort = {"input": "x", "reasoning": {"effort": "low"}}
        assert_error(await client.post(URL, json=effort), 400, "reasoning.effort", "reasoning.effort", "template")
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        assert_error(await client.post(URL, json={"input": [call]}), 400, "input", "template")


def read(texts: list[str], *parsers: Any, step: int = 1) -> tuple[list[tuple[Part, list[int]]], int]:
    """Parts, with the places of the tokens that spell content."""
    reader = TokenParts(OutputParser(*parsers))
    found: list[tuple[Part, list[int]]] = []
    for start in range(0, len(texts), step):
        some = texts[start : start + step]
        delta = Delta(sequence=0, text="".join(some), token_ids=[0] * len(some), token_texts=some,
                      logprobs=[fake_logprob(start + i, 0) for i in range(len(some))], num_cached_tokens=0,
                      finish_reason="stop" if start + step >= len(texts) else None)  # fmt: skip
        found += [(part, [one.token_id for one in logprobs]) for part, logprobs in reader.feed(delta)]
    return found, reader.num_reasoning_tokens


@pytest.mark.parametrize("step", [1, 2, 100])
def test_tokens_of_parts(step: int) -> None:
    texts = ["<think>", "a", " b", "</think>", "\n\n", "Hi", "", "€", " <", "tool", "s> ", "<tool_call>",
             '{"name": "f", "arguments": {}}', "</tool_call>", ""]  # fmt: skip
    found, num_reasoning = read(texts, DeepSeekR1ReasoningParser(), HermesToolParser(), step=step)
    tokens = [i for part, places in found if isinstance(part, ContentDelta) for i in places]
    content = "".join(part.text for part, _ in found if isinstance(part, ContentDelta))
    assert content == "Hi€ <tools>" and tokens == [5, 6, 7, 8, 9, 10] and num_reasoning == 5
    assert all(not places for part, places in found if not isinstance(part, ContentDelta))
    assert any(isinstance(part, ToolCallDelta) for part, _ in found)


def test_a_token_of_two_parts_spells_both() -> None:
    found, num_reasoning = read(["<think>", "a", "b</think>c", "d"], DeepSeekR1ReasoningParser())
    assert found == [(ReasoningDelta("a"), []), (ReasoningDelta("b"), []), (ContentDelta("c"), [2]),
                     (ContentDelta("d"), [3])]  # fmt: skip
    assert num_reasoning == 3
    assert read(["<think>", "a", "b"], DeepSeekR1ReasoningParser())[1] == 3, "cut while it reasons"
