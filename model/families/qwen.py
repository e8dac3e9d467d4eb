"""Qwen2 (biases on q, k and v) and Qwen3 (normed query and key heads). Both may window their upper layers; both have
siblings with mixtures of experts."""

from dataclasses import replace
from typing import Any

from model.config import QKV, QKVO, LayerSpec, ModelConfig, MoESpec, Routing
from model.families.common import ConfigReader, base_fields, biases, window_layers
from model.families.names import EXPERTS, LLAMA, Names


def read_qwen2(reader: ConfigReader) -> ModelConfig:
    reader.assume(num_key_value_heads=32)
    fields = _fields(reader)
    return ModelConfig(layers=_layers(reader, fields["head_dim"]), biases=QKV, **fields)


def read_qwen3(reader: ConfigReader) -> ModelConfig:
    reader.assume(num_key_value_heads=32, head_dim=128)
    fields = _fields(reader)
    return ModelConfig(layers=_layers(reader, fields["head_dim"]), qk_norm="head",
                       biases=biases(reader, "attention_bias", QKVO), **fields)


def read_qwen2_moe(reader: ConfigReader) -> ModelConfig:
    """With an expert beside the others that every token passes, through a gate."""
    reader.assume(num_key_value_heads=16)
    shared = int(reader.take("shared_expert_intermediate_size", 5632))
    config = _with_experts(reader, read_qwen2(reader), shared_width=shared, shared_gate="sigmoid")
    return replace(config, biases=biases(reader, "qkv_bias", QKV, True))


def read_qwen3_moe(reader: ConfigReader) -> ModelConfig:
    reader.assume(num_key_value_heads=4, head_dim=None)
    reader.insist("shared_expert_intermediate_size", 0)  # Qwen3-Coder's config says what all of them have or have not
    reader.insist("qkv_bias", False)
    reader.insist("use_qk_norm", True)
    return _with_experts(reader, read_qwen3(reader))


def _with_experts(reader: ConfigReader, dense: ModelConfig, **fields: Any) -> ModelConfig:
    """Every `decoder_sparse_step`-th layer has experts, but those in `mlp_only_layers`."""
    reader.insist("use_sliding_window", False)  # which layers would have windows changed between transformers' versions
    step, without = int(reader.take("decoder_sparse_step", 1)), reader.take("mlp_only_layers", [])
    routing = Routing(
        num_experts=int(reader.take("num_experts") or reader.require("num_local_experts")),
        top_k=int(reader.require("num_experts_per_tok")),
        weights="normalized" if reader.take("norm_topk_prob", False) else "scores",
    )
    moe = MoESpec(routing=routing, width=int(reader.require("moe_intermediate_size")), **fields)
    return replace(dense, layers=tuple(
        replace(layer, moe=moe) if number not in without and (number + 1) % step == 0 else layer
        for number, layer in enumerate(dense.layers)
    ))  # fmt: skip


def names(config: ModelConfig) -> Names:
    """Of those with experts."""
    shared = {("mlp", "shared", x): f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")}
    return {**LLAMA, **EXPERTS, **shared, ("mlp", "shared_gate"): "mlp.shared_expert_gate.weight"}


def _fields(reader: ConfigReader) -> dict[str, Any]:
    reader.assume(max_position_embeddings=32_768, sliding_window=4096)
    reader.insist("hidden_act", "silu")
    return base_fields(reader)


def _layers(reader: ConfigReader, head_dim: int) -> tuple[LayerSpec, ...]:
    """Where there are no `layer_types`, the layers from `max_window_layers` on are windowed, if windows are used."""
    reader.insist("use_mrope", False)
    window, used = reader.take("sliding_window"), reader.take("use_sliding_window", False)
    first = int(reader.take("max_window_layers", 28))
    return window_layers(reader, reader.rope(head_dim), window if used else None, default=lambda layer: layer >= first)
