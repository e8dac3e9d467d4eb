"""Hermes 2 and 3, Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call.
SmolLM2 writes one list of all calls between the tags."""

from serving.decoding.text_source import Reading
from serving.decoding.tools.base import ToolParser

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesToolParser(ToolParser):
    markers = (BEGIN, END)

    def run(self) -> Reading[None]:
        source = self.source
        while (yield from source.until((BEGIN,), self.content)):
            source.mark(len(BEGIN))
            yield from source.space()
            if (yield from self.json_calls()):
                source.release()
                yield from source.space()
                yield from source.close(END)
            else:
                self.reject()
