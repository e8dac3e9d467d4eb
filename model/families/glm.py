"""GLM-4 (`glm`: GLM-4-9B of 2024) and its successor of 2025 (`glm4`), which also norms what attention and MLP give.
Half of each head turns, neighbouring numbers together."""

from typing import Any

from model.config import QKV, LayerSpec, ModelConfig
from model.families.common import ConfigReader, base_fields, biases
from model.families.names import LLAMA, Names, fused_gate_up


def read_glm(reader: ConfigReader) -> ModelConfig:
    return ModelConfig(**_fields(reader))


def read_glm4(reader: ConfigReader) -> ModelConfig:
    return ModelConfig(norms="both", **_fields(reader))


def _fields(reader: ConfigReader) -> dict[str, Any]:
    reader.assume(max_position_embeddings=131_072, num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-7)
    reader.insist("hidden_act", "silu")
    fields = base_fields(reader)
    layer = LayerSpec(rope=reader.rope(fields["head_dim"], partial=0.5, pairs="neighbours"))
    return fields | dict(layers=(layer,) * reader.num_layers(), biases=biases(reader, "attention_bias", QKV, True))


def names(config: ModelConfig) -> Names:
    return {
        **LLAMA,
        **fused_gate_up(config),
        ("attention_out_norm", "scale"): "post_self_attn_layernorm.weight",
        ("mlp_out_norm", "scale"): "post_mlp_layernorm.weight",
    }
