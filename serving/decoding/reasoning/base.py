"""Reasoning that stands before the answer, between tags."""

from serving.decoding.parts import Frame
from serving.decoding.stream_parser import StreamParser
from serving.decoding.text_source import Reading

_NEWLINES = "\r\n"


class ReasoningParser(StreamParser):
    """`<think>...</think>` and then the answer. Newlines at both ends of the reasoning and before the answer are the
    format's and are dropped.

    prompt: the end of the prompt as text, special tokens shown: templates may open the reasoning there, or close it at
    once for an answer without. continues: it is a message of the assistant's that goes on.
    in_reasoning: whether what comes next belongs to the reasoning, as far as is known.
    frame: of the output's reasoning; None: the answer comes at once.
    """

    begin, end = "<think>", "</think>"
    markers = (begin, end)
    starts_open = False  # whether it is reasoning even if no tag begins it

    def __init__(self, prompt: str = "", continues: bool = False) -> None:
        super().__init__()
        prompt = prompt.rstrip()
        opened = prompt.rfind(self.begin) > prompt.rfind(self.end) if continues else prompt.endswith(self.begin)
        self._closed = not opened if continues else prompt.endswith(self.end)
        self.in_reasoning = not self._closed and (self.starts_open or opened)
        open_frame = Frame("", self.end) if self.in_reasoning else Frame(self.begin, self.end, optional=True)
        self.frame = None if self._closed else open_frame
        self._newlines = ""
        self._began = False

    def run(self) -> Reading[None]:
        source = self.source
        if self._closed:
            return
        source.mark()
        yield from source.space()
        if (yield from source.accept(self.begin)):
            self.in_reasoning = True
            source.release()
        text = source.since_mark()
        if not self.in_reasoning:
            self.content(text)
            return
        self._think(text)
        yield from source.until((self.end,), self._think)
        self.in_reasoning = False
        yield from source.space()

    def _think(self, text: str) -> None:
        text = self._newlines + text
        kept = text.rstrip(_NEWLINES)
        self._newlines = text[len(kept) :]
        if not self._began:
            kept = kept.lstrip(_NEWLINES)
        if kept:
            self._began = True
            self.reasoning(kept)
