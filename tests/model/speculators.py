"""Checkpoints of drafters for the tests, made from goldens."""

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file

from tests.model.harness import GOLDENS


def write_with_mtp(folder: Path) -> Path:
    """The tiny DeepSeek-V3 with its layer for multi-token prediction, and the copies that published ones have."""
    config = json.loads((GOLDENS / "deepseek-v3" / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    tensors = load_file(GOLDENS / "deepseek-v3" / "model.safetensors")
    tensors |= load_file(GOLDENS / "deepseek-v3-mtp" / "mtp.safetensors")
    prefix = f"model.layers.{config['num_hidden_layers']}."
    tensors |= {prefix + "embed_tokens.weight": tensors["model.embed_tokens.weight"],
                prefix + "shared_head.head.weight": tensors["lm_head.weight"]}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
