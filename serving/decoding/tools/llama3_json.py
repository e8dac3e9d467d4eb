"""Llama 3.1 and 3.2: `{"name": ..., "parameters": {...}}`, bare or after `<|python_tag|>`; several with `;` between.

Any answer may hold JSON, so an object is a call only if it has the name of a tool and nothing but a call's fields.
"""

from serving.decoding.text_source import Reading
from serving.decoding.tools.base import ToolParser

TAG = "<|python_tag|>"


class Llama3JsonToolParser(ToolParser):
    markers = (TAG,)

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
