"""Llama 3.1 and 3.2: `{"name": ..., "parameters": {...}}`, bare or after `<|python_tag|>`; several with `;` between.

Any answer may hold JSON, so an object is a call only if it has the name of a tool and nothing but a call's fields.
"""

from collections.abc import Sequence
from typing import Any

from serving.decoding.text_source import Reading
from serving.decoding.tools.base import ToolParser, beginning, call_schema

TAG = "<|python_tag|>"


class Llama3JsonToolParser(ToolParser):
    markers = (TAG,)

    def call_forms(self, special: Sequence[str]) -> list[dict[str, Any]]:
        bare = [{"type": "json_schema", "json_schema": call_schema(tool)} for tool in self.tools.values()]
        return [beginning(TAG, special), *bare]

    def run(self) -> Reading[None]:
        source = self.source
        while marker := (yield from source.until((TAG, "{"), self.content)):
            source.mark(len(marker))
            if marker == TAG:
                yield from source.space()
                is_call = yield from self.json_call(self.tools)
            else:
                is_call = yield from self.json_fields(self.tools)
            if is_call:
                source.release()
                yield from source.space()
                yield from source.accept(";")
            else:
                self.reject()
