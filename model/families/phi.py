"""Phi-3, 3.5, Phi-4 and Phi-4-mini: Llama with fused projections in its files, a window in every layer or none, and in
the long variants LongRoPE."""

from model.config import LayerSpec, ModelConfig
from model.families.common import ConfigReader, base_fields
from model.families.names import LLAMA, Names, fused_gate_up, fused_qkv


def read_phi3(reader: ConfigReader) -> ModelConfig:
    reader.assume(max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5)
    reader.insist("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        reader.insist(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):  # Phi-4-mini's config has them; 1 changes nothing
        reader.insist(key, 1)
    fields = base_fields(reader)
    rope = reader.rope(fields["head_dim"], names={"su": "longrope", "yarn": "longrope"})  # as early configs call it
    layer = LayerSpec(rope=rope, window=reader.take("sliding_window"))
    return ModelConfig(layers=(layer,) * reader.num_layers(), **fields)


def names(config: ModelConfig) -> Names:
    return {**LLAMA, **fused_qkv(config), **fused_gate_up(config)}
