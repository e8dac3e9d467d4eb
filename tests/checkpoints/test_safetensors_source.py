"""Safetensors: against the library's own reader, and whatever a broken download looks like."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.errors import CheckpointError
from checkpoints.open import open_checkpoint
from checkpoints.safetensors_source import INDEX, SafetensorsSource

GOLDENS = Path(__file__).parents[1] / "goldens"


def test_one_file():
    source = SafetensorsSource(GOLDENS / "llama-gqa-tied")
    expected = load_file(GOLDENS / "llama-gqa-tied" / "model.safetensors")
    assert set(source.names()) == set(expected)
    for name, tensor in expected.items():
        assert source.shape(name) == tensor.shape
        np.testing.assert_array_equal(source.read(name), tensor)
        index = tuple(slice(n // 3, n - 1) for n in tensor.shape)
        np.testing.assert_array_equal(source.read(name, index), tensor[index])
    source.close()


def test_many_files():
    folder = GOLDENS / "llama-sharded"
    source = SafetensorsSource(folder)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    assert len(set(weight_map.values())) == 2
    assert set(source.names()) == set(weight_map)
    for name, file in weight_map.items():
        np.testing.assert_array_equal(source.read(name), load_file(folder / file)[name])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.float64])
def test_dtypes(tmp_path, dtype):
    values = np.arange(-8, 8).reshape(4, 4).astype(dtype)
    save_file({"x": values, "empty": np.zeros((0, 3), np.float32)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.read("x").dtype == dtype
    np.testing.assert_array_equal(source.read("x"), values)
    assert source.read("empty").shape == (0, 3)


def test_only_the_model_file_counts_beside_others(tmp_path):
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    save_file({"x": np.ones(2, np.float32)}, tmp_path / "consolidated.safetensors")
    assert SafetensorsSource(tmp_path).read("x").tolist() == [0, 0]


def broken(tmp_path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsSource(tmp_path).read("x")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_broken_files(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"x": np.arange(6, dtype=np.float32).reshape(2, 3)}, file)
    whole = file.read_bytes()

    def damaged(content: bytes, message: str) -> None:
        file.write_bytes(content)
        broken(tmp_path, message)

    damaged(b"", "cannot be read")
    damaged(whole[:5], "not a safetensors file, or cut short")
    damaged(whole[:20], "not a safetensors file, or cut short")
    damaged(whole[:-4], "cut short: x ends at byte .* download it again")
    damaged(b"\xff" * 100, "not a safetensors file")
    damaged(whole[:8] + b"?" + whole[9:], "its header is no JSON")
    damaged(whole.replace(b"[2,3]", b"[2,9]"), "entry x is damaged .24 bytes do not make F32 .2, 9")
    damaged(whole.replace(b'"F32"', b'"Q99"'), "x has dtype Q99, which is not supported .supported: F64, F32")
    damaged(whole.replace(b'"dtype"', b'"dtypo"'), "entry x is damaged")


def test_broken_sets(tmp_path):
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "a.safetensors")
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "b.safetensors")
    broken(tmp_path, "x is also in .*a.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"x": "a.safetensors", "y": "c.safetensors"}}')
    broken(tmp_path, "names files that are not there: c.safetensors")
    (tmp_path / INDEX).write_text("[]")
    broken(tmp_path, "not a safetensors index")


def test_opening_paths(tmp_path):
    def refused(path: Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            open_checkpoint(path)
        assert str(path) in str(caught.value)

    checkpoint = open_checkpoint(str(GOLDENS / "llama-gqa-tied"))
    assert (checkpoint.kind, checkpoint.config["model_type"]) == ("hf", "llama")
    checkpoint.close()
    refused(tmp_path / "nothing", "no such file or folder")
    refused(tmp_path, "no config.json in this folder; a model folder has")
    (tmp_path / "m.gguf").write_bytes(b"")
    refused(tmp_path, r"pass the file itself, .*m\.gguf")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "cannot be read as JSON")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "has no model_type")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refused(tmp_path, "no weights")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, "only PyTorch .bin files; save the model as safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"")
    refused(tmp_path / "model.safetensors", "pass the folder")
    (tmp_path / "params").mkdir()
    assert open_checkpoint(tmp_path).kind == "orbax"
