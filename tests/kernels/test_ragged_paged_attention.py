"""Every attention backend against the dense float32 reference, which hand-worked numbers pin."""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention import reference
from pallas_kernels.ragged_paged_attention.api import KVLayout, ragged_paged_attention
from tests.tolerances import ATTENTION

LAYERS, LAYER = 2, 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """(new tokens, length with them) of each row; rows of one token first."""

    rows: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    page_size: int = 8
    num_tokens: int = 0  # 0: just enough
    num_rows: int = 0
    shared_pages: bool = False  # rows 0 and 1 share their first page
    seed: int = 0
    options: dict = field(default_factory=dict)


def inputs(case: Case, dtype=jnp.float32):
    """Random q, k, v and cache. Whatever nobody may read, unused pages and slots beyond a row's length, is NaN."""
    rng = np.random.default_rng(case.seed)
    (n, k), h, b = case.heads, case.head_dim, case.page_size
    lens, kv_lens = [q for q, _ in case.rows], [length for _, length in case.rows]
    num_rows = max(case.num_rows, len(lens), 1)
    decode = next((i for i, q in enumerate(lens) if q != 1), len(lens))
    num_tokens = max(case.num_tokens, sum(lens), num_rows if decode == len(lens) else num_rows + 1)
    pages_of = [-(-length // b) for length in kv_lens]
    row_pages = max([*pages_of, 1])
    num_pages = sum(pages_of) + 3
    free = list(rng.permutation(np.arange(1, num_pages)))
    table = np.zeros((num_rows, row_pages), np.int32)
    for row, count in enumerate(pages_of):
        table[row, :count] = [free.pop() for _ in range(count)]
    if case.shared_pages:
        table[1, 0] = table[0, 0]
    cache = rng.standard_normal((LAYERS, num_pages, 2, k, b, h), np.float32)
    used = {int(p) for row, count in enumerate(pages_of) for p in table[row, :count]}
    cache[:, [p for p in range(num_pages) if p not in used]] = np.nan
    for row, length in enumerate(kv_lens):
        if length % b:
            cache[:, table[row, length // b], :, :, length % b :] = np.nan
    cu_q_lens = np.zeros(num_rows + 1, np.int32)
    cu_q_lens[1 : len(lens) + 1] = np.cumsum(lens)
    cu_q_lens[len(lens) + 1 :] = sum(lens)
    padded_kv_lens = np.zeros(num_rows, np.int32)
    padded_kv_lens[: len(lens)] = kv_lens
    q, key, value = (rng.standard_normal((num_tokens, heads, h), np.float32) for heads in (n, k, k))
    cast = partial(jnp.asarray, dtype=dtype)
    distribution = np.array([decode, decode, len(lens)], np.int32)
    return (cast(q), cast(key), cast(value), cast(cache), jnp.int32(LAYER), table, padded_kv_lens, cu_q_lens,
            distribution)  # fmt: skip


def check(case: Case, dtype: str = "float32") -> None:
    args = inputs(case, jnp.dtype(dtype))
    scale = case.head_dim**-0.5
    run = jax.jit(partial(ragged_paged_attention, scale=scale, **case.options))
    out, cache = run(*args)
    as_float32 = [np.asarray(a, np.float32) if a.dtype == jnp.bfloat16 else np.asarray(a) for a in args]
    want, want_cache = reference.ragged_paged_attention(*as_float32, scale=scale, **case.options)
    real = int(args[7][-1])
    np.testing.assert_allclose(np.asarray(out, np.float32)[:real], want[:real], atol=ATTENTION[dtype], rtol=0)
    # Only page 0, where padding goes, may differ; all else is as the reference left it, bit for bit.
    np.testing.assert_array_equal(np.asarray(cache, np.float32)[:, 1:], want_cache[:, 1:])
    again, _ = run(*args)
    np.testing.assert_array_equal(np.asarray(out[:real]), np.asarray(again[:real]))


def test_reference_by_hand():
    """Two tokens, one head of size 2: the second sees both. Scores 0 and ln 3 weigh 1/4 and 3/4."""
    q = np.array([[[9.0, 9.0]], [[1.0, 0.0]]], np.float32)
    k = np.array([[[0.0, 5.0]], [[np.log(3.0), 7.0]]], np.float32)
    v = np.array([[[4.0, 0.0]], [[0.0, 8.0]]], np.float32)
    cache = np.zeros((1, 2, 2, 1, 4, 2), np.float32)
    out, cache = reference.ragged_paged_attention(
        q, k, v, cache, 0, np.array([[1]]), np.array([2]), np.array([0, 2]), np.array([0, 0, 1]), scale=1.0
    )
    np.testing.assert_allclose(out[:, 0], [[4.0, 0.0], [1.0, 6.0]], atol=1e-6)
    np.testing.assert_array_equal(cache[0, 1, 0, 0, :2], k[:, 0])
    np.testing.assert_array_equal(cache[0, 1, 1, 0, :2], v[:, 0])


@pytest.mark.parametrize("window, sink, want", [(1, None, [0.0, 8.0]), (None, np.log(4.0), [0.5, 3.0])])
def test_reference_window_and_sink_by_hand(window, sink, want):
    """A window of 1 sees itself only. A sink of ln 4 doubles the sum of weights 1 + 3."""
    cache = np.zeros((1, 2, 2, 1, 4, 2), np.float32)
    cache[0, 1, :, 0, 0] = [[0.0, 5.0], [4.0, 0.0]]
    out, _ = reference.ragged_paged_attention(
        np.array([[[1.0, 0.0]]], np.float32), np.array([[[np.log(3.0), 7.0]]], np.float32),
        np.array([[[0.0, 8.0]]], np.float32), cache, 0, np.array([[1]]), np.array([2]), np.array([0, 1]),
        np.array([1, 1, 1]), scale=1.0, window=window, sinks=None if sink is None else np.array([sink]),
    )  # fmt: skip
    np.testing.assert_allclose(out[0, 0], want, atol=1e-6)


CASES = {
    "decode": Case(rows=((1, 1), (1, 8), (1, 9), (1, 300))),
    "decode padded rows": Case(rows=((1, 5),), num_rows=4, num_tokens=4),
    "one long row among short ones": Case(rows=((1, 3), (1, 700), (1, 2), (1, 1))),
    "prefill": Case(rows=((100, 100),)),
    "chunk in the middle": Case(rows=((37, 150),)),
    "mixed": Case(rows=((1, 40), (1, 129), (64, 64), (3, 200), (70, 71)), num_tokens=160, num_rows=8),
    "whole pages": Case(rows=((1, 16), (8, 16), (16, 16), (8, 8))),
    "no rows": Case(rows=(), num_rows=4, num_tokens=16),
    "one head": Case(rows=((1, 20), (20, 20)), heads=(1, 1)),
    "one kv head of 16": Case(rows=((1, 20), (20, 20)), heads=(16, 1)),
    "head size 128, page 16": Case(rows=((1, 33), (20, 40)), head_dim=128, page_size=16),
    "page 128": Case(rows=((1, 200), (20, 140)), page_size=128),
    "window": Case(rows=((1, 300), (3, 9), (40, 200)), options={"window": 8}),
    "window longer than the row": Case(rows=((1, 30), (9, 9)), options={"window": 300}),
    "soft cap": Case(rows=((1, 30), (9, 40)), options={"soft_cap": 2.0}),
    "sinks": Case(rows=((1, 30), (9, 40)), options={"sinks": np.array([-1.0, 0.0, 1.0, 5.0], np.float32)}),
    "shared prefix": Case(rows=((1, 20), (1, 30)), shared_pages=True),
}


@pytest.mark.parametrize("name", CASES)
def test_named(name: str):
    check(CASES[name])


@pytest.mark.parametrize("name", ["decode", "mixed", "window"])
def test_bfloat16(name: str):
    check(CASES[name], "bfloat16")


row = st.tuples(st.integers(2, 40), st.integers(0, 150)).map(lambda r: (r[0], r[0] + r[1]))
decode_row = st.integers(1, 300).map(lambda length: (1, length))


@settings(max_examples=25, deadline=None)
@given(decode=st.lists(decode_row, max_size=5), chunks=st.lists(row, max_size=4), seed=st.integers(0, 1000),
       window=st.sampled_from([None, 1, 16, 100]), heads=st.sampled_from([(4, 2), (3, 3), (6, 1)]))
def test_random_batches(decode, chunks, seed, window, heads):
    """Fixed shapes, so that few programs are compiled."""
    rows = (*decode, *chunks)
    if not rows:
        return
    check(Case(rows=rows, heads=heads, num_rows=9, num_tokens=192, seed=seed, options={"window": window}))


def test_a_decode_only_batch_fills_a_decode_only_shape():
    """T == S is the shape without chunks: the same numbers as in a larger shape."""
    case = Case(rows=((1, 5), (1, 77), (1, 130)), num_rows=4, num_tokens=4)
    wide = Case(rows=case.rows, num_rows=4, num_tokens=32)
    small, large = inputs(case), inputs(wide)
    for at in range(3):  # the same three tokens
        large = (*large[:at], large[at].at[:3].set(small[at][:3]), *large[at + 1 :])
    large = (*large[:3], small[3], *large[4:5], small[5], *large[6:])
    run = jax.jit(partial(ragged_paged_attention, scale=0.25))
    np.testing.assert_allclose(np.asarray(run(*small)[0])[:3], np.asarray(run(*large)[0])[:3], atol=1e-6)


def test_layout_moves_through_the_canonical_order():
    layout = KVLayout(num_layers=2, num_pages=3, page_size=4, num_kv_heads=2, head_dim=8, dtype=jnp.dtype("float32"))
    pages = jnp.arange(np.prod(layout.shape), dtype=jnp.float32).reshape(layout.shape)
    canonical = layout.to_canonical(pages)
    assert canonical.shape == (2, 3, 4, 2, 2, 8)
    np.testing.assert_array_equal(layout.from_canonical(canonical), pages)
    assert layout.page_bytes * layout.num_pages == pages.nbytes
