"""gpt-oss: every message of the output names its channel (the "harmony" format).

    <|channel|>analysis<|message|>TEXT<|end|>                                                  reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>   a call
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>                                content

The first message's `<|start|>assistant` is the end of the prompt. Commentary to nobody is meant for the user: content.
"""

import re
from collections.abc import Sequence
from typing import Any

from serving.decoding.parts import Frame
from serving.decoding.text_source import Reading, Sink
from serving.decoding.tools.base import Tool, ToolParser

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_ROLE = re.compile(r"[\w.]*")
_NAME = re.compile(r"[^\s<]*")
_TO = re.compile(r" to=([^\s<]+)")


class HarmonyParser(ToolParser):
    """Both parsers in one. `takes_calls`: False leaves calls in the content."""

    markers = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
    frame = Frame(f"{CHANNEL}analysis{MESSAGE}", f"<|end|>{START}assistant{CHANNEL}final{MESSAGE}")

    def __init__(self, tools: Sequence[Tool] = (), *, takes_calls: bool = True) -> None:
        super().__init__(tools)
        self._takes_calls = takes_calls
        self.in_reasoning = True
        self._reasoned = self._said = False

    def call_forms(self, special: Sequence[str]) -> list[dict[str, Any]]:
        return []  # they would have to be told from the answer's channel before the grammar begins

    def run(self) -> Reading[None]:
        source = self.source
        begun = ""  # the mark that ended one message because the next begins with it
        while begun or (yield from source.peek()):
            source.mark(len(begun))
            header = yield from self._header(begun)
            if header is None:
                self.reject()
                begun = yield from source.until((START, CHANNEL, *ENDS), self.content)
            else:
                source.release()
                begun = yield from self._body(header)
            begun = "" if begun in ENDS else begun

    def _header(self, begun: str) -> Reading[str | None]:
        """Reads up to the message and returns what stands before it, without marks but for the channel's."""
        source = self.source
        if not begun and (yield from source.accept(START)):
            begun = START
        header: list[str] = []
        if begun != CHANNEL:
            yield from source.take(_ROLE)
            if (yield from source.accept(" to=")):
                header.append(" to=" + (yield from source.take(_NAME)))
            if not (yield from source.accept(CHANNEL)):
                return None
        header.append(CHANNEL)
        ended = CONSTRAIN
        while ended == CONSTRAIN:
            ended = yield from source.until((MESSAGE, CONSTRAIN, START, CHANNEL, *ENDS), header.append)
        return "".join(header) if ended == MESSAGE else None

    def _body(self, header: str) -> Reading[str]:
        """Returns the mark that ended it."""
        source = self.source
        channel = header.partition(CHANNEL)[2].split()[:1]
        to = _TO.search(header)
        name = to.group(1).removeprefix("functions.") if to else ""
        is_call = bool(to) and self._takes_calls and (to.group(1) != name or name in self.tools)
        self.in_reasoning = not is_call and channel == ["analysis"]
        if is_call:
            self.begin_call(name)
            yield from source.space()
            sink: Sink = self.arguments
        elif self.in_reasoning:
            if self._reasoned:
                self.reasoning("\n")
            self._reasoned, sink = True, self.reasoning
        else:
            if self._said:
                self.content("\n")
            self._said, sink = True, self.content
        ended = yield from source.until((START, CHANNEL, *ENDS), sink)
        if is_call and ended and not self.has_arguments:
            self.arguments("{}")
        return ended
