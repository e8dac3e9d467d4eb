"""Mistral: Llama with a sliding attention window in every layer."""

from model.config import LayerSpec, ModelConfig
from model.families.common import ConfigReader, base_fields


def read_config(reader: ConfigReader) -> ModelConfig:
    reader.insist("hidden_act", "silu")
    fields = base_fields(reader)
    layer = LayerSpec(rope=reader.rope(fields["head_dim"]), window=reader.take("sliding_window"))
    return ModelConfig(layers=(layer,) * reader.num_layers(), **fields)
