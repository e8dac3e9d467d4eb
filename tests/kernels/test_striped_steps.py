"""Steps over striped pages: decode rows and chunks, spread and shared, against the dense reference of one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels import interpret
from pallas_kernels.ragged_paged_attention.layout import KVLayout
from pallas_kernels.ring_attention import api, reference
from tests.tolerances import ATTENTION

AXIS, LAYERS, LAYER = "context", 2, 1
ROWS = ((37, 1), (0, 1), (8, 1), (21, 40), (64, 7), (0, 13))  # (cached, new); those of one token first
NUM_ROWS, ROW_PAGES, HEADS, DIM = 8, 9, (4, 2), 16
OPTIONS = dict(window=19, soft_cap=2.0, sinks=np.array([-1.0, 0.0, 1.0, 5.0], np.float32))


class Step:
    """The rows in one pool, every page of page_size * devices tokens; what nobody may read is NaN."""

    def __init__(self, devices: int, page_size: int):
        rng = np.random.default_rng(devices)
        cached, new = np.array(ROWS).T
        self.devices, self.page_size = devices, page_size
        self.num_tokens = devices * -(-api.tokens_needed(devices, 3, new[3:].tolist()) // devices)
        padding = NUM_ROWS - len(ROWS)
        kv_lens = np.pad(cached + new, (0, padding)).astype(np.int32)
        cu_q_lens = np.pad(np.cumsum(new), (1, padding), mode="edge").astype(np.int32)
        cu_q_lens[0] = 0
        table = rng.permutation(np.arange(1, 1 + NUM_ROWS * ROW_PAGES)).reshape(NUM_ROWS, ROW_PAGES).astype(np.int32)
        self.rows = api.Rows(table, kv_lens, cu_q_lens, np.array([3, 3, len(ROWS)], np.int32))
        shape = (LAYERS, 1 + NUM_ROWS * ROW_PAGES, page_size * devices, 2, HEADS[1], DIM)
        self.tokens = np.full(shape, np.nan, np.float32)
        self.positions = np.zeros(self.num_tokens, np.int32)
        for row, (old, fresh) in enumerate(ROWS):
            for index in range(old):
                page = table[row, index // (page_size * devices)]
                self.tokens[:, page, index % (page_size * devices)] = rng.standard_normal((LAYERS, 2, HEADS[1], DIM))
            self.positions[cu_q_lens[row] : cu_q_lens[row + 1]] = old + np.arange(fresh)
        self.q, self.k, self.v = (
            rng.standard_normal((self.num_tokens, heads, DIM), np.float32) for heads in (HEADS[0], HEADS[1], HEADS[1]))

    def want(self, window=None, **options):
        pages, size = self.tokens.shape[1:3]
        slots = np.zeros((1, pages, size), np.int32)
        for row, (old, _) in enumerate(ROWS):
            index = np.arange(old)
            slots[0, self.rows.page_table[row, index // size], index % size] = index
        table, kv_lens, cu_q_lens, _ = (a[None] for a in self.rows)
        out, tokens = reference.ring_attention(
            self.q[None], self.k[None], self.v[None], self.tokens[None], LAYER, slots, table, kv_lens, cu_q_lens,
            self.positions[None], scale=0.25, window=window, **options)  # fmt: skip
        return out[0], tokens[0]


def attend(q, k, v, kv_pages, *of_rows, step: Step, how: str, backend: api.Backend, window=None, **options):
    """Decode rows and chunks after each other, on one device; the outputs of all tokens in the order of rows."""
    devices, me, rows, options = step.devices, lax.axis_index(AXIS), api.Rows(*of_rows), dict(options, scale=0.25)
    common = dict(devices=devices, page_size=step.page_size, axis_name=AXIS, window=window)
    block = max(step.page_size, 8)
    config = api.RingConfig(query_tokens=8, kv_tokens=block, round_tokens=2 * block)
    whole = api.RingConfig(query_tokens=8, kv_tokens=block, round_tokens=block * NUM_ROWS * ROW_PAGES)
    kv_pages, layer = kv_pages[0], jnp.int32(LAYER)
    shared = partial(api.shared_plan, device=me, config=whole, **common)
    plan = shared(api.decode_rows(rows), num_tokens=NUM_ROWS)
    ones, kv_pages = backend.shared(q[:NUM_ROWS], k[:NUM_ROWS], v[:NUM_ROWS], kv_pages, layer, plan, **options)
    if how == "shared":
        plan = shared(api.chunks(rows), num_tokens=step.num_tokens)
        out, kv_pages = backend.shared(q, k, v, kv_pages, layer, plan, **options)
    else:
        size, order = step.num_tokens // devices, api.spread_order(rows, devices, step.num_tokens)
        mine = (lax.dynamic_slice_in_dim(order.spread(a), me * size, size) for a in (q, k, v))
        plan = api.spread_plan(rows, me, num_tokens=size, num_chunks=4, config=config, **common)
        out, kv_pages = backend.attend(*mine, kv_pages, layer, plan, **options)
        out = lax.all_gather(out, AXIS, tiled=True)[order.place]
    decode = jnp.arange(len(out)) < rows.distribution[0]
    ones = jnp.pad(ones, ((0, len(out) - NUM_ROWS), (0, 0), (0, 0)))
    return jnp.where(decode[:, None, None], ones, out), kv_pages[None]


def check(backend: str, devices: int, how: str, options: dict, page_size: int = 4) -> None:
    step = Step(devices, page_size)
    layout = KVLayout(num_layers=LAYERS, num_pages=1, page_size=step.page_size, num_kv_heads=HEADS[1], head_dim=DIM,
                      dtype=jnp.dtype(jnp.float32))  # fmt: skip
    spec = api.AttentionSpec(num_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=DIM, page_size=step.page_size,
                             dtype=jnp.dtype("float32"), kv_dtype=jnp.dtype("float32"))  # fmt: skip
    chosen = api.choose_backend(backend, spec, jax.devices()[0])
    striped = np.stack([layout.from_canonical(step.tokens[:, :, device::devices]) for device in range(devices)])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    mine, all_same = PartitionSpec(AXIS), PartitionSpec()
    run = jax.jit(jax.shard_map(
        partial(attend, step=step, how=how, backend=chosen, **options), mesh=mesh, check_vma=False,
        in_specs=(all_same,) * 3 + (mine,) + (all_same,) * 4, out_specs=(all_same, mine)))
    out, kv_pages = run(step.q, step.k, step.v, striped, *step.rows)
    want, want_tokens = step.want(**options)
    used = step.rows.cu_q_lens[-1]
    np.testing.assert_allclose(out[:used], want[:used], atol=ATTENTION["float32"])
    for device in range(devices):  # page 0 is scratch
        got = layout.to_canonical(kv_pages[device])[:, 1:]
        np.testing.assert_array_equal(got, want_tokens[:, 1:, device::devices])
    assert backend == "xla" or not interpret.races_found()


@pytest.mark.parametrize("how", ["spread", "shared"])
def test_xla(how: str):
    check("xla", 4, how, OPTIONS)


@pytest.mark.parametrize("how", [pytest.param("spread", marks=pytest.mark.slow), "shared"])
def test_mosaic_tpu(how: str):
    check("mosaic_tpu", 2, how, OPTIONS, page_size=32)  # two tiles of what is written at a time


@pytest.mark.slow
def test_nothing_special():
    check("xla", 4, "spread", {})


def test_order_by_hand():
    """Two decode rows, then a chunk of five tokens from position 3 on, over two devices."""
    rows = api.Rows(*map(jnp.asarray, (np.zeros((3, 1), int), [9, 4, 8], [0, 1, 2, 7], [2, 2, 3])))
    order = api.spread_order(rows, 2, 10)
    # Device 0: row 0, positions 4 and 6. Device 1: row 1, positions 3, 5 and 7.
    np.testing.assert_array_equal(order.source, [0, 3, 5, 10, 10, 1, 2, 4, 6, 10])
    np.testing.assert_array_equal(order.place[:7], [0, 5, 6, 1, 7, 2, 8])
    np.testing.assert_array_equal(order.spread(jnp.arange(1, 11)), [1, 4, 6, 0, 0, 2, 3, 5, 7, 0])
    assert api.tokens_needed(2, 2, [5]) == 8


def test_a_long_chunk_is_shared_out_evenly():
    """Tokens and causal pairs of each device, wherever the chunk begins."""
    devices, length, size = 4, 1000, 4 * 256
    for start in (0, 37, 4098):
        rows = api.Rows(*map(jnp.asarray, (np.zeros((1, 1), int), [start + length], [0, length], [0, 0, 1])))
        source = np.asarray(api.spread_order(rows, devices, size).source).reshape(devices, -1)
        counts = (source < size).sum(1)
        assert (counts == length // devices).all()
        pairs = [(start + device[device < size] + 1).sum() for device in source]
        assert max(pairs) / min(pairs) < 1.01
