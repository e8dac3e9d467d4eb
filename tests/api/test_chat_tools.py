import json
from functools import partial
from typing import Any

import pytest

from serving.api.service import Service
from serving.errors import ConfigError
from serving.flags import parse_flags
from tests.api.conftest import Serve, client_of
from tests.api.fakes import SPECIAL, byte_tokenizer
from tests.api.test_chat import HI, PROMPT, chat, prompt_of, stream

pytestmark = pytest.mark.anyio

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
# Tools, calls and thinking as the real templates treat them, in little.
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}>{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n{{ reasoning_effort }}"
    "{% if enable_thinking is false %}<think></think>{% endif %}"
)
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO_CALLS = f'Let me look.\n{PARIS}\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>'
CALLS = [("get_weather", '{"city": "Paris"}'), ("get_time", "{}")]


@pytest.fixture
def serve(serve: Serve) -> Serve:
    """With room for what tools take."""
    return partial(serve, max_model_len=2048)


def config(tools: str | None = "hermes", reasoning: str | None = None) -> dict[str, Any]:
    return {"chat_template": TEMPLATE, "tool_call_parser": tools, "enable_auto_tool_choice": tools is not None,
            "reasoning_parser": reasoning}  # fmt: skip


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    calls = message.get("tool_calls") or []
    assert all(call["type"] == "function" and call["id"] for call in calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def put_together(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A streamed choice, by the rules that clients go by."""
    choices = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": [], "logprobs": [], "token_ids": []}
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning"):
            message[name] += delta.get(name, "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert call["type"] == "function" and call["id"] and call["function"]["name"]
                message["tool_calls"].append(call)
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                assert call["index"] == len(message["tool_calls"]) - 1
                message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
        message["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        message["token_ids"] += choice.get("token_ids", [])
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    return {**message, "finish_reason": choices[-1]["finish_reason"]}


async def refused(service: Service, path: str = "/v1/chat/completions", **body: Any) -> tuple[str, str]:
    async with client_of(service) as client:
        response = await client.post(path, json={"messages": HI, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


async def test_calls(serve: Serve) -> None:
    service = serve(TWO_CALLS, config=config())
    body = await chat(service, tools=TOOLS, n=2)
    for choice in body["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me look." and calls_of(choice["message"]) == CALLS
    ids = [call["id"] for choice in body["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4
    assert prompt_of(service).startswith(f"[{json.dumps(WEATHER)}][{json.dumps(TIME)}]<|im_start|>user\nhi")
    assert service.engine.seen[0].grammar == ""

    chunks = await stream(service, tools=TOOLS, n=2)
    for index in (0, 1):
        whole = put_together(chunks, index)
        assert whole["finish_reason"] == "tool_calls"
        assert whole["content"] == "Let me look." and calls_of(whole) == CALLS
    pieces = [call["function"]["arguments"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == 0
              for call in choice["delta"].get("tool_calls", [])]
    assert len(pieces) > 10  # arguments come as they are made


async def test_a_call_alone_has_no_content(serve: Serve) -> None:
    [choice] = (await chat(serve(PARIS, config=config()), tools=TOOLS))["choices"]
    assert choice["message"]["content"] is None and "tool_calls" in choice["message"]
    [choice] = (await chat(serve("Hi", config=config()), tools=TOOLS))["choices"]
    assert choice["message"]["content"] == "Hi" and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


async def test_what_is_no_call_is_content(serve: Serve) -> None:
    service = serve('<tool_call>{"name": oops</tool_call>', config=config())
    [choice] = (await chat(service, tools=TOOLS))["choices"]
    assert choice["message"]["content"] == '<tool_call>{"name": oops</tool_call>' and choice["finish_reason"] == "stop"
    assert put_together(await stream(service, tools=TOOLS))["content"] == choice["message"]["content"]
    [choice] = (await chat(service, tools=TOOLS, tool_choice="none"))["choices"]
    assert choice["message"]["content"] == '<tool_call>{"name": oops</tool_call>'
    [choice] = (await chat(serve(PARIS, config=config()), tools=TOOLS, tool_choice="none"))["choices"]
    assert choice["message"]["content"] == PARIS and choice["finish_reason"] == "stop"


async def test_log_probabilities_and_ids_are_of_all_tokens(serve: Serve) -> None:
    service = serve(TWO_CALLS, config=config())
    fields = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    [choice] = (await chat(service, **fields))["choices"]
    whole = put_together(await stream(service, **fields))
    assert whole["logprobs"] == choice["logprobs"]["content"] and whole["token_ids"] == choice["token_ids"]
    assert service.tokenizer.decode(whole["token_ids"]) == TWO_CALLS
    assert len(whole["logprobs"]) == len(whole["token_ids"])


async def test_stop_strings_and_limits_cut_calls(serve: Serve) -> None:
    service = serve(PARIS, config=config())
    for fields, finish, arguments in (({"stop": "ris"}, "tool_calls", '{"city": "Pa'),
                                      ({"max_tokens": 62}, "length", '{"city": "Pa')):
        [choice] = (await chat(service, tools=TOOLS, **fields))["choices"]
        whole = put_together(await stream(service, tools=TOOLS, **fields))
        for message, reason in ((choice["message"], choice["finish_reason"]), (whole, whole["finish_reason"])):
            [(name, made)] = calls_of(message)
            assert name == "get_weather" and made.startswith(arguments[:10]) and reason == finish
        assert calls_of(choice["message"]) == calls_of(whole)
    assert calls_of((await chat(service, tools=TOOLS, stop="ris"))["choices"][0]["message"])[0][1] == '{"city": "Pa'


async def test_only_one_call(serve: Serve) -> None:
    service = serve(TWO_CALLS, config=config())
    [choice] = (await chat(service, tools=TOOLS, parallel_tool_calls=False))["choices"]
    assert calls_of(choice["message"]) == CALLS[:1]
    assert calls_of(put_together(await stream(service, tools=TOOLS, parallel_tool_calls=False))) == CALLS[:1]


async def test_special_tokens_reach_the_parser_and_nobody_else(serve: Serve) -> None:
    tokenizer = byte_tokenizer(special_tokens=(*SPECIAL, "[TOOL_CALLS]", "[OTHER]"))
    text = '[OTHER]Hm.[TOOL_CALLS][{"name": "get_time", "arguments": {}}]'
    service = serve(text, tokenizer=tokenizer, config=config("mistral"))
    [choice] = (await chat(service, tools=TOOLS))["choices"]
    assert choice["message"]["content"] == "Hm." and calls_of(choice["message"]) == CALLS[1:]
    assert len(choice["message"]["tool_calls"][0]["id"]) == 9
    whole = put_together(await stream(service, tools=TOOLS))
    assert whole["content"] == "Hm." and calls_of(whole) == CALLS[1:]
    service = serve("Hm.[TOOL_CALLS] no [OTHER]call", tokenizer=tokenizer, config=config("mistral"))
    assert (await chat(service, tools=TOOLS))["choices"][0]["message"]["content"] == "Hm. no call"
    assert put_together(await stream(service, tools=TOOLS))["content"] == "Hm. no call"
    answer = await chat(service, tools=TOOLS, skip_special_tokens=False)
    assert answer["choices"][0]["message"]["content"] == "Hm.[TOOL_CALLS] no [OTHER]call"
    assert (await chat(service))["choices"][0]["message"]["content"] == "Hm. no call"


async def test_gpt_oss(serve: Serve) -> None:
    tokenizer = byte_tokenizer(special_tokens=(
        *SPECIAL, "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"))
    text = ("<|channel|>analysis<|message|>Weather.<|end|><|start|>assistant<|channel|>commentary"
            ' to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>')
    service = serve(text, tokenizer=tokenizer, config=config("openai", "gpt-oss"))
    [choice] = (await chat(service, tools=TOOLS))["choices"]
    assert choice["message"]["reasoning"] == "Weather." and choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None and calls_of(choice["message"]) == CALLS[:1]
    whole = put_together(await stream(service, tools=TOOLS))
    assert whole["reasoning"] == "Weather." and whole["content"] == "" and calls_of(whole) == CALLS[:1]


@pytest.mark.parametrize("tools", [None, "hermes"])
async def test_reasoning(serve: Serve, tools: str | None) -> None:
    service = serve("<think>\nHm.\n\nSo.\n</think>\n\nHello.", config=config(tools, "qwen3"))
    fields = {"tools": TOOLS} if tools else {}
    [choice] = (await chat(service, **fields))["choices"]
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm.\n\nSo." and message["content"] == "Hello."
    whole = put_together(await stream(service, **fields))
    assert whole["reasoning"] == "Hm.\n\nSo." and whole["content"] == "Hello." and whole["finish_reason"] == "stop"
    [choice] = (await chat(service, include_reasoning=False, **fields))["choices"]
    assert choice["message"]["reasoning"] is None and choice["message"]["content"] == "Hello."
    whole = put_together(await stream(service, include_reasoning=False, **fields))
    assert whole["reasoning"] == "" and whole["content"] == "Hello."
    # A prompt that has closed the reasoning asks for an answer without.
    closed = await chat(service, chat_template_kwargs={"enable_thinking": False}, **fields)
    assert closed["choices"][0]["message"]["content"].startswith("<think>")
    answers = [*HI, {"role": "assistant", **message}, *HI]
    await chat(service, messages=answers)


async def test_reasoning_effort_is_the_templates(serve: Serve) -> None:
    service = serve(config=config())
    await chat(service, reasoning_effort="low")
    assert prompt_of(service).endswith("assistant\nlow")
    service = serve(config={"chat_template": "{{ enable_thinking }}"})
    await chat(service, reasoning_effort="none")
    assert prompt_of(service) == "False"
    await chat(service, reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    assert prompt_of(service) == "False"


async def test_calls_and_results_go_back(serve: Serve) -> None:
    service = serve(PARIS, config=config())
    answer = (await chat(service, tools=TOOLS))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "20 degrees"}
    await chat(service, messages=[*HI, answer, result], tools=TOOLS)
    assert "assistant\n<get_weather city=Paris><|im_end|>\n<|im_start|>tool\n20 degrees<|im_end|>" in prompt_of(service)
    streamed = {"role": "assistant", "tool_calls": [{"index": 0, "id": "a", "type": "function",
                                                     "function": {"name": "get_time", "arguments": ""}}]}
    await chat(service, messages=[*HI, streamed, result], tools=TOOLS)
    assert "assistant\n<get_time><|im_end|>" in prompt_of(service)
    # Arguments that a model broke off stay what they are: what a template makes of them is its own affair.
    broken = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"a": '}}]}
    param, _ = await refused(service, messages=[*HI, broken], tools=TOOLS)
    assert param == "messages"


async def test_a_template_for_tools(serve: Serve) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_templates["tool_use"] = "{{ tools | length }} tools"
    service = serve(tokenizer=tokenizer, config={"tool_call_parser": "hermes", "enable_auto_tool_choice": True})
    await chat(service, tools=TOOLS)
    assert prompt_of(service) == "2 tools"
    await chat(service)
    assert prompt_of(service) == PROMPT


async def test_tokenize_shows_tools(serve: Serve) -> None:
    service = serve(config=config())
    await chat(service, tools=TOOLS)
    async with client_of(service) as client:
        answer = await client.post("/tokenize", json={"messages": HI, "tools": TOOLS})
    assert answer.json()["tokens"] == service.engine.seen[-1].prompt_token_ids


@pytest.mark.parametrize("choice, reply, calls, finish", [
    ("required", '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "get_time", "parameters": {}}]',
     CALLS, "tool_calls"),
    (NAMED, '{"city": "Paris"}', CALLS[:1], "stop"),
])  # fmt: skip
@pytest.mark.parametrize("parser", [None, "mistral"])
async def test_forced_calls(serve: Serve, parser: str | None, choice: Any, reply: str, calls: Any, finish: str) -> None:
    service = serve(reply, config=config(parser))
    [answer] = (await chat(service, tools=TOOLS, tool_choice=choice))["choices"]
    assert calls_of(answer["message"]) == calls and answer["message"]["content"] is None
    assert answer["finish_reason"] == finish
    whole = put_together(await stream(service, tools=TOOLS, tool_choice=choice))
    assert calls_of(whole) == calls and whole["content"] == "" and whole["finish_reason"] == finish
    assert "city" in service.engine.seen[-1].grammar


async def test_forced_calls_follow_reasoning(serve: Serve) -> None:
    reply = '<think>Hm.</think>\n\n{"city": "Paris"}'
    service = serve(reply, config=config(None, "qwen3"))
    [answer] = (await chat(service, tools=TOOLS, tool_choice=NAMED))["choices"]
    assert answer["message"]["reasoning"] == "Hm." and calls_of(answer["message"]) == CALLS[:1]
    assert "</think>" in service.engine.seen[-1].grammar
    await chat(service, tools=TOOLS, tool_choice=NAMED, chat_template_kwargs={"enable_thinking": False})
    assert "</think>" not in service.engine.seen[-1].grammar


async def test_an_answer_of_a_form_or_calls(serve: Serve) -> None:
    service = serve(PARIS, config=config())
    [answer] = (await chat(service, tools=TOOLS, response_format={"type": "json_object"}))["choices"]
    assert calls_of(answer["message"]) == CALLS[:1]
    assert "<tool_call>" in service.engine.seen[-1].grammar
    await chat(service, tools=TOOLS, tool_choice="none", response_format={"type": "json_object"})
    assert "<tool_call>" not in service.engine.seen[-1].grammar != ""


async def test_forced_calls_need_no_template(serve: Serve) -> None:
    """The grammar has the schema; the messages may say the rest."""
    service = serve('{"city": "Paris"}')
    [answer] = (await chat(service, tools=TOOLS, tool_choice=NAMED))["choices"]
    assert calls_of(answer["message"]) == CALLS[:1]


def allowed(mode: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}


async def test_tools_that_are_not_allowed_are_as_if_not_given(serve: Serve) -> None:
    for mode in ("auto", "required"):
        service = serve(config=config())
        for fields in ({"tools": TOOLS, "tool_choice": allowed(mode)}, {"tools": [WEATHER], "tool_choice": mode}):
            await chat(service, **fields)
        some, only = service.engine.seen
        assert (some.prompt_token_ids, some.grammar) == (only.prompt_token_ids, only.grammar)
        assert bool(some.grammar) == (mode == "required")


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize("body, param, words", [
    ({"tools": function(name="a b")}, "tools[0].function.name", "pattern"),
    ({"tools": function(name="f" * 65)}, "tools[0].function.name", "pattern"),
    ({"tools": [TIME, TIME]}, "tools", "two functions are called 'get_time'"),
    ({"tools": [TIME] * 129}, "tools", "at most 128"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "function"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"tools": function(parameters={"type": "array"})}, "tools[0].function.parameters", "must be 'object'"),
    ({"tools": function(parameters={"properties": []})}, "tools[0].function.parameters", "must be an object"),
    ({"tools": function(parameters="{}")}, "tools[0].function.parameters", "object"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": NAMED}, "tool_choice", "none of tools"),
    ({"tools": [TIME], "tool_choice": NAMED}, "tool_choice", "'get_weather', which is none of tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'required'"),
    ({"tools": TOOLS, "tool_choice": {"type": "any"}}, "tool_choice", "must be 'function' or 'allowed_tools'"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
    ({"tools": [TIME], "tool_choice": allowed("auto")}, "tool_choice", "'get_weather', which is none of tools"),
    ({"tools": TOOLS, "tool_choice": allowed("none")}, "tool_choice.allowed_tools.mode", "'required'"),
    ({"tools": TOOLS, "tool_choice": NAMED, "response_format": {"type": "json_object"}}, "tool_choice",
     "response_format"),
    ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice",
     "structured_outputs"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
     "messages[0].tool_calls[0].function.name", "missing"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "'low'"),
])  # fmt: skip
async def test_a_broken_rule_is_named(serve: Serve, body: dict[str, Any], param: str, words: str) -> None:
    found, message = await refused(serve(config=config()), **body)
    assert found == param and words in message


async def test_what_the_server_is_not_started_for(serve: Serve) -> None:
    param, message = await refused(serve(config=config(None)), tools=TOOLS)
    assert param == "tool_choice" and "--enable-auto-tool-choice" in message and "--tool-call-parser" in message
    flags = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    param, message = await refused(serve(config=flags), tools=TOOLS)
    assert param == "tools" and "chat template" in message
    calls = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}
    param, message = await refused(serve(config=flags), messages=[*HI, calls])
    assert param == "messages[1].tool_calls" and "chat template" in message
    param, message = await refused(serve(config=flags), "/tokenize", tools=TOOLS)
    assert param == "tools"
    param, message = await refused(serve(config={"chat_template": "{{ messages }}"}), reasoning_effort="low")
    assert param == "reasoning_effort"


def test_flags() -> None:
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "mistral", "--reasoning-parser", "qwen3"]
    made = parse_flags(flags)
    assert made.enable_auto_tool_choice and (made.tool_call_parser, made.reasoning_parser) == ("mistral", "qwen3")
    for wrong, words in ((flags[:1], "need each other"), (flags[1:3], "need each other"),
                         (["--tool-call-parser", "x"], "invalid choice: 'x'"), (["--reasoning-parser", "x"], "qwen3")):
        with pytest.raises(ConfigError, match=words):
            parse_flags(wrong)
