"""`scripts.convert`: what it writes is the same model, on any mesh."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scripts.convert import main
from serving.config import EngineConfig
from serving.decoding.speculation.config import SpeculativeConfig
from serving.drafters.loading import Surroundings
from serving.drafters.mtp import load_mtp
from serving.errors import ConfigError
from serving.loading import load_model
from serving.tokenizer.load import load_tokenizer
from tests.model.speculators import write_with_mtp

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A tiny model with a tokenizer."""
    folder = tmp_path_factory.mktemp("source") / "model"
    shutil.copytree(GOLDENS / "qwen3-qk-norm", folder)
    shutil.copy(GOLDENS / "tokenizer" / "bpe.model", folder / "tokenizer.model")
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_converted_model_is_the_same(source: Path, tmp_path, dtype: str):
    out = tmp_path / "out"
    assert main([str(source), str(out), "--dtype", dtype]) == 0
    original = load_model(EngineConfig(model=str(source), dtype=dtype))  # pyright: ignore[reportArgumentType]
    again = load_model(EngineConfig(model=str(out), dtype=dtype, mesh="4x2"))  # pyright: ignore[reportArgumentType]
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert again.model.config == original.model.config
    stored = again.stored_params
    assert set(stored) == set(original.params)
    for path, value in original.params.items():
        np.testing.assert_array_equal(np.asarray(stored[path]), np.asarray(value))
        assert len(again.params[path].sharding.device_set) == 8
    tokenizer, expected = load_tokenizer(out), load_tokenizer(source)
    assert tokenizer.encode("the lamp ü") == expected.encode("the lamp ü")
    assert (tokenizer.eos_ids, tokenizer.bos_id) == (expected.eos_ids, expected.bos_id)


def test_default_dtype_keeps_every_value(source: Path, tmp_path):
    assert main([str(source), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_the_layer_for_multi_token_prediction_is_kept(tmp_path):
    folder, out = write_with_mtp(tmp_path / "v3"), tmp_path / "out"
    shutil.copy(GOLDENS / "tokenizer" / "bpe.model", folder / "tokenizer.model")
    assert main([str(folder), str(out)]) == 0
    config = SpeculativeConfig(method="mtp", num_speculative_tokens=1)

    def layer(path: Path) -> dict:
        target = load_model(EngineConfig(model=str(path), dtype="float32")).model
        around = Surroundings(target=target, dtype=jnp.dtype("float32"), page_size=8, max_num_seqs=1, path=str(path),
                              max_model_len=None, attention_backend="xla", progress=False)  # fmt: skip
        return dict(nnx.to_flat_state(nnx.state(load_mtp(config, around), nnx.Param)))

    original, again = layer(folder), layer(out)
    assert set(again) == set(original)
    for path, value in original.items():
        np.testing.assert_array_equal(np.asarray(again[path][...]), np.asarray(value[...]))
    shutil.rmtree(out / "mtp")
    with pytest.raises(ConfigError, match="out has none"):
        layer(out)


def test_errors_are_one_line(source: Path, tmp_path, capsys):
    assert main([str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert main([str(source), str(source)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") for line in lines)
    assert "no such file" in lines[0] and "not an empty folder" in lines[1]
    assert not (tmp_path / "out").exists()
