"""Writes a response from the parts of its model output: its items, and the events that tell of them.

    created, in_progress, { item added, [part added], deltas, [text done, part done], item done }, completed

At any time at most one item is open: each has the parts of one kind that came in a row, a function call its own.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from serving.api.http.responses_api import events
from serving.api.http.responses_api.events import DeltaLogprob, DeltaTopLogprob, Event
from serving.api.http.responses_api.objects import (
    FunctionCallOutput,
    IncompleteDetails,
    ItemStatus,
    MessageOutput,
    OutputItem,
    OutputLogprob,
    OutputTextPart,
    ReasoningOutput,
    ReasoningTextPart,
    ResponseObject,
    ResponseUsage,
    response_error,
)
from serving.decoding.parts import ContentDelta, Part, ReasoningDelta
from serving.request import FinishReason

_MADE_BY = {ContentDelta: MessageOutput, ReasoningDelta: ReasoningOutput}


def _in_event(logprobs: Sequence[OutputLogprob]) -> list[DeltaLogprob]:
    """Events do not tell bytes."""
    return [DeltaLogprob(one.token, one.logprob, [DeltaTopLogprob(top.token, top.logprob) for top in one.top_logprobs])
            for one in logprobs]  # fmt: skip


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseWriter:
    """Owns `response` while it is made. All methods return the events that are due, to be sent before the next call:
    they refer to the response itself, which changes."""

    def __init__(self, response: ResponseObject, wants_logprobs: bool):
        self.response = response
        self._wants_logprobs = wants_logprobs
        self._open: OutputItem | None = None
        self._texts: list[str] = []  # of the open item
        self._sequence = 0

    def queue(self) -> list[Event]:
        self.response.status = "queued"
        return [self._of_response(events.Created), self._of_response(events.Queued)]

    def start(self) -> list[Event]:
        """The response is being made. Whoever did not see it queued sees it created."""
        created = [] if self._sequence else [events.Created]
        self.response.status = "in_progress"
        return [self._of_response(kind) for kind in (*created, events.InProgress)]

    def add(self, part: Part, logprobs: Sequence[OutputLogprob] = ()) -> list[Event]:
        """`logprobs` of the tokens that spell a part of the content."""
        if isinstance(part, ContentDelta | ReasoningDelta):
            due = [] if isinstance(self._open, _MADE_BY[type(part)]) else self._begin(part)
            return due + self._text(part.text, logprobs)
        due = [] if part.name is None else self._begin(part)
        assert isinstance(self._open, FunctionCallOutput)
        if part.arguments:
            self._texts.append(part.arguments)
            due.append(events.ArgumentsDelta(**self._place(), delta=part.arguments))
        return due

    def finish(self, reason: FinishReason, usage: ResponseUsage) -> list[Event]:
        """`stop` or `length`. There is at least one item, if of nothing."""
        cut = reason == "length"
        due = self._begin(ContentDelta("")) if not self.response.output else []
        due += self._end("incomplete" if cut else "completed")
        response = self.response
        response.usage = usage
        if cut:
            response.status, response.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
            return [*due, self._of_response(events.Incomplete)]
        response.status, response.completed_at = "completed", int(time.time())
        return [*due, self._of_response(events.Completed)]

    def fail(self, error: BaseException) -> list[Event]:
        due = self._end("incomplete")
        self.response.status, self.response.error = "failed", response_error(error)
        return [*due, self._of_response(events.Failed)]

    def cancel(self) -> list[Event]:
        """Clients know no event for it: the last one is that of an incomplete response, whose status says why."""
        due = self._end("incomplete")
        self.response.status = "cancelled"
        return [*due, self._of_response(events.Incomplete)]

    def _number(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def _of_response(self, kind: type[events.OfResponse]) -> Event:
        return kind(sequence_number=self._number(), response=self.response)

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"sequence_number": self._number(), "item_id": self._open.id,
                "output_index": len(self.response.output) - 1}

    def _begin(self, part: Part) -> list[Event]:
        """Opens the item of `part`, which is the first of its kind."""
        due = self._end("completed")
        if isinstance(part, ContentDelta):
            item: OutputItem = MessageOutput(id=_id("msg"), status="in_progress", content=[])
        elif isinstance(part, ReasoningDelta):
            item = ReasoningOutput(id=_id("rs"), status="in_progress", content=[])
        else:
            item = FunctionCallOutput(id=_id("fc"), status="in_progress", call_id=part.id or _id("call"),
                                      name=part.name or "", arguments="")
        self._open = item
        self.response.output.append(item)
        due.append(events.ItemAdded(sequence_number=self._number(), output_index=len(self.response.output) - 1,
                                    item=replace(item)))
        if isinstance(item, MessageOutput):
            item.content = [self._empty_text()]
            due.append(events.PartAdded(**self._place(), part=self._empty_text()))
        elif isinstance(item, ReasoningOutput):
            item.content = [ReasoningTextPart(text="")]
            due.append(events.PartAdded(**self._place(), part=ReasoningTextPart(text="")))
        return due

    def _empty_text(self) -> OutputTextPart:
        return OutputTextPart(text="", logprobs=[] if self._wants_logprobs else None)

    def _text(self, text: str, logprobs: Sequence[OutputLogprob]) -> list[Event]:
        self._texts.append(text)
        if isinstance(self._open, ReasoningOutput):
            return [events.ReasoningDelta(**self._place(), delta=text)]
        assert isinstance(self._open, MessageOutput)
        if (known := self._open.content[0].logprobs) is not None:
            known += logprobs
        return [events.TextDelta(**self._place(), delta=text, logprobs=_in_event(logprobs))]

    def _end(self, status: ItemStatus) -> list[Event]:
        """Closes the open item, if any."""
        item, text = self._open, "".join(self._texts)
        if item is None:
            return []
        due: list[Event] = []
        item.status = status
        if isinstance(item, FunctionCallOutput):
            item.arguments = text
            due.append(events.ArgumentsDone(**self._place(), arguments=text))
        else:
            item.content[0].text = text
            if isinstance(item, MessageOutput):
                logprobs = _in_event(item.content[0].logprobs or ())
                due.append(events.TextDone(**self._place(), text=text, logprobs=logprobs))
            else:
                due.append(events.ReasoningDone(**self._place(), text=text))
            due.append(events.PartDone(**self._place(), part=item.content[0]))
        due.append(events.ItemDone(sequence_number=self._number(), output_index=len(self.response.output) - 1,
                                   item=item))
        self._open, self._texts = None, []
        return due
