"""Qwen2 (biases on q, k and v) and Qwen3 (normed query and key heads). Both may window their upper layers."""

from typing import Any

from model.config import QKV, QKVO, LayerSpec, ModelConfig
from model.families.common import ConfigReader, base_fields, biases, window_layers


def read_qwen2(reader: ConfigReader) -> ModelConfig:
    fields = _fields(reader)
    return ModelConfig(layers=_layers(reader, fields["head_dim"]), biases=QKV, **fields)


def read_qwen3(reader: ConfigReader) -> ModelConfig:
    fields = _fields(reader)
    return ModelConfig(layers=_layers(reader, fields["head_dim"]), qk_norm="head",
                       biases=biases(reader, "attention_bias", QKVO), **fields)


def _fields(reader: ConfigReader) -> dict[str, Any]:
    reader.insist("hidden_act", "silu")
    return base_fields(reader)


def _layers(reader: ConfigReader, head_dim: int) -> tuple[LayerSpec, ...]:
    """Where there are no `layer_types`, the layers from `max_window_layers` on are windowed, if windows are used."""
    reader.insist("use_mrope", False)
    window, used = reader.take("sliding_window"), reader.take("use_sliding_window", False)
    first = int(reader.take("max_window_layers", 28))
    return window_layers(reader, reader.rope(head_dim), window if used else None, default=lambda layer: layer >= first)
