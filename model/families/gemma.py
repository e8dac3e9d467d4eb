"""Gemma 2 and the text of Gemma 3: norms on both sides of attention and MLP that multiply by 1 + weight, scaled
embeddings, local layers between global ones."""

from dataclasses import replace
from typing import Any

from model.config import QKVO, ModelConfig
from model.families.common import ConfigReader, base_fields, biases, window_layers
from model.families.names import LLAMA, Names

VISION = ("vision_tower.*", "multi_modal_projector.*")  # tensors
_GELU = "gelu_pytorch_tanh"


def read_gemma2(reader: ConfigReader) -> ModelConfig:
    """Every other layer is local. Attention scores and logits are capped."""
    reader.assume(max_position_embeddings=8192, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    fields = _fields(reader)
    reader.take("sliding_window_size")  # the window a second time, which nothing reads
    layers = window_layers(reader, reader.rope(fields["head_dim"]), reader.take("sliding_window"),
                           default=lambda layer: layer % 2 == 0)  # fmt: skip
    return ModelConfig(layers=layers, **fields)


def read_gemma3(reader: ConfigReader) -> ModelConfig:
    """All but every sixth layer are local, with a RoPE of their own. Query and key heads are normed."""
    reader.assume(max_position_embeddings=131_072, vocab_size=262_208, num_attention_heads=8)
    reader.insist("attn_logit_softcapping", None)  # transformers has the key and no cap
    fields = _fields(reader)
    # Since 4.53 transformers writes it with an underscore, beside `layer_types`.
    period = int(reader.take("sliding_window_pattern", reader.take("_sliding_window_pattern", 6)))
    head_dim, local_theta = fields["head_dim"], reader.take("rope_local_base_freq", 10_000.0)
    rope, local_rope = reader.global_and_local_rope(head_dim, theta=1_000_000.0, local_theta=local_theta)
    layers = window_layers(reader, rope, reader.take("sliding_window"), local_rope,
                           default=lambda layer: (layer + 1) % period != 0)  # fmt: skip
    return ModelConfig(layers=layers, qk_norm="head", **fields)


def read_multimodal(reader: ConfigReader) -> ModelConfig:
    """Gemma 3 with a vision tower, which is not loaded: text only."""
    for key in ("vision_config", "mm_tokens_per_image", *(f"{x}_token_{y}" for x in ("boi", "eoi", "image")
                                                         for y in ("index", "id"))):  # fmt: skip
        reader.take(key)
    text = reader.nested("text_config")
    text.assume(bos_token_id=reader.take("bos_token_id"), eos_token_id=reader.take("eos_token_id"))
    config = read_gemma3(text)
    text.finish()
    tied = reader.take("tie_word_embeddings", True)
    return replace(config, family=reader.require("model_type"), tie_embeddings=bool(tied))


def _fields(reader: ConfigReader) -> dict[str, Any]:
    reader.insist("hidden_activation", _GELU)
    reader.insist("hidden_act", _GELU, "gelu")  # early configs say "gelu" here; hidden_activation is what counts
    reader.insist("use_bidirectional_attention", False)
    reader.assume(head_dim=256, num_key_value_heads=4, sliding_window=4096, tie_word_embeddings=True)
    fields = base_fields(reader)
    return fields | dict(
        activation="gelu_tanh",
        norms="both",
        norm_offset=1.0,
        biases=biases(reader, "attention_bias", QKVO),
        embedding_scale=fields["hidden_size"] ** 0.5,
        attention_scale=float(reader.take("query_pre_attn_scalar", 256)) ** -0.5,
        attention_soft_cap=reader.take("attn_logit_softcapping"),
        logit_soft_cap=reader.take("final_logit_softcapping"),
    )


def names(config: ModelConfig) -> Names:
    return {
        **LLAMA,
        ("attention_out_norm", "scale"): "post_attention_layernorm.weight",
        ("mlp_norm", "scale"): "pre_feedforward_layernorm.weight",
        ("mlp_out_norm", "scale"): "post_feedforward_layernorm.weight",
    }
