"""Grammars that a request brings: Lark, as llguidance reads it, or GBNF (llama.cpp's EBNF), which is converted."""

import json
import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from serving.decoding.grammar.json_schema import check_bounds, check_multiples
from serving.errors import InvalidRequest

MAX_GRAMMAR_CHARS = 64 * 1024
MAX_GBNF_CHARS = 16 * 1024  # converting takes time by the square of it, in a front end's loop
_JSON = re.compile(r"%json\s*(?={)")
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def lark_of(text: str, param: str) -> str:
    """Raises InvalidRequest."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{param} has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are allowed", param)
    if not text.strip():
        raise InvalidRequest(f"{param} is empty, must be a Lark or GBNF grammar", param)
    if not _GBNF_RULE.search(text):
        _check_schemas(text, param)
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


def _check_schemas(lark: str, param: str) -> None:
    """Of a grammar's schemas, which llguidance reads itself."""
    for match in _JSON.finditer(lark):
        try:
            schema, _ = json.JSONDecoder().raw_decode(lark, match.end())
            check_bounds(schema, param, f"{param}: %json")
            check_multiples(schema, param, f"{param}: %json")
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{param}: what follows %json is not JSON: {error}", param) from None
