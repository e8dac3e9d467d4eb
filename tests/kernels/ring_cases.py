"""Prompts spread over devices, and a check of any ring attention backend on them against the dense reference."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pallas_kernels import interpret
from pallas_kernels.ragged_paged_attention.layout import KVLayout
from pallas_kernels.ring_attention import api, layout, mosaic_tpu, reference
from quant.kv import QuantizedPages, quantize_rows
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
    side_by_side: bool = False
    row_dim: int = 0  # more than head_dim: a stored row ends in zeros
    kv_dtype: str = ""  # int8, float8_e4m3fn: quantized
    window: int | None = None
    spare_tokens: int = 0  # padding at the end of every device's tokens, more than the layout needs
    seed: int = 0
    blocks: tuple[int, int, int] = (8, 16, 32)
    options: dict = field(default_factory=dict)

    @property
    def spec(self) -> api.AttentionSpec:
        return api.AttentionSpec(
            num_heads=self.heads[0], num_kv_heads=self.heads[1], head_dim=self.head_dim, page_size=self.page_size,
            dtype=jnp.dtype("float32"), kv_dtype=jnp.dtype(self.kv_dtype or "float32"))  # fmt: skip

    @property
    def layout_of_pages(self) -> KVLayout:
        return KVLayout(
            num_layers=LAYERS, num_pages=1, page_size=self.page_size, num_kv_heads=self.heads[1],
            head_dim=self.head_dim, dtype=jnp.dtype(self.kv_dtype or "float32"), row_dim=self.row_dim or None,
            side_by_side=self.side_by_side)  # fmt: skip

    @property
    def config(self) -> api.RingConfig:
        return api.RingConfig(**dict(zip(("query_tokens", "kv_tokens", "round_tokens"), self.blocks, strict=True)))


@dataclass(frozen=True)
class Inputs:
    """Every array has the device axis first."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    kv_pages: Any  # an array or QuantizedPages
    slot_positions: np.ndarray
    page_table: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray
    positions: np.ndarray


def store(tokens: np.ndarray, case: Case, dtype):
    """[D, L, P, B, 2, K, H] as the pages of the case, NaN kept wherever the format can hold one."""
    if not case.kv_dtype:
        return np.asarray(jax.vmap(case.layout_of_pages.from_canonical)(tokens), dtype)
    values, scales = quantize_rows(jnp.asarray(tokens), jnp.dtype(case.kv_dtype))
    scales = np.where(np.isnan(tokens).any(-1), np.nan, scales)
    return QuantizedPages(
        np.asarray(jax.vmap(case.layout_of_pages.from_canonical)(values)), np.moveaxis(scales, 3, 5).astype(np.float32))


def load(kv_pages, case: Case) -> np.ndarray:
    """The other way, dequantized, float32."""
    canonical = jax.vmap(case.layout_of_pages.to_canonical)
    if not case.kv_dtype:
        return np.asarray(canonical(kv_pages), np.float32)
    values = np.asarray(canonical(kv_pages.values), np.float32)
    return values * np.moveaxis(kv_pages.scales, 5, 3)[..., None]


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
    tokens = np.full((d, LAYERS, num_pages, b, 2, k, h), np.nan, np.float32)
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
                tokens[device, :, page, offset] = rng.standard_normal((LAYERS, 2, k, h))
                slots[device, page, offset] = position
    q, key, value = (rng.standard_normal((d, num_tokens, heads, h), np.float32) for heads in (n, k, k))
    cast = partial(np.asarray, dtype=dtype)
    return Inputs(cast(q), cast(key), cast(value), store(tokens, case, dtype), slots, table, kv_lens, batch.cu_q_lens,
                  batch.positions), batch  # fmt: skip


def local_step(*arrays, case: Case, backend: str, count_blocks: bool):
    inputs = Inputs(*jax.tree.map(lambda a: a[0], arrays))
    where = (inputs.page_table, inputs.kv_lens, inputs.cu_q_lens, inputs.positions)
    slots = api.write_positions(inputs.slot_positions, *where)
    plan = api.ring_plan(api.StoredPositions(slots), *where, axis_name=AXIS, config=case.config, window=case.window)
    args = (inputs.q, inputs.k, inputs.v, inputs.kv_pages, jnp.int32(LAYER), plan)
    options = dict(scale=case.head_dim**-0.5, **case.options)
    if count_blocks:
        out, kv_pages, visited = mosaic_tpu.ring_attention(*args, **options, interpret=True)
        return out[None], kv_pages[None], visited[None], plan.count[None], plan.num_rounds[None]
    out, kv_pages = api.choose_backend(backend, case.spec, jax.devices()[0]).attend(*args, **options)
    return jax.tree.map(lambda a: a[None], (out, kv_pages))


def compiled(case: Case, backend: str, count_blocks: bool = False):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: case.devices]), (AXIS,))
    step = partial(local_step, case=case, backend=backend, count_blocks=count_blocks)
    sharded = jax.jit(jax.shard_map(
        step, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(AXIS), check_vma=False))  # fmt: skip
    return lambda inputs: jax.device_get(sharded(*vars(inputs).values()))


def check(case: Case, backend: str, dtype: str = "float32", twice: bool = True) -> None:
    inputs, _ = make(case, jnp.dtype(dtype))
    run = compiled(case, backend)
    out, kv_pages = run(inputs)
    q, k, v = (a.astype(np.float32) for a in (inputs.q, inputs.k, inputs.v))
    kept = store_and_load(k, v, case)  # what the cache can hold of the new tokens
    want, want_tokens = reference.ring_attention(
        q, *kept, load(inputs.kv_pages, case), LAYER, inputs.slot_positions, inputs.page_table, inputs.kv_lens,
        inputs.cu_q_lens, inputs.positions, scale=case.head_dim**-0.5, window=case.window, **case.options)  # fmt: skip
    np.testing.assert_allclose(out.astype(np.float32), want, atol=ATTENTION[dtype], rtol=0)
    # Written slots hold the new tokens, every other one what it held. Page 0 is scratch.
    np.testing.assert_array_equal(load(kv_pages, case)[:, :, 1:], want_tokens[:, :, 1:])
    if backend == "mosaic_tpu":
        assert not interpret.races_found()
    if twice:
        bits = [[a.tobytes() for a in jax.tree.leaves(result)] for result in ((out, kv_pages), run(inputs))]
        assert bits[0] == bits[1]


def store_and_load(k, v, case: Case):
    if not case.kv_dtype:
        return k, v
    return [np.asarray(values.astype(jnp.float32) * scales[..., None])
            for values, scales in (quantize_rows(jnp.asarray(a), jnp.dtype(case.kv_dtype)) for a in (k, v))]
