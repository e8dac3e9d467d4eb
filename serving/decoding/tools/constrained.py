"""Calls that a grammar forces: `tool_choice` "required" and a function's name. They are plain JSON whatever the model,
as in vLLM, so these need no parser of the model's own format."""

import re
from collections.abc import Sequence
from typing import Any

from serving.decoding.text_source import Reading
from serving.decoding.tools.base import Tool, ToolParser, call_schema

_BEGUN = re.compile(r'[\s\[,]*\{\s*"name"\s*:\s*"([^"]+)"')


class RequiredToolParser(ToolParser):
    """A list of `{"name": ..., "parameters": {...}}`. One that breaks off is a call from its name on."""

    def run(self) -> Reading[None]:
        source = self.source
        yield from source.space()
        source.mark()
        is_list = (yield from source.peek()) == "["
        if (yield from self.json_calls()):
            source.release()
        elif is_list and not (yield from source.peek()):
            if begun := _BEGUN.match(source.since_mark()):
                self.begin_call(begun[1])
        self.reject()


class NamedToolParser(ToolParser):
    """The arguments of the one tool."""

    def run(self) -> Reading[None]:
        yield from self.source.space()
        if (yield from self.source.peek()):
            self.begin_call(next(iter(self.tools)))
            yield from self.source.rest(self.arguments)


def required_schema(tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """JSON schema of the list of calls."""
    calls = [call_schema(tool, f"#/items/anyOf/{i}") for i, tool in enumerate(tools)]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema if parallel else schema | {"maxItems": 1}
