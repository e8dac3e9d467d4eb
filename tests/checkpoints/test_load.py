"""Tensors onto devices: right values on any sharding, only the bytes needed, nothing missing and nothing left over."""

import math
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from checkpoints.errors import CheckpointError
from checkpoints.load import load_params
from checkpoints.tensors import ParamSource, Rows

L, D, N, H, F, V = 3, 8, 4, 6, 16, 10


class DictSource:
    """A checkpoint in memory that counts the elements it hands out."""

    location = "memory"

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.tensors, self.elements_read = tensors, 0

    def names(self):
        return self.tensors.keys()

    def shape(self, name):
        return self.tensors[name].shape

    def read(self, name, index=None):
        tensor = self.tensors[name] if index is None else self.tensors[name][index]
        self.elements_read += tensor.size
        return tensor

    def close(self):
        pass


def make_source() -> DictSource:
    rng = np.random.default_rng(0)
    shapes = {"embed": (V, D), "norm": (D,)}
    for layer in range(L):
        shapes |= {f"{layer}.q": (N * H, D), f"{layer}.o": (D, N * H), f"{layer}.up": (F, D), f"{layer}.b": (N * H,)}
    return DictSource({name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()})


def layers(name: str, transpose: bool = False) -> ParamSource:
    return ParamSource(names=tuple(f"{i}.{name}" for i in range(L)), stacked=True, transpose=transpose)


TARGETS = {
    ("embed",): ParamSource(names=("embed",), stacked=False),
    ("norm", "scale"): ParamSource(names=("norm",), stacked=False),
    ("layers", "q"): layers("q", transpose=True),
    ("layers", "o"): layers("o", transpose=True),
    ("layers", "up"): layers("up", transpose=True),
    ("layers", "b"): layers("b"),
}
SHAPES = {
    ("embed",): (V, D), ("norm", "scale"): (D,), ("layers", "q"): (L, D, N, H), ("layers", "o"): (L, N, H, D),
    ("layers", "up"): (L, D, F), ("layers", "b"): (L, N, H),
}  # fmt: skip


def expected(source: DictSource) -> dict[tuple[str, ...], np.ndarray]:
    """The same by plain means."""

    def stack(name: str) -> np.ndarray:
        return np.stack([source.tensors[f"{i}.{name}"] for i in range(L)])

    return {
        ("embed",): source.tensors["embed"],
        ("norm", "scale"): source.tensors["norm"],
        ("layers", "q"): stack("q").swapaxes(1, 2).reshape(L, D, N, H),
        ("layers", "o"): stack("o").swapaxes(1, 2).reshape(L, N, H, D),
        ("layers", "up"): stack("up").swapaxes(1, 2),
        ("layers", "b"): stack("b").reshape(L, N, H),
    }


def mesh(tensor: int, data: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: tensor * data]).reshape(tensor, data)
    return jax.sharding.Mesh(devices, ("tensor", "data"))


SPECS = {
    "replicated": {},
    "heads": {("layers", "q"): P(None, None, "tensor"), ("layers", "o"): P(None, "tensor"),
              ("layers", "up"): P(None, None, "tensor"), ("layers", "b"): P(None, "tensor"),
              ("embed",): P(None, "tensor")},
    "head size": {("layers", "q"): P(None, None, None, "data"), ("layers", "o"): P(None, None, "data"),
                  ("layers", "b"): P(None, None, "data")},
    "both": {("layers", "q"): P(None, "data", "tensor"), ("layers", "o"): P(None, "tensor", None, "data"),
             ("layers", "up"): P(None, "data", "tensor"), ("embed",): P("data", "tensor")},
    "layers": {("layers", "q"): P(None, ("tensor", "data")), ("norm", "scale"): P(("tensor", "data"))},
}  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_values_on_any_sharding(spec: str):
    source, grid = make_source(), mesh(4, 2)
    shardings = {path: jax.sharding.NamedSharding(grid, SPECS[spec].get(path, P())) for path in SHAPES}
    params = load_params(source, TARGETS, SHAPES, shardings, np.float32)
    for path, value in expected(source).items():
        assert params[path].sharding == shardings[path]
        np.testing.assert_array_equal(np.asarray(params[path]), value)


def test_layer_axis_can_be_sharded():
    source = make_source()
    targets, shapes = {("q",): layers("q", transpose=True)}, {("q",): (L, D, N, H)}
    source.tensors = {name: t for name, t in source.tensors.items() if name.endswith(".q")}
    grid = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("pipeline",))
    params = load_params(source, targets, shapes, {("q",): jax.sharding.NamedSharding(grid, P("pipeline"))}, np.float32)
    stacked = np.stack([t.T.reshape(D, N, H) for t in source.tensors.values()])
    np.testing.assert_array_equal(np.asarray(params["q",]), stacked)
    assert source.elements_read == stacked.size


@pytest.mark.parametrize("spec", ["replicated", "heads", "both"])
def test_every_element_is_read_once(spec: str):
    """Devices that share a shard share one read; different shards read different bytes."""
    source, grid = make_source(), mesh(4, 2)
    shardings = {path: jax.sharding.NamedSharding(grid, SPECS[spec].get(path, P())) for path in SHAPES}
    load_params(source, TARGETS, SHAPES, shardings, np.float32)
    assert source.elements_read == sum(math.prod(shape) for shape in SHAPES.values())


def fused_source() -> tuple[DictSource, dict, dict]:
    """Each layer's `q` and `up` stored as one tensor, `up` below `q`."""
    source, rows = make_source(), N * H + F
    source.tensors = {f"{i}.fused": np.concatenate([source.tensors[f"{i}.{name}"] for name in ("q", "up")])
                      for i in range(L)}  # fmt: skip
    bounds = {("layers", "q"): (0, N * H), ("layers", "up"): (N * H, rows)}
    names = tuple(f"{i}.fused" for i in range(L))
    targets = {path: ParamSource(names=names, stacked=True, transpose=True, rows=Rows(start=a, stop=b, total=rows))
               for path, (a, b) in bounds.items()}  # fmt: skip
    return source, targets, {path: SHAPES[path] for path in targets}


@pytest.mark.parametrize("spec", SPECS)
def test_parts_of_a_fused_tensor(spec: str):
    source, targets, shapes = fused_source()
    shardings = {path: jax.sharding.NamedSharding(mesh(4, 2), SPECS[spec].get(path, P())) for path in shapes}
    params = load_params(source, targets, shapes, shardings, np.float32)
    want = expected(make_source())
    for path in targets:
        np.testing.assert_array_equal(np.asarray(params[path]), want[path])
    if spec in ("replicated", "heads", "both"):  # as with a tensor of its own: each device's rows only
        assert source.elements_read == sum(math.prod(shape) for shape in shapes.values())


def test_a_fused_tensor_with_rows_for_nobody():
    source, targets, shapes = fused_source()
    source.tensors["1.fused"] = np.zeros((N * H + F + 1, D), np.float32)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(CheckpointError, match=r"1\.fused has shape \[41, 8\], the config asks for 40 rows"):
        load_params(source, targets, shapes, dict.fromkeys(shapes, one), np.float32)


def test_dtype_is_cast_on_the_host():
    source = make_source()
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = load_params(source, TARGETS, SHAPES, dict.fromkeys(SHAPES, one), ml_dtypes.bfloat16)
    for path, value in expected(source).items():
        assert params[path].dtype == jax.numpy.bfloat16
        np.testing.assert_array_equal(np.asarray(params[path]), value.astype(ml_dtypes.bfloat16))


def test_progress_goes_to_stderr(capsys):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    load_params(make_source(), TARGETS, SHAPES, dict.fromkeys(SHAPES, one), np.float32, progress=True)
    captured = capsys.readouterr()
    assert "Loading weights: 100%" in captured.err and captured.out == ""


def load(source: DictSource, ignore: tuple[str, ...] = (), **shapes: tuple[int, ...]) -> None:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    all_shapes = {**SHAPES, **{("layers", name): shape for name, shape in shapes.items()}}
    load_params(source, TARGETS, all_shapes, dict.fromkeys(SHAPES, one), np.float32, ignore=ignore)


def test_missing_tensors():
    source = make_source()
    for layer in range(L):
        del source.tensors[f"{layer}.up"], source.tensors[f"{layer}.b"]
    with pytest.raises(CheckpointError, match=r"^memory: missing tensors: 0.b, 0.up, 1.b, 1.up and 2 more; "):
        load(source)
    assert source.elements_read == 0


def test_left_over_tensors():
    source = make_source()
    source.tensors["lm_head.weight"] = source.tensors["embed"]
    source.tensors["0.rotary_emb.inv_freq"] = source.tensors["norm"]
    with pytest.raises(CheckpointError, match="left-over tensors: lm_head.weight; the model"):
        load(source)
    load(source, ignore=("lm_head.weight",))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q", (L, D, N, H + 1), "0.q has shape [24, 8], the config asks for [8, 4, 7] (transposed)"),
        ("up", (L, D + 1, F), "0.up has shape [16, 8], the config asks for [9, 16] (transposed)"),
        ("up", (L, F, D), "0.up has shape [16, 8], the config asks for [16, 8] (transposed)"),
        ("b", (L, N * H, 1, 2), "0.b has shape [24], the config asks for [24, 1, 2]"),
        ("b", (L + 1, N, H), "3 layers for a stack of 4"),
    ],
)
def test_wrong_shapes(name: str, shape: tuple[int, ...], message: str):
    source = make_source()
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(source, **{name: shape})
    assert source.elements_read == 0
