"""Qwen2 (biases on q, k and v) and Qwen3 (normed query and key heads). Both may window their upper layers."""

from collections.abc import Mapping
from typing import Any

from model.config import LayerSpec, ModelConfig
from model.families.common import ConfigReader, UnsupportedModel, base_fields


def read_qwen2(hf: Mapping[str, Any]) -> ModelConfig:
    reader = ConfigReader(hf)
    fields = base_fields(reader)
    layers = _layers(reader)
    reader.finish()
    return ModelConfig(family="qwen2", layers=layers, qkv_bias=True, **fields)


def read_qwen3(hf: Mapping[str, Any]) -> ModelConfig:
    reader = ConfigReader(hf)
    fields = base_fields(reader)
    layers = _layers(reader)
    bias = bool(reader.take("attention_bias", False))
    reader.finish()
    return ModelConfig(family="qwen3", layers=layers, qk_norm=True, qkv_bias=bias, o_bias=bias, **fields)


def _layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """`layer_types` where given; otherwise the layers from `max_window_layers` on are windowed, if windows are used."""
    count = reader.num_layers()
    reader.insist("use_mrope", False)
    window = reader.take("sliding_window")
    if not reader.take("use_sliding_window", False):
        window = None
    first = int(reader.take("max_window_layers", 28))
    kinds = reader.take("layer_types") or [
        "sliding_attention" if window is not None and layer >= first else "full_attention" for layer in range(count)
    ]
    if len(kinds) != count or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(f"config.json: layer_types={kinds} must be {count} times full_ or sliding_attention")
    if window is None and "sliding_attention" in kinds:
        raise UnsupportedModel("config.json: layer_types has sliding_attention but there is no sliding_window in use")
    return tuple(LayerSpec(window=window if kind == "sliding_attention" else None) for kind in kinds)
