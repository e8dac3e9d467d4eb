"""Mistral: Llama with a sliding attention window in every layer."""

from collections.abc import Mapping
from typing import Any

from model.config import LayerSpec, ModelConfig
from model.families.common import ConfigReader, base_fields


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    reader = ConfigReader(hf)
    fields = base_fields(reader)
    layers = (LayerSpec(window=reader.take("sliding_window")),) * reader.num_layers()
    reader.finish()
    return ModelConfig(family="mistral", layers=layers, **fields)
