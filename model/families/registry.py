"""The known model families, by the `model_type` of their Hugging Face configs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from checkpoints.tensors import ParamSource
from model.config import ModelConfig
from model.families import deepseek, gemma, glm, gpt_oss, granite, llama, llama4, mistral, mixtral, olmo, phi, qwen
from model.families.common import ConfigReader, UnsupportedModel
from model.families.names import HEAD, LLAMA, Names, Path, sources


@dataclass(frozen=True)
class Family:
    """prefix: of all its tensors. ignored: patterns of tensors that it has no place for, {layers} being the number of
    its layers."""

    read_config: Callable[[ConfigReader], ModelConfig]
    names: Callable[[ModelConfig], Names] = lambda config: LLAMA
    prefix: str = ""
    ignored: tuple[str, ...] = ()


FAMILIES: Mapping[str, Family] = {
    "llama": Family(llama.read_config),
    "llama4_text": Family(llama4.read_text, llama4.names),
    "llama4": Family(llama4.read_multimodal, llama4.names, "language_model.", llama4.VISION),
    "mistral": Family(mistral.read_config),
    "mixtral": Family(mixtral.read_config, mixtral.names),
    "qwen2": Family(qwen.read_qwen2),
    "qwen2_moe": Family(qwen.read_qwen2_moe, qwen.names),
    "qwen3": Family(qwen.read_qwen3),
    "qwen3_moe": Family(qwen.read_qwen3_moe, qwen.names),
    "gemma2": Family(gemma.read_gemma2, gemma.names),
    "gemma3_text": Family(gemma.read_gemma3, gemma.names),
    "gemma3": Family(gemma.read_multimodal, gemma.names, "language_model.", gemma.VISION),
    "phi3": Family(phi.read_phi3, phi.names),
    "glm": Family(glm.read_glm, glm.names),
    "glm4": Family(glm.read_glm4, glm.names),
    "olmo2": Family(olmo.read_olmo2, olmo.names),
    "olmo3": Family(olmo.read_olmo3, olmo.names),
    "granite": Family(granite.read_config),
    "gpt_oss": Family(gpt_oss.read_config, gpt_oss.names),
    "deepseek_v2": Family(deepseek.read_v2, deepseek.names),
    "deepseek_v3": Family(deepseek.read_v3, deepseek.names, ignored=deepseek.PREDICTORS),
}


def read_config(hf: Mapping[str, Any], context: int | None = None) -> ModelConfig:
    """A model's configuration from its Hugging Face config. Unknown families and keys raise UnsupportedModel.

    context: the longest sequence that will be served, on which some RoPE scalings depend; None: the longest possible.
    """
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UnsupportedModel(f"config.json: model_type {kind!r} is not supported; supported: {', '.join(FAMILIES)}")
    reader = ConfigReader(hf, context)
    try:
        config = FAMILIES[kind].read_config(reader)
    except UnsupportedModel:
        raise
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        raise UnsupportedModel(f"config.json of model_type {kind!r}: {error}") from error
    reader.finish()
    return config


def param_sources(config: ModelConfig, paths: Iterable[Path]) -> dict[Path, ParamSource]:
    """Which checkpoint tensors make each of the model's parameters."""
    family = FAMILIES[config.family]
    return sources(config, family.names(config), paths, family.prefix)


def may_be_left_over(config: ModelConfig) -> tuple[str, ...]:
    """Patterns of tensors that a checkpoint may hold for nothing."""
    family = FAMILIES[config.family]
    ignored = tuple(pattern.format(layers=config.num_layers) for pattern in family.ignored)
    return (*ignored, family.prefix + HEAD) if config.tie_embeddings else ignored
