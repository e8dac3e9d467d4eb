"""Mistral: Llama with a sliding attention window in every layer."""

from model.config import LayerSpec, ModelConfig
from model.families.common import ConfigReader, base_fields


def read_config(reader: ConfigReader) -> ModelConfig:
    reader.assume(max_position_embeddings=131_072, num_key_value_heads=8, sliding_window=4096)
    reader.insist("hidden_act", "silu")
    fields = base_fields(reader)
    layer = LayerSpec(rope=reader.rope(fields["head_dim"]), window=reader.take("sliding_window"))
    return ModelConfig(layers=(layer,) * reader.num_layers(), **fields)
