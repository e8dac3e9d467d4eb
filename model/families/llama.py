"""Llama 2, 3 and 3.1, and models published under its architecture (SmolLM2)."""

from collections.abc import Mapping
from typing import Any

from model.config import LayerSpec, ModelConfig
from model.families.common import ConfigReader, base_fields


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    reader = ConfigReader(hf)
    fields = base_fields(reader)
    bias = bool(reader.take("attention_bias", False))
    mlp_bias = bool(reader.take("mlp_bias", False))
    layers = (LayerSpec(),) * reader.num_layers()
    reader.finish()
    return ModelConfig(family="llama", layers=layers, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias, **fields)
