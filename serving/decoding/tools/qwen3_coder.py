"""Qwen3-Coder: calls in tags, whose values are plain text. The tool's schema says which of them are strings:

    <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n...</function>\\n</tool_call>
"""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from serving.decoding.text_source import Reading, whole_characters
from serving.decoding.tools.base import ToolParser, beginning

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, PARAMETER = "<function=", "<parameter="
VALUE_ENDS = ("\n</parameter>", "</parameter>", f"\n{PARAMETER}", "\n</function>")  # models forget closing tags
_NAME = re.compile(r"[^<>\n]*")
_TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list,
          "null": type(None)}  # fmt: skip
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


class Qwen3CoderToolParser(ToolParser):
    markers = (BEGIN, END)

    def call_forms(self, special: Sequence[str]) -> list[dict[str, Any]]:
        return [beginning(start, special) for start in (BEGIN, FUNCTION)]

    def run(self) -> Reading[None]:
        source = self.source
        while marker := (yield from source.until((BEGIN, FUNCTION), self.content)):
            source.mark(len(marker))
            if marker == BEGIN:
                yield from source.space()
                if not (yield from source.accept(FUNCTION)):
                    self.reject()
                    continue
            name = yield from source.take(_NAME)
            if not name.strip() or not (yield from source.accept(">")):
                self.reject()
                continue
            yield from self._call(name.strip())

    def _call(self, name: str) -> Reading[None]:
        source = self.source
        self.begin_call(name)
        schemas = self.tools[name].parameters.get("properties") if name in self.tools else None
        before = "{"
        ended = ""
        while True:
            yield from source.space()
            if not ended.endswith(PARAMETER) and not (yield from source.close(PARAMETER)):
                break
            key = yield from source.take(_NAME)
            if not (yield from source.accept(">")):
                break
            yield from source.accept("\n")
            self.arguments(f"{before}{json.dumps(key.strip(), ensure_ascii=False)}: ")
            before = ", "
            schema = schemas.get(key.strip()) if isinstance(schemas, dict) else None
            ended = yield from self._value(schema)
            if not ended:
                return  # the text ended within a value
            if ended.endswith("</function>"):
                break
        closing = "{}" if before == "{" else "}"
        if ended.endswith("</function>") or (yield from source.close("</function>")):
            self.arguments(closing)
            closing = ""
        yield from source.space()
        if (yield from source.close(END)):
            self.arguments(closing)

    def _value(self, schema: Any) -> Reading[str]:
        """Returns the mark that ended it."""
        types = _types(schema)
        if types == {"string"}:
            self.arguments('"')
            ended = yield from self.source.until(VALUE_ENDS, lambda text: self.arguments(_escaped(text)))
            self.arguments('"' if ended else "")
            return ended
        value: list[str] = []
        ended = yield from self.source.until(VALUE_ENDS, value.append)
        self.arguments(_converted("".join(value), types))
        return ended


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _types(schema: Any) -> set[str]:
    """Names of JSON types that the value may have; empty if the schema does not say. Without a schema: a string."""
    if not isinstance(schema, dict) or not schema.keys() & {"type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const"}:
        return {"string"}
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            branches = [_types(branch) for branch in schema[key]]
            return set().union(*branches) if all(branches) else set()
    if isinstance(values := schema.get("enum"), list) and all(isinstance(value, str) for value in values):
        return {"string"}
    return set()


def _converted(text: str, types: set[str]) -> str:
    """The JSON that plain text means to a schema of these types; a string if it is none of them."""
    plain = text.strip()
    for spelled in (_PYTHON_NAMES.get(plain, plain), _from_python(plain)):
        try:
            value = json.loads(spelled, parse_constant=_no_json)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, str) and "string" in types:
            break  # its quotes are part of it
        if not types or any(_is_a(value, name) for name in types):
            return whole_characters(spelled)
    return whole_characters(json.dumps(text, ensure_ascii=False))


def _no_json(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _is_a(value: Any, name: str) -> bool:
    if name not in _TYPES:  # "float", "any" and what else models of tools call them
        return True
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _from_python(text: str) -> str:
    """A list or dictionary as Python writes it."""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False) if text[:1] in "[{" else ""
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return ""
