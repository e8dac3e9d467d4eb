"""A small model of every family with real head sizes, on a mesh for each way to divide it: to compile its serving step
for chips that are not there. The configs are those of the goldens with larger numbers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.families.registry import read_config
from scripts.aot.models import StepConfig
from sharding.mesh import parse_mesh

GOLDENS = Path(__file__).parents[2] / "tests" / "goldens"

# The golden that stands for each family.
FAMILIES: Mapping[str, str] = {
    "llama": "llama3-rope", "mistral": "mistral-window", "qwen2": "qwen2-bias", "qwen3": "qwen3-qk-norm",
    "gemma2": "gemma2", "gemma3": "gemma3", "phi3": "phi3-window", "glm4": "glm4", "olmo2": "olmo2", "olmo3": "olmo3",
    "granite": "granite", "mixtral": "mixtral", "qwen2_moe": "qwen2-moe", "qwen3_moe": "qwen3-moe",
    "gpt_oss": "gpt-oss", "llama4": "llama4", "deepseek_v2": "deepseek-v2", "deepseek_v3": "deepseek-v3",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to divide a model. meshes: the first that the model's layers allow is taken."""

    name: str
    meshes: tuple[str, ...]
    expert_parallel: bool = False


WAYS = {
    way.name: way
    for way in (
        Way(name="tensor", meshes=("8x1",)),
        Way(name="data", meshes=("2x4",)),
        Way(name="expert", meshes=("2x4",), expert_parallel=True),
        Way(name="context", meshes=("tensor=2,context=2,data=2",)),
        Way(name="pipeline", meshes=("pipeline=2,tensor=2,data=2", "pipeline=3,tensor=2")),
    )
}

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

_LARGER: Mapping[str, Any] = {
    "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 1024,
    "intermediate_size_mlp": 1024, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "vocab_size": 1024, "kv_lora_rank": 512, "q_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_experts": 16, "sliding_window": 256, "attention_chunk_size": 256,
    "max_position_embeddings": 4096, "query_pre_attn_scalar": 128,
}  # fmt: skip

_NO_CONTEXT = {
    "llama4": "attention in chunks",
    "deepseek_v2": "latent attention: data groups share out its cache",
    "deepseek_v3": "latent attention: data groups share out its cache",
}


def refused(family: str, way: Way) -> str | None:
    """Why a family is not divided in this way; None: it is."""
    if way.expert_parallel and not any(key in golden_config(family) for key in _EXPERT_COUNTS):
        return "no experts"
    return _NO_CONTEXT.get(family) if way.name == "context" else None


def mesh_of(family: str, way: Way) -> str:
    stacks = read_config(golden_config(family)).stacks
    for mesh in way.meshes:
        if any(stack.periods % parse_mesh(mesh).pipeline == 0 for stack in stacks):
            return mesh
    raise ValueError(f"{family}: no mesh of {way.name} divides stacks of {[stack.periods for stack in stacks]} periods")


def step_of(family: str, way: Way) -> StepConfig:
    return StepConfig(
        name=f"{family} {way.name}", hf=larger_config(family), mesh=mesh_of(family, way),
        expert_parallel=way.expert_parallel, max_model_len=2048, max_num_seqs=8, num_tokens=256, kv_bytes=2 << 30,
    )  # fmt: skip


def golden_config(family: str) -> dict[str, Any]:
    return json.loads((GOLDENS / FAMILIES[family] / "config.json").read_text())


def larger_config(family: str) -> dict[str, Any]:
    """Of the keys that the golden's config has."""
    config = golden_config(family)
    heads = {"num_key_value_heads": 8} if "kv_lora_rank" in config else {}  # latent attention has no fewer
    return config | {key: value for key, value in {**_LARGER, **heads}.items() if config.get(key) is not None}
