"""The folder that `--speculative-config` names: config.json, model.safetensors, and how they were made."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.safetensors_source import DTYPES

LARGEST_CHANGE = 0.05


def stored_dtype(tensor: np.ndarray, float8: bool) -> np.dtype:
    """Of a tensor in the file: bfloat16, or 8 bits where they do; integers as they are."""
    if tensor.dtype != np.float32:
        return tensor.dtype
    narrow = np.dtype(ml_dtypes.float8_e4m3fn)
    if float8 and tensor.ndim > 1:
        change = tensor - tensor.astype(narrow).astype(np.float32)
        if np.sum(np.square(change)) < LARGEST_CHANGE**2 * np.sum(np.square(tensor)):
            return narrow
    return np.dtype(ml_dtypes.bfloat16)


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray],
                 training: Mapping[str, Any]) -> None:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    for name, values in (("config.json", config), ("training.json", training)):
        (folder / name).write_text(json.dumps(values, indent=1) + "\n")


def write_safetensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """The format is an 8-byte length, a JSON header and the bytes: https://github.com/huggingface/safetensors"""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [at, at + tensor.nbytes]}  # fmt: skip
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = file.with_suffix(".part")
    with part.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            out.write(np.ascontiguousarray(tensor).tobytes())
    part.replace(file)
