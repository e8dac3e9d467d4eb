"""A GGUF file as a `TensorSource` under Hugging Face names."""

import re
from collections.abc import Collection
from pathlib import Path

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.gguf_config import ROPE_FACTORS, check_architecture, read_count
from quant.gguf import decode
from quant.gguf_file import GGUFFile, TensorInfo

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Tables a GGUF carries for other readers; what they say is in the config (see `gguf_config`).
NOT_WEIGHTS = {ROPE_FACTORS}


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. An unknown name stays as it is: the loader
    reports it as left over."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in NAMES:
        return name
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{NAMES[match[2]]}.{match[3]}"


class GGUFSource:
    """Quantized blocks come decoded as float32, so that values equal those of the Hugging Face tensors."""

    def __init__(self, path: Path):
        self.location = str(path)
        try:
            self.file = GGUFFile(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}; pass a whole .gguf file") from error
        self.metadata = self.file.metadata
        architecture = check_architecture(self.metadata, self.location)
        self._tensors = {hf_name(n): info for n, info in self.file.tensors.items() if n not in NOT_WEIGHTS}
        # Llama files store the rows of q and k so that RoPE rotates neighbours; Hugging Face rotates halves.
        self._heads: dict[str, int] = {}
        if architecture == "llama":
            heads = read_count(self.metadata, "llama.attention.head_count", self.location)
            kv_heads = read_count(self.metadata, "llama.attention.head_count_kv", self.location, heads)
            self._heads = {"q_proj": heads, "k_proj": kv_heads}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        info = self._tensors[name]
        index = index or (slice(None),) * len(info.shape)
        heads = self._interleaved_heads(name)
        try:
            return _read(self.file, info, index, heads)
        except ValueError as error:
            raise CheckpointError(f"{self.location}: {info.name}: {error}; use another quantization") from error

    def close(self) -> None:
        self._tensors = {}
        self.file.close()

    def _interleaved_heads(self, name: str) -> int | None:
        parts = name.split(".")
        return self._heads.get(parts[-2]) if len(parts) > 2 else None


def _read(file: GGUFFile, info: TensorInfo, index: tuple[slice, ...], heads: int | None) -> np.ndarray:
    """Decodes only the rows asked for. Columns are cut after decoding: they share blocks."""
    packed = file.rows(info.name)
    if len(info.shape) == 1:
        values = decode(packed, info.type_id)
        return (values if heads is None else values[_halves_order(info.shape[0], heads)])[index]
    if heads is None:
        packed = packed[index[:-1]]
    else:
        packed = packed[_halves_order(info.shape[0], heads)[index[0]]]
    return decode(packed, info.type_id)[..., index[-1]]


def _halves_order(rows: int, heads: int) -> np.ndarray:
    """For each row of the Hugging Face matrix, its row in the file: (head, half, i) is stored as (head, i, half)."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
