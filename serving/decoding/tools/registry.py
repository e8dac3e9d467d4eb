"""Tool parsers by the names of `--tool-call-parser`, which are vLLM's."""

from serving.decoding.reasoning.harmony import HarmonyParser
from serving.decoding.tools.base import ToolParser
from serving.decoding.tools.deepseek_v3 import DeepSeekV3ToolParser
from serving.decoding.tools.hermes import HermesToolParser
from serving.decoding.tools.llama3_json import Llama3JsonToolParser
from serving.decoding.tools.mistral import MistralToolParser
from serving.decoding.tools.pythonic import PythonicToolParser
from serving.decoding.tools.qwen3_coder import Qwen3CoderToolParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3ToolParser,
    "deepseek_v31": DeepSeekV3ToolParser,
    "hermes": HermesToolParser,
    "llama3_json": Llama3JsonToolParser,
    "llama4_pythonic": PythonicToolParser,
    "mistral": MistralToolParser,
    "openai": HarmonyParser,  # gpt-oss
    "pythonic": PythonicToolParser,
    "qwen3_coder": Qwen3CoderToolParser,
}
