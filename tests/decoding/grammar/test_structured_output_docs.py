"""The examples of docs/structured_output.md are what it says they are."""

import re
from pathlib import Path

import pytest

from tests.decoding.grammar.toy import Grammars, toy_tokenizer

PAGE = (Path(__file__).parents[3] / "docs" / "structured_output.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "language, field, good, bad",
    [
        ("lark", "grammar", "(1+2)-345", "1+"),
        ("gbnf", "grammar", "(1+2)-345", "1+"),
        ("json", "structural_tag", 'hm <function=weather>{"a": 1}</function>!', "<function=snow>"),
    ],
)
def test_grammars(language: str, field: str, good: str, bad: str) -> None:
    match, grammars = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL), Grammars(toy_tokenizer())
    assert match is not None
    assert grammars.accepts(grammars.matcher(**{field: match[1]}), good)
    assert not grammars.accepts(grammars.matcher(**{field: match[1]}), bad)
