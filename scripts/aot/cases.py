"""Every kernel at the shapes of real models: what is compiled for absent chips, scheduled, tuned and timed.

A case is data and a function that builds it, so that another process can. `inputs` makes the arguments with jax.numpy:
traced for shapes alone, or run on a device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention.api import AttentionSpec, choose_backend
from quant.kv import QuantizedPages
from scripts.aot.models import ATTENTION, AttentionShape

KIND = {"tpu": "mosaic_tpu", "gpu": "mosaic_gpu"}
PAGE_SIZE = {"tpu": 128, "gpu": 64}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A step: rows of one token, then rows of `chunk` tokens; all have kv_len tokens. num_tokens: padded."""

    name: str
    decode: int
    chunks: int
    chunk: int
    kv_len: int
    num_tokens: int

    @property
    def num_rows(self) -> int:
        return self.decode + self.chunks

    @property
    def q_lens(self) -> list[int]:
        return [1] * self.decode + [self.chunk] * self.chunks

    @property
    def pairs(self) -> int:
        """(query, key) pairs that a causal step attends."""
        return sum(q * self.kv_len - q * (q - 1) // 2 for q in self.q_lens)


DECODE = Rows(name="decode 64 x 4k", decode=64, chunks=0, chunk=0, kv_len=4096, num_tokens=64)
MIXED = Rows(name="mixed 63 + 512", decode=63, chunks=1, chunk=512, kv_len=4096, num_tokens=1024)
PREFILL = Rows(name="prefill 8k", decode=0, chunks=1, chunk=8192, kv_len=8192, num_tokens=8192)


@dataclass(frozen=True, kw_only=True)
class Program:
    """fn(*inputs()) runs the kernel. donate: indices of arguments. kv_bytes, layer_bytes: of the KV cache, 0: none."""

    fn: Callable
    inputs: Callable[[], tuple]
    donate: tuple[int, ...] = ()
    kv_bytes: int = 0
    layer_bytes: int = 0

    @property
    def shapes(self) -> tuple:
        return jax.eval_shape(self.inputs)


@dataclass(frozen=True, kw_only=True)
class Case:
    """platform: "tpu" or "gpu". build(device): the program for a jax device; picklable. quick: in the subset for CI."""

    kernel: str
    shape: str
    step: str
    platform: str
    build: Callable[[Any], Program]
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape} {self.step}"


def paged_metadata(rows: Rows, page_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """(page_table, kv_lens, cu_q_lens, distribution, number of pages): pages shuffled, page 0 unused."""
    per_row = -(-rows.kv_len // page_size)
    num_pages = 1 + rows.num_rows * per_row
    table = 1 + np.random.default_rng(0).permutation(num_pages - 1).reshape(rows.num_rows, per_row)
    cu_q_lens = np.concatenate([[0], np.cumsum(rows.q_lens)])
    distribution = np.array([rows.decode, rows.decode, rows.num_rows])
    lengths = np.full(rows.num_rows, rows.kv_len)
    return *(x.astype(np.int32) for x in (table, lengths, cu_q_lens, distribution)), num_pages  # type: ignore[return-value]


def normal(index: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random numbers; what no normal distribution can be cast to is drawn as integers."""
    key = jax.random.key(index)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, -100, 100, dtype)
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


def ragged_paged(shape: AttentionShape, rows: Rows, backend_name: str, device: Any, *, layers: int | None = None,
                 **options: Any) -> Program:
    """Our kernel; `layers` of the cache (None: two, so that the layer's index matters). options go to the kernel."""
    page_size = PAGE_SIZE.get(device.platform, 128)
    spec = AttentionSpec(
        num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, page_size=page_size,
        dtype=jnp.dtype(jnp.bfloat16), kv_dtype=jnp.dtype(shape.kv_dtype),
    )
    backend = choose_backend(backend_name, spec, device)
    table, lengths, cu_q_lens, distribution, num_pages = paged_metadata(rows, page_size)
    layout = backend.layout(layers or 2, num_pages, shape.num_kv_heads)
    static = {"scale": shape.head_dim**-0.5, "window": shape.window, "soft_cap": shape.soft_cap, **options}

    def inputs() -> tuple:
        tokens = rows.num_tokens
        q = normal(0, (tokens, shape.num_heads, shape.head_dim))
        k, v = (normal(i, (tokens, shape.num_kv_heads, shape.head_dim)) for i in (1, 2))
        pages = normal(3, layout.shape, layout.dtype)
        if layout.quantized:
            pages = QuantizedPages(pages, jnp.full(layout.scales_shape, 0.01, jnp.float32))
        sinks = normal(4, (shape.num_heads,), jnp.float32) if shape.sinks else None
        numbers = (jnp.int32(1), table, lengths, cu_q_lens, distribution)
        return (q, k, v, pages, *map(jnp.asarray, numbers), sinks)

    def fn(q, k, v, pages, layer, table, lengths, cu_q_lens, distribution, sinks):
        return backend.attend(q, k, v, pages, layer, table, lengths, cu_q_lens, distribution, sinks=sinks, **static)

    kv_bytes = layout.page_bytes * num_pages
    return Program(fn=fn, inputs=inputs, donate=(3,), kv_bytes=kv_bytes, layer_bytes=kv_bytes // layout.num_layers)


def jax_ragged_paged(shape: AttentionShape, rows: Rows, pages_per_block: int, queries_per_block: int, device: Any
                     ) -> Program:
    """jax's own kernel at the same shape: K and V of one layer, already written."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ragged_paged_attention

    page_size = PAGE_SIZE["tpu"]
    table, lengths, cu_q_lens, _, num_pages = paged_metadata(rows, page_size)

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


def _ragged_paged_cases() -> list[Case]:
    return [
        Case(
            kernel="ragged_paged_attention", shape=shape.name, step=rows.name, platform=platform,
            build=partial(ragged_paged, shape, rows, KIND[platform]),
            quick=shape.name in ("smollm2-135m", "llama3-8b") and rows is not PREFILL,
        )
        for platform in KIND for shape in ATTENTION.values() for rows in (DECODE, MIXED)
    ]


CASES: tuple[Case, ...] = (*_ragged_paged_cases(),)
