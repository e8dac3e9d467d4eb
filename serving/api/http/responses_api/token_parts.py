"""Parts of a model's output with the tokens that spell them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from serving.api.generation import Delta
from serving.decoding.output_parser import OutputParser
from serving.decoding.parts import ContentDelta, Part, ReasoningDelta, ToolCallDelta
from serving.request import Logprobs


@dataclass(slots=True)
class _Run:
    """Parts in a row that go on from one another, kept apart until all are there: one string that grows a token at a
    time would take quadratic time."""

    first: Part
    texts: list[str]
    logprobs: list[Logprobs]

    def takes(self, part: Part) -> bool:
        if isinstance(part, ToolCallDelta):
            return part.name is None and isinstance(self.first, ToolCallDelta) and part.index == self.first.index
        return type(part) is type(self.first)

    def part(self) -> Part:
        text = "".join(self.texts)
        if isinstance(self.first, ToolCallDelta):
            return replace(self.first, arguments=text)
        return type(self.first)(text)


@dataclass(slots=True)
class TokenParts:
    """Feeds a sequence's parser token by token, to see which of them are reasoning and which spell content.

    num_reasoning_tokens: so far, with the tags around it.
    """

    parser: OutputParser
    num_reasoning_tokens: int = 0
    _in_reasoning: bool = False
    _held: list[tuple[str, Logprobs | None]] = field(default_factory=list)  # tokens of which nothing came out yet

    def feed(self, delta: Delta) -> list[tuple[Part, list[Logprobs]]]:
        """The delta's parts, those of content with the log-probabilities of the tokens that spell it."""
        runs: list[_Run] = []
        for i, text in enumerate(delta.token_texts):
            self._held.append((text, delta.logprobs[i] if delta.logprobs else None))
            self._take(self.parser.feed(text), runs)
        if delta.finish_reason is not None:
            self._take(self.parser.finish(), runs)
            self.num_reasoning_tokens += len(self._held) if self._in_reasoning else 0
        return [(run.part(), run.logprobs) for run in runs]

    def _take(self, parts: Sequence[Part], runs: list[_Run]) -> None:
        for i, part in enumerate(parts):
            goes_on = any(isinstance(other, ContentDelta) for other in parts[i + 1 :])
            logprobs = self._settle(part, goes_on)
            text = part.arguments if isinstance(part, ToolCallDelta) else part.text
            if runs and runs[-1].takes(part):
                runs[-1].texts.append(text)
                runs[-1].logprobs += logprobs
            else:
                runs.append(_Run(part, [text], logprobs))

    def _settle(self, part: Part, goes_on: bool) -> list[Logprobs]:
        """Nothing is held any more, but for a last token that `goes_on` with content of its own. Content is spelled by
        the last of what was held, the rest are tags and space."""
        if isinstance(part, ReasoningDelta):
            self._in_reasoning = True
        spelled = len(self._held)
        if isinstance(part, ContentDelta):
            missing = len(part.text)
            while spelled and (missing > 0 or not self._held[spelled - 1][0]):  # halves of a character have no text
                spelled -= 1
                missing -= len(self._held[spelled][0])
        if self._in_reasoning:
            self.num_reasoning_tokens += spelled
        self._in_reasoning = isinstance(part, ReasoningDelta)
        logprobs = [one for _, one in self._held[spelled:] if one is not None]
        self._held = self._held[-1:] if goes_on else []
        return logprobs
