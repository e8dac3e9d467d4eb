"""A template from a request: renders as others do, and cannot hold or fill the server."""

from typing import Any

import pytest

from serving.errors import InvalidRequest
from serving.tokenizer.foreign_template import render_foreign

OPTIONS: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True,
                           "continue_final_message": False, "variables": {"mood": "é😀"}}  # fmt: skip
LOOP = "{% for i in range(99999) %}"


def rendered(source: str) -> str:
    return render_foreign(source, [{"role": "user", "content": "Hi"}], **OPTIONS)


def test_it_renders_as_others_do():
    assert rendered("{{ messages[0].content }}{% if add_generation_prompt %}:{{ tools }}{% endif %}") == "Hi:None"
    assert rendered("{% for x in [mood] %}{{ x }}{% endfor %}{{ messages | tojson }}") == (
        'é😀[{"role": "user", "content": "Hi"}]'
    )


def test_its_refusals_are_told():
    with pytest.raises(InvalidRequest, match="refuses the messages: no"):
        rendered("{{ raise_exception('no') }}")


@pytest.mark.parametrize("source", [
    LOOP * 4 + "{% endfor %}" * 4, "{{ 10 ** (10 ** 10) }}", "{{ 'a' * 10 ** 10 }}", "{{ 'a' | center(10 ** 10) }}",
    "{{ 'a' * 10 ** 8 }}", "{% set n = namespace(x='a') %}" + LOOP + "{% set n.x = n.x ~ n.x %}{% endfor %}",
])  # fmt: skip
def test_what_needs_too_much(source: str):
    with pytest.raises(InvalidRequest, match="needs more than 2 s, 1024 MB|fails on the messages"):
        rendered(source)  # each of them for ever, were it not stopped
