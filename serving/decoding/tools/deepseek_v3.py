"""DeepSeek: a list of calls in marks of their own. V3 and R1 write a fenced block of JSON, V3.1 the bare arguments:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>
"""

import re

from serving.decoding.text_source import Reading
from serving.decoding.tools.base import ToolParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_NAME = re.compile(r"[\w.-]*")


class DeepSeekV3ToolParser(ToolParser):
    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

    def run(self) -> Reading[None]:
        source = self.source
        while marker := (yield from source.until((CALLS_BEGIN, CALL_BEGIN), self.content)):
            source.mark(len(marker))
            if marker == CALLS_BEGIN:
                yield from source.space()
                if not (yield from source.accept(CALL_BEGIN)):
                    self.reject()
                    continue
            if (yield from self._call()):
                yield from source.space()
                yield from source.close(CALLS_END)
            self.reject()

    def _call(self) -> Reading[bool]:
        source = self.source
        name = yield from source.take(_NAME)
        if not name or not (yield from source.accept(SEPARATOR)):
            return False
        if name == "function" and (yield from source.peek()) != "{":
            name = yield from source.take(_NAME)
            yield from source.space()
            if not name or not (yield from source.accept("```json")):
                return False
        yield from source.space()
        self.begin_call(name)
        if not (yield from self.json_arguments()):
            return False
        yield from source.space()
        yield from source.close("```")
        yield from source.space()
        yield from source.close(CALL_END)
        return True
