"""DeepSeek-V2 and V3: latent attention, and after a few dense layers experts of which only some groups are looked at.

Sources: arXiv 2405.04434 and 2412.19437, and the code published with the weights. Weights in 8 bits are refused
(`quantization_config`); copies in bfloat16 are read.
"""

import math
from dataclasses import replace
from typing import Any

from checkpoints.tensors import Part
from model.config import LatentConfig, LayerSpec, ModelConfig, MoESpec, Routing
from model.families.common import ConfigReader, base_fields
from model.families.names import EXPERTS, LLAMA, Names, Stored

# V3's layer behind the last, which predicts the token after the next: not the model's, see `model.speculative.mtp`.
PREDICTORS = ("model.layers.{layers}.*",)


def read_v2(reader: ConfigReader) -> ModelConfig:
    """Softmax scores; a group counts as its best expert."""
    reader.assume(q_lora_rank=1536, n_shared_experts=2)
    reader.insist("scoring_func", "softmax")
    reader.insist("norm_topk_prob", False)
    reader.insist("topk_method", "greedy", "group_limited_greedy")
    limited = reader.take("topk_method", "greedy") != "greedy"
    groups = _groups(reader)
    return _read(reader, dict(weights="scores", **(groups if limited else {})), pairs="neighbours")


def read_v3(reader: ConfigReader) -> ModelConfig:
    """Sigmoid scores, with a bias that chooses only; a group counts as the sum of its two best experts."""
    reader.assume(max_position_embeddings=4096, q_lora_rank=1536, n_shared_experts=1, n_group=8, topk_group=4,
                  first_k_dense_replace=3, routed_scaling_factor=2.5)  # fmt: skip
    reader.insist("scoring_func", "sigmoid")
    reader.insist("topk_method", "noaux_tc")
    reader.insist("num_nextn_predict_layers", 0, 1)
    weights = "normalized" if reader.take("norm_topk_prob", True) else "scores"
    routing = dict(scores="sigmoid", bias="choice", weights=weights, group_best=2, **_groups(reader))
    return _read(reader, routing, pairs="neighbours" if reader.take("rope_interleave", True) else "halves")


def _groups(reader: ConfigReader) -> dict[str, int]:
    return dict(groups=int(reader.take("n_group", 1)), top_groups=int(reader.take("topk_group", 1)))


def _read(reader: ConfigReader, routing: dict[str, Any], pairs: str) -> ModelConfig:
    reader.insist("hidden_act", "silu")
    reader.insist("moe_layer_freq", 1)
    for key in ("attention_bias", "mlp_bias"):
        reader.insist(key, False)
    for key in ("aux_loss_alpha", "ep_size", "head_dim", "num_key_value_heads", "qk_head_dim", "seq_aux"):
        reader.take(key)  # of training, or said by other keys
    rank = reader.take("q_lora_rank")
    latent = LatentConfig(
        latent_dim=int(reader.require("kv_lora_rank")),
        rope_dim=int(reader.require("qk_rope_head_dim")),
        nope_dim=int(reader.require("qk_nope_head_dim")),
        value_dim=int(reader.require("v_head_dim")),
        query_rank=None if rank is None else int(rank),
    )
    fields = base_fields(reader)
    head_dim = latent.nope_dim + latent.rope_dim
    scale = head_dim**-0.5 * _growth(reader) ** 2
    fields |= dict(head_dim=head_dim, num_kv_heads=fields["num_heads"], attention_scale=scale, latent=latent)
    dense = LayerSpec(rope=reader.rope(latent.rope_dim, pairs=pairs))
    sparse = replace(dense, moe=_experts(reader, routing))
    count, first = reader.num_layers(), int(reader.take("first_k_dense_replace", 0))
    return ModelConfig(layers=tuple(dense if layer < first else sparse for layer in range(count)), **fields)


def _experts(reader: ConfigReader, routing: dict[str, Any]) -> MoESpec:
    width, shared = int(reader.require("moe_intermediate_size")), reader.take("n_shared_experts")
    return MoESpec(
        routing=Routing(num_experts=int(reader.require("n_routed_experts")),
                        top_k=int(reader.require("num_experts_per_tok")),
                        scale=float(reader.take("routed_scaling_factor", 1.0)), **routing),
        width=width,
        shared_width=width * int(shared) if shared else None,
    )  # fmt: skip


def _growth(reader: ConfigReader) -> float:
    """What YaRN multiplies queries and keys by, beside what it does to the rotated numbers."""
    scaling = reader.take_dict("rope_scaling") or reader.take_dict("rope_parameters")
    scale, factor = scaling.get("mscale_all_dim"), scaling.get("factor")
    if scaling.get("rope_type", scaling.get("type", "default")) == "default" or not scale or not factor or factor <= 1:
        return 1.0
    return 0.1 * scale * math.log(factor) + 1.0


def names(config: ModelConfig) -> Names:
    """Within a head the up-projections of keys and values are stored one below the other."""
    latent = config.latent
    assert latent is not None

    def up(start: int) -> Stored:
        part = Part(axis=2, start=start, total=latent.nope_dim + latent.value_dim)
        return Stored(name="self_attn.kv_b_proj.weight", part=part)

    return {
        **LLAMA, **EXPERTS,
        ("attention", "q_down"): "self_attn.q_a_proj.weight",
        ("attention", "q_norm", "scale"): "self_attn.q_a_layernorm.weight",
        ("attention", "q"): f"self_attn.{'q_proj' if latent.query_rank is None else 'q_b_proj'}.weight",
        ("attention", "kv_down"): "self_attn.kv_a_proj_with_mqa.weight",
        ("attention", "kv_norm", "scale"): "self_attn.kv_a_layernorm.weight",
        ("attention", "k_up"): up(0),
        ("attention", "v_up"): up(latent.nope_dim),
        ("mlp", "router_bias"): "mlp.gate.e_score_correction_bias",
        **{("mlp", "shared", x): f"mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")},
    }  # fmt: skip
