"""Llamas of any size."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.e2e.tiny_model import CONFIG


def write_llama(folder: Path, fill: Callable[[tuple[int, ...]], np.ndarray], **config: int) -> Path:
    """A Hugging Face folder without a tokenizer, its tensors filled by shape. `config` replaces entries of CONFIG."""
    hf = {**CONFIG, **config}
    D, F, H = hf["hidden_size"], hf["intermediate_size"], hf["head_dim"]
    N, K = hf["num_attention_heads"], hf["num_key_value_heads"]
    shapes = {"model.embed_tokens": (hf["vocab_size"], D), "model.norm": (D,)}
    for layer in range(hf["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in {
            "input_layernorm": (D,), "post_attention_layernorm": (D,), "self_attn.q_proj": (N * H, D),
            "self_attn.k_proj": (K * H, D), "self_attn.v_proj": (K * H, D), "self_attn.o_proj": (D, N * H),
            "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
        }.items()}  # fmt: skip
    folder.mkdir()
    save_file({f"{name}.weight": fill(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf))
    return folder
