"""The models whose shapes are compiled: attention of one device each, and whole configurations for the serving step."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Heads of one device. layers: of the whole model. window, chunk: tokens; soft_cap, sinks: as in the contract."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: int
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    kv_dtype: str = "bfloat16"


# Numbers from each model's config.json on the Hugging Face hub; "/8" is its share of one device of eight.
ATTENTION = {
    shape.name: shape
    for shape in (
        AttentionShape(name="smollm2-135m", num_heads=9, num_kv_heads=3, head_dim=64, layers=30),
        AttentionShape(name="llama3-8b", num_heads=32, num_kv_heads=8, head_dim=128, layers=32),
        AttentionShape(name="llama3-8b int8", num_heads=32, num_kv_heads=8, head_dim=128, layers=32, kv_dtype="int8"),
        AttentionShape(name="llama3-8b fp8", num_heads=32, num_kv_heads=8, head_dim=128, layers=32,
                       kv_dtype="float8_e4m3fn"),
        AttentionShape(name="llama3-70b/8", num_heads=8, num_kv_heads=1, head_dim=128, layers=80),
        AttentionShape(name="qwen3-32b/8", num_heads=8, num_kv_heads=1, head_dim=128, layers=64),
        AttentionShape(name="gemma3-27b/8", num_heads=4, num_kv_heads=2, head_dim=128, layers=62, window=1024),
        AttentionShape(name="gemma2-9b", num_heads=16, num_kv_heads=8, head_dim=256, layers=42, window=4096,
                       soft_cap=50.0),
        AttentionShape(name="gpt-oss-20b", num_heads=64, num_kv_heads=8, head_dim=64, layers=24, window=128,
                       sinks=True),
        AttentionShape(name="llama4-scout/8", num_heads=5, num_kv_heads=1, head_dim=128, layers=48, chunk=8192),
    )
}


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    name: str
    num_heads: int
    latent_dim: int = 512
    rope_dim: int = 64


# DeepSeek-V3: 128 heads share one latent of 512 and one rotary key of 64 a token; whole, and with the heads over 8.
LATENT = {
    shape.name: shape
    for shape in (LatentShape(name="deepseek-v3", num_heads=128), LatentShape(name="deepseek-v3/8", num_heads=16))
}


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """One product of a mixture of experts, of one device. top: experts a token."""

    name: str
    experts: int
    top: int
    d: int
    f: int
    weight_dtype: str = "bfloat16"


EXPERTS = {
    shape.name: shape
    for shape in (
        ExpertsShape(name="mixtral-8x7b up", experts=8, top=2, d=4096, f=14336),
        ExpertsShape(name="mixtral-8x7b/8 up", experts=8, top=2, d=4096, f=1792),
        ExpertsShape(name="mixtral-8x7b/8 down", experts=8, top=2, d=1792, f=4096),
        ExpertsShape(name="mixtral-8x7b/8 up int8", experts=8, top=2, d=4096, f=1792, weight_dtype="int8"),
        ExpertsShape(name="deepseek-v3/8 up", experts=32, top=8, d=7168, f=2048),
    )
}


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """A whole model for the serving step: its config.json, how it is divided, and the step's sizes.

    max_model_len in tokens; kv_bytes: KV cache of a device, large, so that a copy of one layer of it would show.
    speculation: as in --speculative-config, of an EAGLE-3 head, whose config.json is `head`.
    """

    name: str
    hf: dict[str, Any]
    mesh: str
    expert_parallel: bool = False
    max_model_len: int
    max_num_seqs: int
    num_tokens: int
    kv_bytes: int
    speculation: dict[str, Any] | None = None
    head: dict[str, Any] | None = None


_LLAMA3_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000, "tie_word_embeddings": False,
}

_SMOLLM2 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000, "tie_word_embeddings": True,
}
_SMOLLM2_STEP: dict[str, Any] = dict(hf=_SMOLLM2, max_model_len=8192, kv_bytes=4 << 30)
_EAGLE3 = {"method": "eagle3", "model": "head"}
_SMOLLM2_HEAD: dict[str, Any] = dict(
    head={**_SMOLLM2, "num_hidden_layers": 1, "draft_vocab_size": 16384}, num_tokens=256, mesh="1x1"
)

STEPS = {
    step.name: step
    for step in (
        StepConfig(name="smollm2-135m", mesh="1x1", max_num_seqs=64, num_tokens=512, **_SMOLLM2_STEP),
        StepConfig(
            name="smollm2-135m eagle3 chain", max_num_seqs=16, **_SMOLLM2_STEP, **_SMOLLM2_HEAD,
            speculation={**_EAGLE3, "num_speculative_tokens": 3},
        ),
        StepConfig(
            name="smollm2-135m eagle3 tree", max_num_seqs=4, **_SMOLLM2_STEP, **_SMOLLM2_HEAD,
            speculation={**_EAGLE3, "num_speculative_tokens": 31, "eagle_topk": 4, "eagle_num_steps": 4},
        ),
        StepConfig(
            name="llama3-8b/8", mesh="8x1", max_model_len=8192, max_num_seqs=64, num_tokens=1024, kv_bytes=8 << 30,
            hf=_LLAMA3_8B,
        ),
        # Half of each matrix on a device: of 8 layers, so that a layer of the cache is more than copies of a layer's
        # weights, which XLA makes on GPUs.
        StepConfig(
            name="llama3-8b 8 layers/8 long", mesh="tensor=2,context=4", max_model_len=131072, max_num_seqs=64,
            num_tokens=2048, kv_bytes=4 << 30,
            hf={**_LLAMA3_8B, "max_position_embeddings": 131072, "num_hidden_layers": 8},
        ),
        StepConfig(
            name="qwen3-30b-a3b/8", mesh="8x1", max_model_len=8192, max_num_seqs=64, num_tokens=1024, kv_bytes=8 << 30,
            hf={
                "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
                "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
                "num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
                "rope_theta": 1000000, "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8,
                "moe_intermediate_size": 768, "norm_topk_prob": True,
            },
        ),
        # Of its 61 layers two dense and three with experts: whole it takes more than eight chips.
        StepConfig(
            name="deepseek-v3 5 layers/8", mesh="8x1", max_model_len=8192, max_num_seqs=64, num_tokens=1024,
            kv_bytes=4 << 30,
            hf={
                "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
                "intermediate_size": 18432, "num_hidden_layers": 5, "num_attention_heads": 128, "vocab_size": 129280,
                "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000, "kv_lora_rank": 512,
                "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
                "first_k_dense_replace": 2, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
                "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
                "tie_word_embeddings": False,
            },
        ),
    )
}
