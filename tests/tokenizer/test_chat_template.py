"""What templates may do, and what is answered when they refuse."""

import datetime
from typing import Any

import pytest

from serving.errors import InvalidRequest
from serving.tokenizer.chat_template import render
from serving.tokenizer.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}
CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIMMING = "{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}"


def prompt(source: str, messages: list[dict] | None = None, **options: Any) -> str:
    defaults: dict[str, Any] = {
        "tools": None,
        "documents": None,
        "add_generation_prompt": False,
        "continue_final_message": False,
        "variables": {},
    }
    return render(source, messages or [USER], **{**defaults, **options})


def test_blocks_are_trimmed():
    assert prompt("{% if true %}\n    {% set x = 1 %}\nx{{ x }}\n{% endif %}\ny") == "x1\ny"


def test_what_templates_expect():
    assert prompt("{{ messages | tojson }}") == '[{"role": "user", "content": "Hi"}]'
    assert prompt("{{ x | tojson(indent=1) }}", variables={"x": {"a": "<é>"}}) == '{\n "a": "<é>"\n}'
    assert prompt("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert prompt("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
    assert prompt("{% generation %}a{{ 1 }}{% endgeneration %}b") == "a1b"
    assert prompt("{{ tools is none }} {{ documents is none }}", tools=[], documents=[]) == "True True"
    assert prompt("{{ bos_token }}{{ enable_thinking }}", variables={"bos_token": "<s>", "enable_thinking": False}) == (
        "<s>False"
    )


def test_a_variable_may_have_any_name(smollm2: Tokenizer):
    names = dict.fromkeys(("self", "args", "source", "variables"), 7)
    assert smollm2.apply_chat_template([USER], chat_template="{{ args + source + variables }}", **names) == "21"


def test_text_parts_become_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt(CHATML, [{"role": "user", "content": parts}]) == "<user>a\nb</>\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{% if %}", r"refuses the messages: .*\(line 1\)"),
        ("{{ messages[0].x.y }}", "refuses the messages"),
        ("{{ messages[0]['content'] + 1 }}", "fails on the messages"),
        ("{{ 1 // 0 }}", "fails on the messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages"),
        ("{{ messages.append(1) }}", "refuses the messages"),
        ("{% for i in range(10000000) %}{% endfor %}", "fails on the messages"),
        ("{% break %}", "fails on the messages: 'break' outside loop"),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "fails on the messages: too many statically nested blocks"),
        ("{{ cycler() }}", "fails on the messages: at least one item"),
    ],
)
def test_refusals_carry_the_template_s_words(source: str, message: str):
    with pytest.raises(InvalidRequest, match=message) as caught:
        prompt(source)
    assert caught.value.param == "messages"


def test_continuing_the_final_message():
    chat = [USER, {"role": "assistant", "content": "Well, "}]
    assert prompt(CHATML, chat, continue_final_message=True) == "<user>Hi</>\n<assistant>Well, "
    assert prompt(TRIMMING, chat, continue_final_message=True) == "[Hi][Well,"
    same = [{"role": "user", "content": "ok"}, {"role": "assistant", "content": "ok"}]
    assert prompt(CHATML, same, continue_final_message=True) == "<user>ok</>\n<assistant>ok"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([USER], {"add_generation_prompt": True}, "set only one"),
        ([{"role": "assistant", "content": " "}], {}, "needs text in the last message"),
        ([{"role": "assistant", "tool_calls": []}], {}, "needs text in the last message"),
    ],
)
def test_what_cannot_be_continued(messages: list[dict], options: dict, message: str):
    with pytest.raises(InvalidRequest, match=message):
        prompt("x", messages, continue_final_message=True, **options)
    with pytest.raises(InvalidRequest, match="changes the last message"):
        prompt("x", continue_final_message=True)


def test_template_of_the_request_wins(smollm2: Tokenizer, llama: Tokenizer):
    assert smollm2.apply_chat_template([USER], chat_template="{{ eos_token }}{{ x }}", x=3) == "<|im_end|>3"
    with pytest.raises(InvalidRequest, match="no chat template"):
        llama.apply_chat_template([USER])
    assert llama.apply_chat_template([USER], chat_template="{{ bos_token }}") == "<s>"
