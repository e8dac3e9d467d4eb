"""What llguidance finds wrong with a grammar, as one line that says where.

Its messages name a line and column, show an excerpt, or name a keyword without the place. A schema's place is found by
asking again about its parts: the smallest one with the same fault is to blame.
"""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits

SEARCH_SECONDS = 1.0  # for the place within a schema
_LARK_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_LOOK_AROUND = re.compile(r"lookarounds not supported yet; \w+ in regex ([^\n]*)")
_PROPERTY = re.compile(r"required property '([^\n]*)' is unsatisfiable")
_FORMAT = re.compile(r"Unknown format: ([^\n]*)")
_REGEX_FAULT = re.compile(r"regex parse error:\n(.*?)\n(\s*)\^.*?\nerror: ([^\n]*)", re.DOTALL)
_TELLING = {
    "oneOf constraints are not supported":
        "oneOf is supported only where no value can match two of its schemas: use anyOf",
    "anyOf is empty": "enum, type or anyOf leaves no choice",
    "Regex is empty": "no string has this pattern, format and length",
    "retrieving it failed": "$ref may only point into the schema itself",
    "schema too large": "it is too large, or its combinations (allOf of anyOf) are too many",
    "recursion limit exceeded": "it is nested too deeply",
    "NoExtension": "nothing satisfies it",
    "initial lexer": "its regular expressions are too large",
    "lexer precomputation failed": "its regular expressions are too large",
    "checking relevance of lexemes": "its regular expressions are too large",
}  # what a message says -> what we say


def explain(grammar: str, message: str, limits: LLParserLimits | None = None) -> str:
    """grammar: as given to llguidance. message: its error."""
    for schema in _schemas(grammar):
        if (found := _Search(schema, limits).place(message)) is not None:
            place, what = found
            return f"the JSON schema at {place or 'its root'}: {_plain(what)}"
    return f"the grammar: {_plain(message)}"


def first_line(text: str) -> str:
    return text.partition("\n")[0].strip()


def _plain(message: str) -> str:
    place = ""
    if match := _LARK_PLACE.match(message):
        place, message = f"line {match[1]} column {match[2]}: ", match[3]
    if match := _UNSUPPORTED.search(message):
        names = match[1].replace('"', "")
        return f"{names} {'are' if ',' in names else 'is'} not supported"
    if match := _REGEX_FAULT.search(message):
        where = len(match[2]) - 4  # the excerpt is indented
        return f"the regular expression {_short(match[1].strip())!r} is wrong at character {where}: {match[3]}"
    if match := _LOOK_AROUND.search(message):
        return f"look-around, \\b and anchors in mid-pattern are not supported: {_short(match[1])}"
    if match := _FORMAT.search(message):
        return f"format {match[1]!r} is not supported"
    for part, ours in _TELLING.items():
        if part in message:
            return place + ours
    return place + _short(first_line(message).removeprefix("Unsatisfiable schema: ").removeprefix("Unimplemented: "))


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."


def _schemas(grammar: str) -> Iterator[Any]:
    try:
        parts = json.loads(grammar)["grammars"]
    except (ValueError, KeyError, TypeError):
        return
    for part in parts:
        if "json_schema" in part:
            yield part["json_schema"]


class _Search:
    """For the part of a schema that is to blame."""

    def __init__(self, schema: Any, limits: LLParserLimits | None):
        self._schema = schema if isinstance(schema, dict) else {}
        self._shared = {name: self._schema[name] for name in ("$defs", "definitions", "$schema", "$id")
                        if name in self._schema}  # fmt: skip
        self._limits = limits
        self._deadline = time.monotonic() + SEARCH_SECONDS

    def place(self, message: str) -> tuple[str, str] | None:
        """A JSON pointer to the innermost part that has this fault by itself, and what is said about it. None: the
        schema does not have it."""
        pointer, part = "", self._schema
        if first_line(message) != first_line(self._fault(part)):
            return None
        while (inner := self._inner(part, message)) is not None:
            name, part, message = inner
            pointer = f"{pointer}/{name}"
        return pointer, message

    def _inner(self, part: dict[str, Any], message: str) -> tuple[str, dict[str, Any], str] | None:
        blamed = _PROPERTY.search(message)
        for name, inner in subschemas(part):
            if time.monotonic() > self._deadline:
                return None
            fault = self._fault(inner)
            is_same = first_line(fault) == first_line(message)
            if fault and (is_same or blamed and name == f"properties/{_escape(blamed[1])}"):
                return name, inner, fault
        return None

    def _fault(self, part: dict[str, Any]) -> str:
        whole = part | {name: value for name, value in self._shared.items() if name not in part}
        text = json.dumps({"grammars": [{"json_schema": whole}]})
        is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=self._limits)
        return messages[0] if is_error else ""


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas right inside one, by their JSON pointers."""
    for key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
        if isinstance(schema.get(key), dict):
            yield from ((f"{key}/{_escape(name)}", s) for name, s in schema[key].items() if isinstance(s, dict))
    for key in ("anyOf", "oneOf", "allOf", "prefixItems", "items"):
        if isinstance(schema.get(key), list):
            yield from ((f"{key}/{i}", s) for i, s in enumerate(schema[key]) if isinstance(s, dict))
    for key in ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains",
                "propertyNames"):
        if isinstance(schema.get(key), dict):
            yield key, schema[key]


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
