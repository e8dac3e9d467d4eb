"""The grammar of an output that is a JSON object, or calls in the model's own format, as it likes."""

import json
from collections.abc import Collection
from typing import Any

import msgspec

from serving.decoding.grammar.build import source_of
from serving.decoding.tools.base import ToolParser
from serving.errors import InvalidRequest
from serving.request import StructuredOutputs


def answer_or_calls(answer: StructuredOutputs, parser: ToolParser, special: Collection[str]) -> StructuredOutputs:
    """special: the model's special tokens. Other forms than JSON are the whole output, calls in it are the client's own
    affair. Raises InvalidRequest."""
    if answer.json is None and not answer.json_object:
        return answer
    schema = {"type": "object"} if answer.json is None else _read(answer.json)
    calls = parser.call_forms([mark for mark in parser.markers if mark in special])
    source = source_of(answer)
    if not isinstance(schema, dict) or schema.get("type") != "object" or not calls:
        rule = "a schema whose type is 'object'" if calls else "none with the tool parser of this server"
        raise InvalidRequest(f'{source} beside tools must be {rule}, unless tool_choice is "none"', "tool_choice")
    either = [{"type": "json_schema", "json_schema": schema}, *calls]
    tag = {"type": "structural_tag", "format": {"type": "or", "elements": either}}
    return msgspec.structs.replace(answer, json=None, json_object=None, structural_tag=tag, source=source)


def _read(schema: Any) -> Any:
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        return None
