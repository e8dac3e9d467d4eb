"""Mistral: `[TOOL_CALLS]` and a list of `{"name": ..., "arguments": {...}}`; from its 11th tokenizer on
`[TOOL_CALLS]name{...}` for each call, with `[CALL_ID]id` and `[ARGS]` before the arguments in some versions."""

import re
import secrets
import string

from serving.decoding.text_source import Reading
from serving.decoding.tools.base import ToolParser

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.-]*")


class MistralToolParser(ToolParser):
    markers = (BEGIN, CALL_ID, ARGS)

    def make_id(self) -> str:
        """Nine letters and digits: the models' templates refuse others."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def run(self) -> Reading[None]:
        source = self.source
        while (yield from source.until((BEGIN,), self.content)):
            source.mark(len(BEGIN))
            yield from source.space()
            first = yield from source.peek()
            if (yield from (self.json_calls() if first in ("[", "{") else self._named_call())):
                source.release()
            else:
                self.reject()

    def _named_call(self) -> Reading[bool]:
        source = self.source
        name = yield from source.take(_NAME)
        call_id = None
        if (yield from source.accept(CALL_ID)):
            call_id = yield from source.take(_NAME)
        yield from source.accept(ARGS)
        yield from source.space()
        if not name or (yield from source.peek()) != "{":
            return False
        self.begin_call(name, call_id)
        return (yield from self.json_arguments())
