"""Every kernel at the shapes of real models: what is compiled for absent chips, scheduled and tuned."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import api as grouped
from pallas_kernels.latent_attention import api as latent
from pallas_kernels.ragged_paged_attention.api import AttentionSpec, choose_backend
from pallas_kernels.ring_attention import api as ring
from quant.experts import QuantizedExperts
from quant.kv import QuantizedPages
from scripts.aot.models import ATTENTION, EXPERTS, LATENT, AttentionShape, ExpertsShape, LatentShape
from scripts.aot.program import Case, Program
from serving.runner.memory import PAGE_SIZE

KIND = {"tpu": "mosaic_tpu", "gpu": "mosaic_gpu"}
POOL_BYTES = 4 << 30  # a KV cache so large that a copy of one of its layers is larger than any other temporary
LAYERS = 2  # so that the layer's index matters


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A step: rows of one token, then rows of `chunk` tokens; all have kv_len tokens. num_tokens: padded."""

    name: str
    decode: int
    chunks: int = 0
    chunk: int = 0
    kv_len: int
    num_tokens: int

    @property
    def num_rows(self) -> int:
        return self.decode + self.chunks

    @property
    def q_lens(self) -> list[int]:
        return [1] * self.decode + [self.chunk] * self.chunks


DECODE = Rows(name="decode 64 x 4k", decode=64, kv_len=4096, num_tokens=64)
MIXED = Rows(name="mixed 63 + 512", decode=63, chunks=1, chunk=512, kv_len=4096, num_tokens=1024)
PREFILL = Rows(name="prefill 8k", decode=0, chunks=1, chunk=8192, kv_len=8192, num_tokens=8192)


def paged_metadata(rows: Rows, page_size: int) -> tuple[tuple[np.ndarray, ...], int]:
    """((page_table, kv_lens, cu_q_lens, distribution), pages in use): pages shuffled, page 0 unused."""
    per_row = -(-rows.kv_len // page_size)
    num_pages = 1 + rows.num_rows * per_row
    table = 1 + np.random.default_rng(0).permutation(num_pages - 1).reshape(rows.num_rows, per_row)
    lengths = np.full(rows.num_rows, rows.kv_len)
    cu_q_lens = np.concatenate([[0], np.cumsum(rows.q_lens)])
    distribution = np.array([rows.decode, rows.decode, rows.num_rows])
    return tuple(x.astype(np.int32) for x in (table, lengths, cu_q_lens, distribution)), num_pages


def normal(index: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random numbers; for integers, of all magnitudes."""
    key = jax.random.key(index)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, -100, 100, dtype)
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


def attention_spec(shape: AttentionShape, page_size: int) -> AttentionSpec:
    return AttentionSpec(
        num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, page_size=page_size,
        dtype=jnp.dtype(jnp.bfloat16), kv_dtype=jnp.dtype(shape.kv_dtype),
    )  # fmt: skip


def ragged_paged(shape: AttentionShape, rows: Rows, backend_name: str, devices: Sequence[Any], *,
                 pool_bytes: int = POOL_BYTES) -> Program:
    """Ragged paged attention. pool_bytes: of the KV cache, at least what the rows need (0: just that)."""
    page_size = PAGE_SIZE[devices[0].platform]
    backend = choose_backend(backend_name, attention_spec(shape, page_size), devices[0])
    metadata, num_pages = paged_metadata(rows, page_size)
    page_bytes = backend.layout(LAYERS, 1, shape.num_kv_heads).page_bytes
    layout = backend.layout(LAYERS, max(num_pages, pool_bytes // page_bytes), shape.num_kv_heads)
    static = {"scale": shape.head_dim**-0.5, "window": shape.window, "chunk": shape.chunk, "soft_cap": shape.soft_cap}

    def inputs() -> tuple:
        tokens = rows.num_tokens
        q = normal(0, (tokens, shape.num_heads, shape.head_dim))
        k, v = (normal(i, (tokens, shape.num_kv_heads, shape.head_dim)) for i in (1, 2))
        pages = normal(3, layout.shape, layout.dtype)
        if layout.quantized:
            pages = QuantizedPages(pages, jnp.full(layout.scales_shape, 0.01, jnp.float32))
        sinks = normal(4, (shape.num_heads,), jnp.float32) if shape.sinks else None
        return (q, k, v, pages, *map(jnp.asarray, (np.int32(1), *metadata)), sinks)

    def fn(q, k, v, pages, layer, table, lengths, cu_q_lens, distribution, sinks):
        return backend.attend(q, k, v, pages, layer, table, lengths, cu_q_lens, distribution, sinks=sinks, **static)

    block_bytes = _gpu_block_bytes(shape, rows) if backend_name == "mosaic_gpu" else None
    smallest = int(np.prod(layout.scales_shape)) * 4 if layout.quantized else layout.page_bytes * layout.num_pages
    return Program(fn=fn, inputs=inputs, donate=(3,), kv_bytes=layout.page_bytes * layout.num_pages,
                   layer_bytes=smallest // LAYERS, block_bytes=block_bytes)


def _gpu_block_bytes(shape: AttentionShape, rows: Rows) -> int:
    """Shared memory of a block, by the kernel's own config."""
    from pallas_kernels.ragged_paged_attention.mosaic_gpu import config

    blocks = config.chunk_blocks if rows.chunks else config.decode_blocks
    kinds = (shape.head_dim, jnp.dtype(jnp.bfloat16), jnp.dtype(shape.kv_dtype))
    return blocks(*kinds).smem_bytes(*kinds)


def jax_ragged_paged(shape: AttentionShape, rows: Rows, pages_per_block: int, queries_per_block: int,
                     devices: Sequence[Any]) -> Program:
    """jax's own TPU kernel at the same shape: K and V of one layer, already written."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ragged_paged_attention

    page_size = PAGE_SIZE["tpu"]
    (table, lengths, cu_q_lens, _), num_pages = paged_metadata(rows, page_size)

    def inputs() -> tuple:
        return (
            normal(0, (rows.num_tokens, shape.num_heads, shape.head_dim)),
            normal(1, (num_pages, page_size, 2 * shape.num_kv_heads, shape.head_dim)),
            *map(jnp.asarray, (lengths, table, cu_q_lens, np.array([rows.num_rows], np.int32))),
        )

    fn = partial(
        ragged_paged_attention, sm_scale=shape.head_dim**-0.5, sliding_window=shape.window, soft_cap=shape.soft_cap,
        num_kv_pages_per_block=pages_per_block, num_queries_per_block=queries_per_block, vmem_limit_bytes=100 << 20,
    )
    return Program(fn=fn, inputs=inputs)


def latent_attention(shape: LatentShape, rows: Rows, backend_name: str, devices: Sequence[Any], *,
                     pool_bytes: int = POOL_BYTES, page_size: int | None = None) -> Program:
    page_size = page_size or PAGE_SIZE[devices[0].platform]
    spec = latent.LatentSpec(
        num_heads=shape.num_heads, latent_dim=shape.latent_dim, rope_dim=shape.rope_dim, page_size=page_size,
        dtype=jnp.dtype(jnp.bfloat16), kv_dtype=jnp.dtype(jnp.bfloat16),
    )
    backend = latent.choose_backend(backend_name, spec, devices[0])
    metadata, num_pages = paged_metadata(rows, page_size)
    page_bytes = int(np.prod(backend.layout(LAYERS, 1).shape)) * 2
    layout = backend.layout(LAYERS, max(num_pages, pool_bytes // page_bytes))

    def inputs() -> tuple:
        tokens, heads, rank, rope = rows.num_tokens, shape.num_heads, shape.latent_dim, shape.rope_dim
        shapes = ((tokens, heads, rank), (tokens, heads, rope), (tokens, rank), (tokens, rope), layout.shape)
        return (*(normal(i, s) for i, s in enumerate(shapes)), *map(jnp.asarray, (np.int32(1), *metadata)))

    fn = partial(backend.attend, scale=192**-0.5)  # 128 + 64: the head size before absorption
    kv_bytes = page_bytes * layout.num_pages
    return Program(fn=fn, inputs=inputs, donate=(4,), kv_bytes=kv_bytes, layer_bytes=kv_bytes // LAYERS)


def grouped_matmul(shape: ExpertsShape, rows: int, backend_name: str, devices: Sequence[Any]) -> Program:
    """rows: tokens times the experts of each, sorted by expert; all experts have some, of unequal number."""
    dtype = jnp.dtype(jnp.bfloat16)
    weight_dtype = jnp.dtype(shape.weight_dtype)
    spec = grouped.ExpertsSpec(num_experts=shape.experts, dtype=dtype, weight_dtype=weight_dtype)
    backend = grouped.choose_backend(backend_name, spec, devices[0])
    share = np.random.default_rng(0).dirichlet(np.ones(shape.experts))
    sizes = np.floor(share * rows).astype(np.int32)
    sizes[0] += rows - sizes.sum()

    def inputs() -> tuple:
        weights: Any = normal(1, (shape.experts, shape.d, shape.f), weight_dtype)
        if spec.quantized:
            weights = QuantizedExperts(values=weights, scales=jnp.full((shape.experts, 1, shape.f), 0.01, jnp.float32))
        return normal(0, (rows, shape.d)), weights, jnp.asarray(sizes)

    return Program(fn=backend.matmul, inputs=inputs)


RING_AXIS = "context"


def ring_attention(shape: AttentionShape, tokens: int, kv_len: int, backend_name: str, devices: Sequence[Any], *,
                   page_size: int | None = None, pool_bytes: int = POOL_BYTES) -> Program:
    """A chunk of `tokens` tokens on each device of one row, of which each device keeps kv_len tokens."""
    page_size = page_size or PAGE_SIZE[devices[0].platform]
    count = len(devices)
    mesh = jax.sharding.Mesh(np.array(devices), (RING_AXIS,))
    spec = attention_spec(shape, page_size)
    backend = ring.choose_backend(backend_name, spec, devices[0])
    paged = choose_backend(backend_name, spec, devices[0])
    per_row = -(-kv_len // page_size)
    page_bytes = paged.layout(LAYERS, 1, shape.num_kv_heads).page_bytes
    layout = paged.layout(LAYERS, max(per_row + 1, pool_bytes // page_bytes), shape.num_kv_heads)
    config = backend.config(num_tokens=tokens, num_rows=1, row_pages=per_row, devices=count, row_dim=layout.row_dim,
                            side_by_side=layout.side_by_side)

    def inputs() -> tuple:
        q = normal(0, (count, tokens, shape.num_heads, shape.head_dim))
        k, v = (normal(i, (count, tokens, shape.num_kv_heads, shape.head_dim)) for i in (1, 2))
        place = jnp.arange(count * kv_len, dtype=jnp.int32).reshape(count, kv_len)
        slots = jnp.zeros((count, layout.num_pages * page_size), jnp.int32)
        slots = slots.at[:, page_size : page_size + kv_len].set(place)
        table = jnp.broadcast_to(1 + jnp.arange(per_row, dtype=jnp.int32), (count, 1, per_row))
        return (
            q, k, v, normal(3, (count, *layout.shape)), slots.reshape(count, layout.num_pages, page_size), table,
            jnp.full((count, 1), kv_len, jnp.int32),
            jnp.broadcast_to(jnp.array([0, tokens], jnp.int32), (count, 2)), place[:, kv_len - tokens :],
        )

    def local(*arrays):
        q, k, v, pages, slots, table, lengths, cu_q_lens, positions = (array[0] for array in arrays)
        slots = ring.write_positions(slots, table, lengths, cu_q_lens, positions)
        plan = ring.ring_plan(ring.StoredPositions(slots), table, lengths, cu_q_lens, positions, axis_name=RING_AXIS,
                              config=config, window=shape.window)
        done = backend.attend(q, k, v, pages, jnp.int32(1), plan, scale=shape.head_dim**-0.5)
        return jax.tree.map(lambda x: x[None], done)

    split = jax.sharding.PartitionSpec(RING_AXIS)
    fn = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    kv_bytes = layout.page_bytes * layout.num_pages
    return Program(fn=fn, inputs=inputs, donate=(3,), mesh=mesh, kv_bytes=kv_bytes, layer_bytes=kv_bytes // LAYERS)


def _cases() -> list[Case]:
    cases = []
    for platform, backend in KIND.items():
        for shape in ATTENTION.values():
            for rows in (DECODE, MIXED):
                cases.append(Case(
                    kernel="ragged_paged_attention", shape=shape.name, step=rows.name, platform=platform,
                    build=partial(ragged_paged, shape, rows, backend),
                    quick=rows is DECODE or shape.name in ("smollm2-135m", "llama3-8b"),
                ))
        for shape in LATENT.values():
            for rows in (DECODE, MIXED):
                cases.append(Case(
                    kernel="latent_attention", shape=shape.name, step=rows.name, platform=platform,
                    build=partial(latent_attention, shape, rows, backend), quick=rows is DECODE,
                ))
        for shape in EXPERTS.values():
            for tokens in (64, 1024):
                cases.append(Case(
                    kernel="grouped_matmul", shape=shape.name, step=f"{tokens} tokens", platform=platform,
                    build=partial(grouped_matmul, shape, shape.top * tokens, backend),
                    quick=tokens == 64 and "/8" in shape.name,
                ))
    # On GPUs the ring is XLA's: `ppermute` around the local attention.
    for platform, backend in (("tpu", "mosaic_tpu"), ("gpu", "xla")):
        for name in ("llama3-8b", "gemma3-27b/8"):
            cases.append(Case(
                kernel="ring_attention", shape=name, step=f"8 x 512 of 8 x 4k ({backend})", platform=platform,
                build=partial(ring_attention, ATTENTION[name], 512, 4096, backend), quick=name == "llama3-8b",
            ))
    return cases


CASES: tuple[Case, ...] = tuple(_cases())

