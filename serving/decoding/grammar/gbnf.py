"""Grammars that a request brings: Lark, as llguidance reads it, or GBNF (llama.cpp's EBNF), which is converted."""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from serving.errors import InvalidRequest

MAX_GRAMMAR_CHARS = 64 * 1024
MAX_GBNF_CHARS = 16 * 1024  # converting takes time by the square of it, in a front end's loop
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def lark_of(text: str, param: str) -> str:
    """Raises InvalidRequest."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{param} has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are allowed", param)
    if not text.strip():
        raise InvalidRequest(f"{param} is empty, must be a Lark or GBNF grammar", param)
    if not _GBNF_RULE.search(text):
        return text
    if len(text) > MAX_GBNF_CHARS:
        raise InvalidRequest(f"{param} has {len(text)} characters of GBNF, at most {MAX_GBNF_CHARS} are allowed "
                             "(of Lark more)", param)
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply", param) from None
    except Exception as error:  # it raises plain ones for undefined rules
        raise InvalidRequest(f"{param} is not GBNF: {error}", param) from error
