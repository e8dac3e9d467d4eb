"""Llama 2, 3 and 3.1, and models published under its architecture (SmolLM2)."""

from model.config import MLP, QKVO, LayerSpec, ModelConfig
from model.families.common import ConfigReader, base_fields, biases


def read_config(reader: ConfigReader) -> ModelConfig:
    reader.insist("hidden_act", "silu")
    fields = base_fields(reader)
    layer = LayerSpec(rope=reader.rope(fields["head_dim"]))
    return ModelConfig(
        layers=(layer,) * reader.num_layers(),
        biases=biases(reader, "attention_bias", QKVO) | biases(reader, "mlp_bias", MLP),
        **fields,
    )
