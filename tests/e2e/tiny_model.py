"""A random model of 1.6M parameters with the default model's tokenizer: starts and steps fast, for tests that look at
processes and protocols rather than at text."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCAB, DIM, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 49152, 32, 64, 4, 2, 8, 2

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": DIM,
    "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "float32",
}  # fmt: skip


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    named = {"model.embed_tokens.weight": weight(VOCAB, DIM), "model.norm.weight": np.ones(DIM, np.float32)}
    for layer in range(LAYERS):
        named |= {f"model.layers.{layer}.{name}.weight": value for name, value in {
            "input_layernorm": np.ones(DIM, np.float32), "post_attention_layernorm": np.ones(DIM, np.float32),
            "self_attn.q_proj": weight(HEADS * HEAD_DIM, DIM), "self_attn.k_proj": weight(KV_HEADS * HEAD_DIM, DIM),
            "self_attn.v_proj": weight(KV_HEADS * HEAD_DIM, DIM), "self_attn.o_proj": weight(DIM, HEADS * HEAD_DIM),
            "mlp.gate_proj": weight(FFN, DIM), "mlp.up_proj": weight(FFN, DIM), "mlp.down_proj": weight(DIM, FFN),
        }.items()}  # fmt: skip
    return named


def write_tiny_model(folder: Path, weights: dict[str, np.ndarray] | None = None, **config: object) -> Path:
    """A Hugging Face folder without a tokenizer. `config` replaces entries of CONFIG, `weights` all tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(tensors() if weights is None else weights, folder / "model.safetensors")
    return folder
