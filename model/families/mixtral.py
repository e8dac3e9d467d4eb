"""Mixtral: Mistral with eight experts in every layer, two of them for a token."""

from dataclasses import replace

from model.config import ModelConfig, MoESpec, Routing
from model.families import mistral
from model.families.common import ConfigReader
from model.families.names import LLAMA, Names

_PROJECTIONS = {"gate": "w1", "up": "w3", "down": "w2"}


def read_config(reader: ConfigReader) -> ModelConfig:
    reader.assume(sliding_window=None, rope_theta=1e6, rms_norm_eps=1e-5)
    dense = mistral.read_config(reader)
    routing = Routing(num_experts=int(reader.take("num_local_experts", 8)),
                      top_k=int(reader.take("num_experts_per_tok", 2)))  # fmt: skip
    moe = MoESpec(routing=routing, width=dense.intermediate_size)
    return replace(dense, layers=tuple(replace(layer, moe=moe) for layer in dense.layers))


def names(config: ModelConfig) -> Names:
    block = "block_sparse_moe"
    experts = {("mlp", "experts", x): f"{block}.experts.{{expert}}.{w}.weight" for x, w in _PROJECTIONS.items()}
    return {**LLAMA, **experts, ("mlp", "router"): f"{block}.gate.weight"}
