"""Tool parsers by the names of `--tool-call-parser`, which are vLLM's."""

from serving.decoding.tools.base import ToolParser
from serving.decoding.tools.hermes import HermesToolParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesToolParser,
}
