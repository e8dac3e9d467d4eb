"""The native folder: written on one mesh, restored on another."""

import json

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

from checkpoints.errors import CheckpointError
from checkpoints.open import open_checkpoint
from checkpoints.orbax_folder import restore_params, save_folder

Q, NORM = ("layers", "attention", "q"), ("norm",)
VALUES = {Q: np.arange(16 * 8 * 4, dtype=np.float32).reshape(16, 8, 4), NORM: np.linspace(-1, 1, 8, dtype=np.float32)}
SHAPES = {path: value.shape for path, value in VALUES.items()}
CONFIG = {"model_type": "llama", "hidden_size": 8}


def shardings(tensor: int, data: int, **specs: P) -> dict:
    devices = np.array(jax.devices()[: tensor * data]).reshape(tensor, data)
    grid = jax.sharding.Mesh(devices, ("tensor", "data"))
    return {path: jax.sharding.NamedSharding(grid, specs.get(path[-1], P())) for path in SHAPES}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orbax") / "model"
    where = shardings(8, 1, q=P(None, "tensor"))
    params = {path: jax.device_put(value, where[path]) for path, value in VALUES.items()}
    save_folder(folder, params, CONFIG, {"tokenizer.json": b"{}", "tokenizer_config.json": b"[]"})
    return folder


@pytest.mark.parametrize("grid", [(8, 1), (4, 2), (1, 8), (1, 1)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_restores_onto_any_mesh(saved, grid: tuple[int, int], dtype):
    where = shardings(*grid, q=P("data", "tensor"), norm=P("tensor"))
    params = restore_params(saved, SHAPES, where, dtype)
    assert set(params) == set(VALUES)
    for path, value in VALUES.items():
        assert params[path].sharding == where[path]
        np.testing.assert_array_equal(np.asarray(params[path]), value.astype(dtype))


def test_folder_is_a_model(saved):
    checkpoint = open_checkpoint(saved)
    assert (checkpoint.kind, checkpoint.config, checkpoint.source) == ("orbax", CONFIG, None)
    assert (saved / "tokenizer.json").read_bytes() == b"{}"
    assert json.loads((saved / "config.json").read_text()) == CONFIG


def test_existing_folders_are_left_alone(saved):
    with pytest.raises(CheckpointError, match="is not an empty folder"):
        save_folder(saved, {}, CONFIG, {})
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_folder(saved / "config.json" / "x", {}, CONFIG, {})


def test_mismatches(saved):
    where = shardings(1, 1)
    with pytest.raises(CheckpointError, match="left-over parameters: norm"):
        restore_params(saved, {Q: SHAPES[Q]}, where, np.float32)
    with pytest.raises(CheckpointError, match="missing parameters: head"):
        restore_params(saved, {**SHAPES, ("head",): (2,)}, where, np.float32)
    message = r"layers.attention.q has shape \[16, 8, 4\], the config asks for \[16, 8, 5\]"
    with pytest.raises(CheckpointError, match=message):
        restore_params(saved, {**SHAPES, Q: (16, 8, 5)}, where, np.float32)


def test_damaged_folders(saved, tmp_path):
    where = shardings(1, 1)
    (tmp_path / "params").mkdir()
    with pytest.raises(CheckpointError, match="not a whole Orbax checkpoint"):
        restore_params(tmp_path, SHAPES, where, np.float32)
    # One parameter: Orbax leaves the reads of the others behind when one fails.
    save_folder(tmp_path / "one", {NORM: jax.device_put(VALUES[NORM], where[NORM])}, CONFIG, {})
    for file in (tmp_path / "one" / "params").rglob("d/*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="not a whole Orbax checkpoint"):
        restore_params(tmp_path / "one", {NORM: SHAPES[NORM]}, where, np.float32)


def test_failing_reads(saved, monkeypatch):
    def fail(self, directory, target):
        raise ValueError("checksum does not match")

    monkeypatch.setattr(ocp.StandardCheckpointer, "restore", fail)
    with pytest.raises(CheckpointError, match=r"cannot be restored \(checksum does not match\)"):
        restore_params(saved, SHAPES, shardings(1, 1), np.float32)
