"""The known model families, by the `model_type` of their Hugging Face configs."""

from collections.abc import Mapping
from typing import Any

from model.config import ModelConfig
from model.families import llama, mistral, qwen
from model.families.common import UnsupportedModel

_FAMILIES = {
    "llama": llama.read_config,
    "mistral": mistral.read_config,
    "qwen2": qwen.read_qwen2,
    "qwen3": qwen.read_qwen3,
}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """A model's configuration from its Hugging Face config. Unknown families and keys raise UnsupportedModel."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise UnsupportedModel(f"config.json: model_type {kind!r} is not supported; supported: {', '.join(_FAMILIES)}")
    try:
        return _FAMILIES[kind](hf)
    except UnsupportedModel:
        raise
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise UnsupportedModel(f"config.json of model_type {kind!r}: {error}") from error
