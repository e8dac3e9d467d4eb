"""Reasoning parsers by the names of `--reasoning-parser`, which are vLLM's."""

from serving.decoding.reasoning.base import ReasoningParser
from serving.decoding.reasoning.deepseek_r1 import DeepSeekR1ReasoningParser
from serving.decoding.reasoning.harmony import HarmonyParser
from serving.decoding.reasoning.qwen3 import Qwen3ReasoningParser

REASONING_PARSERS: dict[str, type[ReasoningParser] | type[HarmonyParser]] = {
    "deepseek_r1": DeepSeekR1ReasoningParser,
    "gpt-oss": HarmonyParser,
    "openai_gptoss": HarmonyParser,
    "qwen3": Qwen3ReasoningParser,
}
