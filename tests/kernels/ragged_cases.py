"""Ragged batches, and a check of any attention backend on them against the dense float32 reference."""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.ragged_paged_attention import reference
from pallas_kernels.ragged_paged_attention.api import AttentionSpec, KVLayout, choose_backend
from quant.kv import QuantizedPages
from tests.tolerances import ATTENTION

LAYERS, LAYER = 2, 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """rows: (new tokens, length with them) of each; rows of one token first."""

    rows: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    page_size: int = 8
    num_tokens: int = 0  # 0: just enough
    num_rows: int = 0
    shared_pages: bool = False  # rows 0 and 1 share their first page
    seed: int = 0
    kv_dtype: str | None = None  # None: that of the queries
    bias: bool = False
    tree_words: int = 0  # a random tree over each row's new tokens, in that many words
    options: dict = field(default_factory=dict)  # window, chunk, soft_cap, sinks


@dataclass(frozen=True)
class Inputs:
    """Arguments of the contract as numpy arrays; pages in the plain layout [L, P, 2, K, B, H]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    values: np.ndarray
    scales: np.ndarray | None
    step: tuple  # layer, page_table, kv_lens, cu_q_lens, distribution
    options: dict

    @property
    def num_real_tokens(self) -> int:
        return int(self.step[3][-1])


def inputs(case: Case, dtype: str = "float32") -> Inputs:
    """Random numbers. Whatever nobody may read, unused pages and slots beyond a row's length, is NaN (int8: 127)."""
    rng = np.random.default_rng(case.seed)
    (n, k), h, b = case.heads, case.head_dim, case.page_size
    lens, kv_lens = [q for q, _ in case.rows], [length for _, length in case.rows]
    num_rows = max(case.num_rows, len(lens), 1)
    decode = next((i for i, q in enumerate(lens) if q != 1), len(lens))
    num_tokens = max(case.num_tokens, sum(lens), num_rows if decode == len(lens) else num_rows + 1)
    pages_of = [-(-length // b) for length in kv_lens]
    num_pages = sum(pages_of) + 3
    free = list(rng.permutation(np.arange(1, num_pages)))
    table = np.zeros((num_rows, max([*pages_of, 1])), np.int32)
    for row, count in enumerate(pages_of):
        table[row, :count] = [free.pop() for _ in range(count)]
    if case.shared_pages:
        table[1, 0] = table[0, 0]

    kv_dtype = np.dtype(getattr(ml_dtypes, case.kv_dtype or dtype, case.kv_dtype or dtype))
    quantized = kv_dtype.itemsize == 1
    values = rng.standard_normal((LAYERS, num_pages, 2, k, b, h), np.float32)
    values = (values * (40 if quantized else 1)).astype(kv_dtype)
    scales = rng.uniform(0.01, 0.05, values.shape[:5]).astype(np.float32) if quantized else None
    unread = 127 if kv_dtype == np.int8 else np.nan
    used = {int(p) for row, count in enumerate(pages_of) for p in table[row, :count]}
    never_read = [(p, 0) for p in range(num_pages) if p not in used]
    never_read += [(table[row, length // b], length % b) for row, length in enumerate(kv_lens) if length % b]
    bias = rng.standard_normal((LAYERS, num_pages, k, b)).astype(np.float32)
    for page, slot in never_read:
        values[:, page, :, :, slot:] = unread
        bias[:, page, :, slot:] = np.nan
        if scales is not None:
            scales[:, page, :, :, slot:] = np.nan

    cu_q_lens = np.zeros(num_rows + 1, np.int32)
    cu_q_lens[1 : len(lens) + 1] = np.cumsum(lens)
    cu_q_lens[len(lens) + 1 :] = sum(lens)
    padded_kv_lens = np.zeros(num_rows, np.int32)
    padded_kv_lens[: len(lens)] = kv_lens
    options = dict(case.options)
    if case.bias:
        options["kv_bias"] = bias
    if case.tree_words:
        options["tree_mask"] = _random_trees(rng, lens, num_tokens, case.tree_words)
    q_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    q, key, value = (rng.standard_normal((num_tokens, heads, h), np.float32).astype(q_dtype) for heads in (n, k, k))
    distribution = np.array([decode, decode, len(lens)], np.int32)
    step = (np.int32(LAYER), table, padded_kv_lens, cu_q_lens, distribution)
    return Inputs(q, key, value, values, scales, step, options)


def _random_trees(rng, lens: list[int], num_tokens: int, words: int) -> np.ndarray:
    """Each token's parent is a random earlier one of its row; it sees itself and its ancestors."""
    masks = np.zeros((num_tokens, words), np.uint32)
    start = 0
    for length in lens:
        seen: list[set[int]] = []
        for i in range(min(length, 32 * words)):
            parent = int(rng.integers(-1, i))
            seen.append((seen[parent] if parent >= 0 else set()) | {i})
            for j in seen[i]:
                masks[start + i, j // 32] |= np.uint32(1 << (j % 32))
        start += length
    return masks


def check(case: Case, backend: str = "xla", dtype: str = "float32") -> None:
    """Outputs within the table's tolerance, a second run equal in bits, and no byte changed that was not to be."""
    given = inputs(case, dtype)
    spec = AttentionSpec(
        num_heads=case.heads[0], num_kv_heads=case.heads[1], head_dim=case.head_dim, page_size=case.page_size,
        dtype=jnp.dtype(dtype), kv_dtype=given.values.dtype,
    )  # fmt: skip
    chosen = choose_backend(backend, spec, jax.devices()[0])
    layout = chosen.layout(LAYERS, given.values.shape[1], case.heads[1])
    scale = case.head_dim**-0.5
    run = jax.jit(partial(chosen.attend, scale=scale, **_static(given.options)))

    def once():
        pages = layout.from_canonical(jnp.asarray(given.values).transpose(0, 1, 4, 2, 3, 5))
        if given.scales is not None:
            pages = QuantizedPages(pages, jnp.asarray(given.scales))
        return run(given.q, given.k, given.v, pages, *given.step, **_arrays(given.options))

    out, pages = once()
    before = given.values if given.scales is None else (given.values, given.scales)
    want, want_pages = reference.ragged_paged_attention(
        given.q, given.k, given.v, before, *given.step, scale=scale, **given.options
    )
    real = given.num_real_tokens
    tolerance = ATTENTION[dtype]
    np.testing.assert_allclose(np.asarray(out, np.float32)[:real], want[:real], atol=tolerance, rtol=0)
    # Only page 0, where padding goes, may differ; all else is as the reference left it, bit for bit.
    for got, expected in zip(_plain(pages, layout), _pair(want_pages), strict=True):
        np.testing.assert_array_equal(got[:, 1:], expected.astype(np.float32)[:, 1:])
    again, _ = once()
    np.testing.assert_array_equal(np.asarray(out[:real], np.float32), np.asarray(again[:real], np.float32))


def _static(options: dict) -> dict:
    return {name: value for name, value in options.items() if not isinstance(value, np.ndarray)}


def _arrays(options: dict) -> dict:
    return {name: value for name, value in options.items() if isinstance(value, np.ndarray)}


def _pair(pages) -> tuple:
    return pages if isinstance(pages, tuple) else (pages,)


def _plain(pages, layout: KVLayout) -> list[np.ndarray]:
    values, *scales = _pair(pages)
    values = layout.to_canonical(values).transpose(0, 1, 3, 4, 2, 5)
    return [np.asarray(array, np.float32) for array in (values, *scales)]
