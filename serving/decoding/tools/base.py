"""What all tool parsers share: how calls come out, and that nothing is lost.

Until a call's name is certain its text is held back, and if it turns out to be none it comes out as content. From then
on the arguments stream as the model writes them, in the model's own JSON text; where they break off (`max_tokens`) or
break JSON's rules, the call has them as far as they went and what follows is content.
"""

import json
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.decoding.parts import ContentDelta, Part, ToolCallDelta
from serving.decoding.stream_parser import StreamParser
from serving.decoding.text_source import Reading, whole_characters

ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id")  # that models write into a call


@dataclass(frozen=True)
class Tool:
    """A function the model may call."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)  # JSON schema of its arguments


def arguments_schema(tool: Tool) -> dict[str, Any]:
    return tool.parameters or {"type": "object", "properties": {}}


def call_schema(tool: Tool, place: str = "#") -> dict[str, Any]:
    """Of a call as an object. place: where it will stand in the whole schema."""
    parameters = arguments_schema(tool)
    if "$id" not in parameters:  # which a reference would start from
        parameters = _moved(parameters, f"{place}/properties/parameters")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema, or a part of it, whose references into the schema itself find it at its new place."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: one if key in ("const", "enum", "default", "examples") and not isinstance(one, dict)
             else _moved(one, place) for key, one in schema.items()}  # fmt: skip
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = place + target[1:]
    return moved


class ToolParser(StreamParser):
    """White space between calls and the ends of the content is the format's and is dropped; all other text around calls
    is content.

    tools: what may be called. Formats without marks of their own go by the names, others report any name.
    """

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__()
        self.tools = {tool.name: tool for tool in tools}
        self.num_calls = 0
        self.has_arguments = False  # the call that began last
        self._space = ""  # of the content, unless a call follows or nothing does
        self._said = self._after_call = False

    def call_forms(self, special: Sequence[str]) -> list[dict[str, Any]]:
        """Outputs that are calls, loosely, as formats of structural tags. special: the markers that are special tokens.
        Empty: they cannot be told so."""
        return [beginning(self.markers[0], special)]

    def make_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    def emit(self, part: Part) -> None:
        if not isinstance(part, ContentDelta):
            super().emit(part)
            return
        text = self._space + part.text
        if self.num_calls and not self._said:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._said, self._after_call = True, False
            super().emit(ContentDelta(kept))

    def finish(self) -> list[Part]:
        parts = super().finish()
        if self._space and not self._after_call:
            parts.append(ContentDelta(self._space))
        return parts

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """A call is certain: the text since the mark is its own."""
        self.source.release()
        self.emit(ToolCallDelta(self.num_calls, "", call_id or self.make_id(), name))
        self.num_calls += 1
        self.has_arguments = False
        self._after_call = True

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        self.has_arguments = self.has_arguments or bool(text)
        self.emit(ToolCallDelta(self.num_calls - 1, text))

    def reject(self) -> None:
        """What was read since the mark is no call."""
        self.content(self.source.since_mark())

    def json_arguments(self) -> Reading[bool]:
        """Reads a value as the arguments of the call that began last: an object; a string that spells one; null or
        nothing, for none. False: the text ends before or within it, or it is no JSON."""
        first = yield from self.source.peek()
        if not first:
            return False
        if first == "{":
            return (yield from self.source.json_value(self.arguments))
        value: list[str] = []
        complete = yield from self.source.json_value(value.append)
        self.arguments(_spelled("".join(value)))
        return complete or not value

    def json_call(self, names: Collection[str] | None = None) -> Reading[bool]:
        """Reads `{"name": ..., "arguments": {...}}`, in whichever order. False: what was read is not a whole call; what
        no delta tells of it is since the mark, which the caller has set."""
        return (yield from self.source.accept("{")) and (yield from self.json_fields(names))

    def json_fields(self, names: Collection[str] | None = None) -> Reading[bool]:
        """The same once the brace was read. With `names`, for formats in which any JSON may come: it is only a call if
        it has one of these names, has arguments, and has no other fields."""
        source = self.source
        name: str | None = None
        held: str | None = None  # arguments that came before the name
        told = False
        while True:
            yield from source.space()
            key = yield from source.json_string()
            yield from source.space()
            if key is None or not (yield from source.accept(":")):
                return False
            yield from source.space()
            if key == "name" and name is None:
                name = yield from source.json_string()
                if not name or (names is not None and name not in names):
                    return False
                if held is not None:
                    self.begin_call(name)
                    self.arguments(_spelled(held))
                    told = True
                    source.mark()
            elif key in ARGUMENT_KEYS and held is None and not told:
                if name is None:
                    value: list[str] = []
                    if not (yield from source.json_value(value.append)):
                        return False
                    held = "".join(value)
                else:
                    self.begin_call(name)
                    told = True
                    if not (yield from self.json_arguments()):
                        return False
                    source.mark()
            elif names is not None and key not in OTHER_KEYS:
                return False
            elif not (yield from source.json_value(_drop)):
                return False
            yield from source.space()
            if not (yield from source.accept(",")):
                break
        if not (yield from source.accept("}")) or name is None or not (told or names is None):
            return False
        if not told:
            self.begin_call(name)
            self.arguments("{}")
        return True

    def json_calls(self) -> Reading[bool]:
        """Reads one such object or an array of them."""
        source = self.source
        if not (yield from source.accept("[")):
            return (yield from self.json_call())
        while True:
            yield from source.space()
            if not (yield from self.json_call()):
                return False
            source.mark()
            yield from source.space()
            if not (yield from source.accept(",")):
                return (yield from source.accept("]"))


def beginning(start: str, special: Sequence[str]) -> dict[str, Any]:
    """Any text after `start`, with special tokens in it."""
    rest: dict[str, Any] = {"type": "any_text"}
    if special:
        tags = [{"type": "tag", "begin": mark, "content": rest, "end": ""} for mark in special]
        rest = {"type": "triggered_tags", "triggers": list(special), "tags": tags}
    return {"type": "sequence", "elements": [{"type": "const_string", "value": start}, rest]}


def _drop(_: str) -> None:
    pass


def _spelled(value: str) -> str:
    """Arguments that are not an object, as one if they mean one."""
    if value in ("", "null"):
        return "{}"
    if value.startswith('"'):
        try:
            inner = json.loads(value, strict=False)
            if isinstance(json.loads(inner), dict):
                return whole_characters(inner)
        except ValueError:
            pass
    return value
