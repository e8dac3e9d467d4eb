import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """Writes a golden's Hugging Face model as llama.cpp's converter would: its tensor names come from the `gguf`
    package, and q and k rows of Llama are interleaved."""

    def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
        return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

    def write(path: Path, golden: str, *, architecture: str = "llama",
              extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> Path:  # fmt: skip
        folder = GOLDENS / golden
        config = json.loads((folder / "config.json").read_text())
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(heads)
        writer.add_head_count_kv(kv_heads)
        if "head_dim" in config:
            writer.add_key_length(config["head_dim"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        extra(writer)
        arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
        for name, tensor in load_file(folder / "model.safetensors").items():
            if architecture == "llama" and ".q_proj." in name:
                tensor = interleave(tensor, heads)
            if architecture == "llama" and ".k_proj." in name:
                tensor = interleave(tensor, kv_heads)
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert target is not None, name
            writer.add_tensor(target, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
