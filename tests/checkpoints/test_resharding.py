"""A checkpoint goes from mesh to mesh and stays the same, bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from checkpoints.orbax_folder import save_folder
from serving.config import EngineConfig
from serving.loading import LoadedModel, load_model
from tests.checkpoints.llama import write_llama

GOLDENS = Path(__file__).parents[1] / "goldens"


def few_kv_heads(folder: Path) -> Path:
    """Eight query and two kv heads: four devices hold copies of each."""
    rng = np.random.default_rng(0)
    return write_llama(folder, lambda shape: rng.standard_normal(shape).astype(np.float32), vocab_size=64,
                       hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=8,
                       num_key_value_heads=2, head_dim=8)  # fmt: skip


def load(folder: Path, mesh: str) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), mesh=mesh, dtype="float32"))


@pytest.mark.parametrize("name", ["few kv heads", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_8x1_to_2x4_to_1x1(name: str, tmp_path: Path):
    source = few_kv_heads(tmp_path / "hf") if name == "few kv heads" else GOLDENS / name
    want = load(source, "1x1")
    folder = source
    for mesh in ("8x1", "2x4"):
        loaded = load(folder, mesh)
        assert loaded.num_parameters == want.num_parameters
        folder = tmp_path / mesh
        save_folder(folder, loaded.stored_params, loaded.hf_config, {})
    got = load(folder, "1x1").params
    assert got.keys() == want.params.keys()
    for path, value in want.params.items():
        assert np.asarray(got[path]).tobytes() == np.asarray(value).tobytes(), path
