"""`scripts.convert`: what it writes is the same model, on any mesh."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from scripts.convert import main
from serving.config import EngineConfig
from serving.loading import load_model
from serving.tokenizer.load import load_tokenizer

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


def test_errors_are_one_line(source: Path, tmp_path, capsys):
    assert main([str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert main([str(source), str(source)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") for line in lines)
    assert "no such file" in lines[0] and "not an empty folder" in lines[1]
    assert not (tmp_path / "out").exists()
