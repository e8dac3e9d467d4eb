"""OLMo 2: norms after attention and MLP instead of before, and over all query and all key heads of a token. OLMo 3
gives three of four layers a window, and RoPE scaling to the fourth only."""

from typing import Any

from model.config import QKVO, LayerSpec, ModelConfig
from model.families.common import ConfigReader, base_fields, biases, window_layers
from model.families.names import LLAMA, Names


def read_olmo2(reader: ConfigReader) -> ModelConfig:
    fields = _fields(reader)
    layer = LayerSpec(rope=reader.rope(fields["head_dim"]))
    return ModelConfig(layers=(layer,) * reader.num_layers(), **fields)


def read_olmo3(reader: ConfigReader) -> ModelConfig:
    reader.assume(rope_theta=500_000.0, sliding_window=4096)
    fields, theta = _fields(reader), reader.take("rope_theta")
    rope, local_rope = reader.global_and_local_rope(fields["head_dim"], theta=theta, local_theta=theta)
    layers = window_layers(reader, rope, reader.take("sliding_window"), local_rope,
                           default=lambda layer: (layer + 1) % 4 != 0)  # fmt: skip
    return ModelConfig(layers=layers, **fields)


def _fields(reader: ConfigReader) -> dict[str, Any]:
    reader.assume(rms_norm_eps=1e-5)
    reader.insist("hidden_act", "silu")
    return base_fields(reader) | dict(norms="output", qk_norm="projection",
                                      biases=biases(reader, "attention_bias", QKVO))  # fmt: skip


def names(config: ModelConfig) -> Names:
    return {
        **LLAMA,
        ("attention_out_norm", "scale"): "post_attention_layernorm.weight",
        ("mlp_out_norm", "scale"): "post_feedforward_layernorm.weight",
    }
