"""Ring attention: layouts and their balance, both backends against the reference, on 2, 4 and 8 simulated devices."""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from pallas_kernels import interpret
from pallas_kernels.ring_attention import api, config, layout, mosaic_tpu, reference
from tests.tolerances import ATTENTION

LAYERS, LAYER = 2, 1
AXIS = "context"
LAYOUTS = ("zigzag", "striped", "contiguous")


@dataclass(frozen=True, kw_only=True)
class Case:
    """(cached, new) tokens of each row."""

    rows: tuple[tuple[int, int], ...]
    layout: api.Layout = "zigzag"
    devices: int = 4
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    page_size: int = 8
    packed: bool = False
    window: int | None = None
    spare_tokens: int = 0  # padding at the end of every device's tokens, more than the layout needs
    seed: int = 0
    blocks: tuple[int, int, int] = (8, 16, 32)
    options: dict = field(default_factory=dict)

    @property
    def config(self) -> api.RingConfig:
        return api.RingConfig(**dict(zip(("query_tokens", "kv_tokens", "round_tokens"), self.blocks, strict=True)))


@dataclass(frozen=True)
class Inputs:
    """Every array has the device axis first."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    kv_pages: np.ndarray
    slot_positions: np.ndarray
    page_table: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray
    positions: np.ndarray


def make(case: Case, dtype=jnp.float32) -> tuple[Inputs, layout.RingBatch]:
    """Random tokens and cache. What nobody may read is NaN, positions of slots that hold nothing are anything."""
    rng = np.random.default_rng(case.seed)
    (n, k), h, b, d = case.heads, case.head_dim, case.page_size, case.devices
    plain = layout.lay_out([(cached, new) for cached, new in case.rows], case.layout, d)
    num_tokens = plain.positions.shape[1] + case.spare_tokens
    batch = layout.lay_out([(cached, new) for cached, new in case.rows], case.layout, d, num_tokens)
    # An earlier step brought the first two thirds of the cached tokens, another one the rest.
    parts = [((0, cached * 2 // 3), (cached * 2 // 3, cached - cached * 2 // 3)) for cached, _ in case.rows]
    chunks = [layout.lay_out([row[i] for row in parts], case.layout, d) for i in (0, 1)]
    cached = sum(np.diff(chunk.cu_q_lens) for chunk in chunks) + np.zeros((d, len(case.rows)), int)
    kv_lens = (cached + np.diff(batch.cu_q_lens)).astype(np.int32)
    pages_of = -(-kv_lens // b)
    num_pages = int(pages_of.sum(1).max()) + 3
    table = np.zeros((d, len(case.rows), max(int(pages_of.max(initial=0)), 1)), np.int32)
    kv_pages = np.full((d, LAYERS, num_pages, *((1, k, b, 2 * h) if case.packed else (2, k, b, h))), np.nan, np.float32)
    slots = rng.integers(0, 1000, (d, num_pages, b)).astype(np.int32)
    for device in range(d):
        free = list(rng.permutation(np.arange(1, num_pages)))
        for row, count in enumerate(pages_of[device]):
            table[device, row, :count] = [free.pop() for _ in range(count)]
            held = np.concatenate([
                chunk.positions[device, chunk.cu_q_lens[device, row] : chunk.cu_q_lens[device, row + 1]]
                for chunk in chunks])  # fmt: skip
            for index, position in enumerate(held):
                page, offset = table[device, row, index // b], index % b
                kv_pages[device, :, page, :, :, offset] = rng.standard_normal((LAYERS, *kv_pages.shape[3:5], kv_pages.shape[-1]))
                slots[device, page, offset] = position
    q, key, value = (rng.standard_normal((d, num_tokens, heads, h), np.float32) for heads in (n, k, k))
    cast = partial(np.asarray, dtype=dtype)
    return Inputs(cast(q), cast(key), cast(value), cast(kv_pages), slots, table, kv_lens, batch.cu_q_lens,
                  batch.positions), batch  # fmt: skip


def local_step(*arrays, case: Case, backend: str, count_blocks: bool):
    inputs = Inputs(*(a[0] for a in arrays))
    where = (inputs.page_table, inputs.kv_lens, inputs.cu_q_lens, inputs.positions)
    slots = api.write_positions(inputs.slot_positions, *where)
    plan = api.ring_plan(slots, *where, axis_name=AXIS, config=case.config, window=case.window)
    args = (inputs.q, inputs.k, inputs.v, inputs.kv_pages, jnp.int32(LAYER), plan)
    options = dict(scale=case.head_dim**-0.5, **case.options)
    if count_blocks:
        out, kv_pages, visited = mosaic_tpu.ring_attention(*args, **options, interpret=True)
        return out[None], kv_pages[None], visited[None], plan.count[None], plan.num_rounds[None]
    out, kv_pages = api.ring_attention(*args, **options, backend=backend, interpret=backend != "xla")
    return out[None], kv_pages[None]


def compiled(case: Case, backend: str, count_blocks: bool = False):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: case.devices]), (AXIS,))
    step = partial(local_step, case=case, backend=backend, count_blocks=count_blocks)
    sharded = jax.jit(jax.shard_map(
        step, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(AXIS), check_vma=False))  # fmt: skip
    return lambda inputs: jax.device_get(sharded(*vars(inputs).values()))


def as_float32(inputs: Inputs) -> Inputs:
    return Inputs(*(a.astype(np.float32) if a.dtype == jnp.bfloat16 else a for a in vars(inputs).values()))


def check(case: Case, backend: str, dtype: str = "float32", twice: bool = True) -> None:
    inputs, batch = make(case, jnp.dtype(dtype))
    run = compiled(case, backend)
    out, kv_pages = run(inputs)
    exact = as_float32(inputs)
    want, want_pages = reference.ring_attention(
        exact.q, exact.k, exact.v, exact.kv_pages, LAYER, exact.slot_positions, exact.page_table, exact.kv_lens,
        exact.cu_q_lens, exact.positions, scale=case.head_dim**-0.5, window=case.window, **case.options)  # fmt: skip
    np.testing.assert_allclose(out.astype(np.float32), want, atol=ATTENTION[dtype], rtol=0)
    # Written slots hold the new tokens, every other byte is as it was.
    np.testing.assert_array_equal(kv_pages.astype(np.float32), want_pages)
    if backend == "mosaic_tpu":
        assert not interpret.races_found()
    if twice:
        np.testing.assert_array_equal(run(inputs)[0], out)


# Layouts


def test_layouts_by_hand():
    np.testing.assert_array_equal(layout.device_tokens("zigzag", 2, 8), [[0, 1, 6, 7], [2, 3, 4, 5]])
    np.testing.assert_array_equal(layout.device_tokens("striped", 2, 5), [[0, 2, 4], [1, 3, -1]])
    np.testing.assert_array_equal(layout.device_tokens("contiguous", 2, 5), [[0, 1, -1], [2, 3, 4]])
    np.testing.assert_array_equal(layout.owners("striped", 2, 3, first=5), [1, 0, 1])  # from the sequence's start


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 61, 128])
def test_inverse_restores_the_order(name, devices, length):
    tokens = layout.device_tokens(name, devices, length)
    held = np.where(tokens == layout.PADDING, -100, tokens * 3).reshape(-1)
    np.testing.assert_array_equal(held[layout.inverse(tokens)], np.arange(length) * 3)
    counts = (tokens != layout.PADDING).sum(1)
    assert counts.max() - counts.min() <= 2
    for row in tokens:
        assert (np.diff(row[row != layout.PADDING]) > 0).all()


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("held", [2, 4, 10])
def test_balance_of_the_causal_work(devices, held):
    """Pairs that each device needs in each step, against a mask of the whole sequence."""
    length = devices * held
    causal = np.tri(length, dtype=int)
    for name in LAYOUTS:
        tokens = layout.device_tokens(name, devices, length)
        pairs = layout.unmasked_pairs(name, devices, length)
        for device in range(devices):
            for step in range(devices):
                assert pairs[device, step] == causal[np.ix_(tokens[device], tokens[(device - step) % devices])].sum()
        assert pairs.sum() == length * (length + 1) // 2
        if name == "zigzag":
            assert (pairs == pairs[0]).all()
        if name == "striped":
            assert pairs.max() / pairs.min() <= (held + 1) / (held - 1)
        if name == "contiguous":  # why the other two exist
            assert (pairs[0, 1:] == 0).all() and (pairs[-1] > 0).all()


def test_lay_out_keeps_rows_apart():
    batch = layout.lay_out([(3, 5), (0, 1), (10, 4)], "striped", 2, num_tokens=8)
    np.testing.assert_array_equal(batch.cu_q_lens, [[0, 2, 3, 5], [0, 3, 3, 5]])
    np.testing.assert_array_equal(batch.positions[0], [4, 6, 0, 10, 12, -1, -1, -1])
    np.testing.assert_array_equal(batch.positions[1], [3, 5, 7, 11, 13, -1, -1, -1])
    flat = np.where(batch.source < 0, -100, batch.source * 2).reshape(-1)
    np.testing.assert_array_equal(flat[batch.restore], np.arange(10) * 2)
    with pytest.raises(ValueError, match="num_tokens=4 must be at least 5"):
        layout.lay_out([(3, 5), (0, 1), (10, 4)], "striped", 2, num_tokens=4)
    with pytest.raises(ValueError, match="none of zigzag"):
        layout.owners("snake", 2, 3)


# Reference


def test_reference_by_hand():
    """Three tokens on two devices, one head of size 2: a cached one on device 1, then one on each.

    The last token (on device 0, position 2) scores 0, ln 2, ln 5 against positions 0, 1, 2 and weighs 1/8, 2/8, 5/8.
    """
    q = np.array([[[[1.0, 0.0]]], [[[9.0, 9.0]]]], np.float32)
    k = np.array([[[[np.log(5.0), 7.0]]], [[[np.log(2.0), -3.0]]]], np.float32)
    v = np.array([[[[0.0, 8.0]]], [[[4.0, 0.0]]]], np.float32)
    kv_pages = np.full((2, 1, 2, 2, 1, 4, 2), np.nan, np.float32)
    kv_pages[1, 0, 1, :, 0, 0] = [[0.0, 0.0], [8.0, 16.0]]
    slots = np.full((2, 2, 4), 77)
    slots[1, 1, 0] = 0
    out, pages = reference.ring_attention(
        q, k, v, kv_pages, 0, slots, np.array([[[1]], [[1]]]), np.array([[1], [2]]), np.array([[0, 1], [0, 1]]),
        np.array([[2], [1]]), scale=1.0)  # fmt: skip
    np.testing.assert_allclose(out[0, 0, 0], [1 + 1, 2 + 5], atol=1e-6)
    # Position 1 sees positions 0 and 1 only: scores 0 and 9 ln 2 - 27.
    weight = 1 / (1 + np.exp(9 * np.log(2) - 27))
    np.testing.assert_allclose(out[1, 0, 0], [8 * weight + 4 * (1 - weight), 16 * weight], atol=1e-5)
    np.testing.assert_array_equal(pages[0, 0, 1, :, 0, 0], [k[0, 0, 0], v[0, 0, 0]])
    np.testing.assert_array_equal(pages[1, 0, 1, :, 0, 1], [k[1, 0, 0], v[1, 0, 0]])


# Backends

FAST_XLA = {
    "one row": Case(rows=((0, 64),)),
    "uneven rows with cache": Case(rows=((37, 61), (0, 5), (100, 3), (0, 0))),
    "two devices": Case(rows=((9, 50), (0, 31)), devices=2, layout="striped"),
    "eight devices": Case(rows=((40, 75), (3, 2)), devices=8, layout="striped"),
    "contiguous": Case(rows=((20, 70),), devices=8, layout="contiguous"),
    "window": Case(rows=((90, 61), (0, 20)), window=13),
    "soft cap": Case(rows=((11, 40),), options={"soft_cap": 2.0}),
    "sinks": Case(rows=((11, 40),), options={"sinks": np.array([-1.0, 0.0, 1.0, 5.0], np.float32)}),
    "one kv head of 8": Case(rows=((11, 40),), heads=(8, 1)),
    "packed": Case(rows=((11, 40), (0, 9)), packed=True),
    "padding": Case(rows=((5, 30),), spare_tokens=20),
    "nothing": Case(rows=((0, 0), (0, 0)), spare_tokens=4),
}


@pytest.mark.parametrize("name", FAST_XLA)
def test_xla(name: str):
    check(FAST_XLA[name], "xla")


FAST_TPU = {
    "two devices": Case(rows=((9, 21), (0, 3)), devices=2),
    "four devices, striped, everything": Case(
        rows=((21, 26), (0, 3)), layout="striped", window=20,
        options={"soft_cap": 2.0, "sinks": np.array([-1.0, 0.0, 1.0, 5.0], np.float32)}),
    "packed": Case(rows=((11, 20),), devices=2, packed=True),
}  # fmt: skip


@pytest.mark.parametrize("name", FAST_TPU)
def test_mosaic_tpu(name: str):
    check(FAST_TPU[name], "mosaic_tpu", twice=name == "two devices")
