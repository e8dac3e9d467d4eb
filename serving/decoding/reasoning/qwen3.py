"""Qwen3 and other models that may answer without reasoning: it is one only where a tag begins it, in the prompt or in
the output."""

from serving.decoding.reasoning.base import ReasoningParser


class Qwen3ReasoningParser(ReasoningParser):
    starts_open = False
