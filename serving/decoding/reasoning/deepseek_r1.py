"""DeepSeek R1 and other models that always reason first: templates put the first tag in the prompt, or nowhere."""

from serving.decoding.reasoning.base import ReasoningParser


class DeepSeekR1ReasoningParser(ReasoningParser):
    starts_open = True
