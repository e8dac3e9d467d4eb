"""The heads in speculators/ load for the default model's shapes, are small, and say what they reach."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from model.families.registry import read_config
from serving.decoding.speculation.config import SpeculativeConfig
from serving.drafters.loading import Surroundings
from serving.drafters.make import load_drafter
from tests.model import harness

FOLDER = Path(__file__).parents[2] / "speculators"
SMOLLM2 = {"model_type": "llama", "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536,
           "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
           "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True}


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_committed_heads(method: str):
    folder = FOLDER / f"smollm2-{method}"
    dtype = jnp.dtype("bfloat16")
    around = Surroundings(target=harness.shapes_of(read_config(SMOLLM2), dtype=dtype), dtype=dtype, page_size=16,
                          max_num_seqs=2, max_model_len=512, attention_backend="xla", progress=False)  # fmt: skip
    config = SpeculativeConfig.of({"method": method, "model": str(folder), "num_speculative_tokens": 3})
    assert load_drafter(config, around).max_drafts >= 3
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8_000_000
    told = json.loads((folder / "training.json").read_text())["held_out"]
    assert all(one["length"] > 1.1 and one["positions"] > 1000 for one in told.values())
