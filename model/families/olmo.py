"""OLMo 2: norms after attention and MLP instead of before, and over all query and all key heads of a token."""

from model.config import QKVO, LayerSpec, ModelConfig
from model.families.common import ConfigReader, base_fields, biases
from model.families.names import LLAMA, Names


def read_olmo2(reader: ConfigReader) -> ModelConfig:
    reader.insist("hidden_act", "silu")
    fields = base_fields(reader)
    layer = LayerSpec(rope=reader.rope(fields["head_dim"]))
    return ModelConfig(layers=(layer,) * reader.num_layers(), norms="output", qk_norm="projection",
                       biases=biases(reader, "attention_bias", QKVO), **fields)


def names(config: ModelConfig) -> Names:
    return {
        **LLAMA,
        ("attention_out_norm", "scale"): "post_attention_layernorm.weight",
        ("mlp_out_norm", "scale"): "post_feedforward_layernorm.weight",
    }
