"""The reference by hand, and the XLA backend against it. The kernels' tests draw from the same cases."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.backends import choose
from pallas_kernels.ragged_paged_attention import reference
from pallas_kernels.ragged_paged_attention.api import AttentionSpec, KVLayout, choose_backend
from pallas_kernels.ragged_paged_attention.xla import ragged_paged_attention
from quant.kv import QuantizedPages, quantize_rows
from tests.kernels.ragged_cases import Case, check, inputs


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


@pytest.mark.parametrize("cached, want", [(1, [1.0, 6.0]), (2, [0.0, 8.0]), (3, [1.0, 6.0])])
def test_reference_chunks_by_hand(cached, want):
    """Chunks of 2: the token at index 1 or 3 sees the one before it, as without chunks; that at 2 only itself."""
    cache = np.zeros((1, 2, 2, 1, 4, 2), np.float32)
    cache[0, 1, :, 0, 0] = cache[0, 1, :, 0, 2] = [[0.0, 5.0], [4.0, 0.0]]
    cache[0, 1, :, 0, 1] = 9.0  # what a chunk ends with
    out, _ = reference.ragged_paged_attention(
        np.array([[[1.0, 0.0]]], np.float32), np.array([[[np.log(3.0), 7.0]]], np.float32),
        np.array([[[0.0, 8.0]]], np.float32), cache, 0, np.array([[1]]), np.array([cached + 1]), np.array([0, 1]),
        np.array([1, 1, 1]), scale=1.0, chunk=2,
    )  # fmt: skip
    np.testing.assert_allclose(out[0, 0], want, atol=1e-6)


CASES = {
    "decode": Case(rows=((1, 1), (1, 8), (1, 9), (1, 300))),
    "decode padded rows": Case(rows=((1, 5),), num_rows=4, num_tokens=4),
    "one long row among short ones": Case(rows=((1, 3), (1, 700), (1, 2), (1, 1))),
    "prefill": Case(rows=((100, 100),)),
    "short and long chunks": Case(rows=((1, 9), (31, 64), (127, 127), (128, 400), (129, 130)), num_tokens=512),
    "chunk in the middle": Case(rows=((37, 150),)),
    "mixed": Case(rows=((1, 40), (1, 129), (64, 64), (3, 200), (70, 71)), num_tokens=160, num_rows=8),
    "a few tokens a row": Case(rows=((2, 300), (9, 9), (9, 400), (3, 130), (5, 256)), num_tokens=72, num_rows=8),
    "a few tokens a row, long rows between": Case(
        rows=((1, 9), *((2, 20),) * 5, (40, 50), *((4, 70),) * 7, (25, 25), (3, 9)), num_tokens=128, num_rows=32,
    ),
    "a few tokens, more rows than at a time": Case(rows=((9, 40),) * 19, num_tokens=288, num_rows=32),
    "whole pages": Case(rows=((1, 16), (8, 16), (16, 16), (8, 8))),
    "no rows": Case(rows=(), num_rows=4, num_tokens=16),
    "one head": Case(rows=((1, 20), (20, 20)), heads=(1, 1)),
    "one kv head of 16": Case(rows=((1, 20), (20, 20)), heads=(16, 1)),
    "head size 128, page 16": Case(rows=((1, 33), (20, 40)), head_dim=128, page_size=16),
    "page 128": Case(rows=((1, 200), (20, 140)), page_size=128),
    "page 48 does not divide a KV block": Case(rows=((1, 200), (20, 140), (130, 300)), page_size=48),
    "page 256": Case(rows=((1, 300), (20, 257)), page_size=256),
    "window": Case(rows=((1, 300), (3, 9), (40, 200)), options={"window": 8}),
    "window longer than the row": Case(rows=((1, 30), (9, 9)), options={"window": 300}),
    "chunks": Case(rows=((1, 17), (1, 300), (3, 33), (40, 200)), options={"chunk": 16}),
    "chunks that no page or block divides": Case(rows=((1, 300), (70, 200), (150, 300)), options={"chunk": 75}),
    "chunk longer than the row": Case(rows=((1, 30), (9, 9)), options={"chunk": 300}),
    "tree in chunks": Case(rows=((9, 140), (30, 31)), tree_words=1, options={"chunk": 20}),
    "soft cap": Case(rows=((1, 30), (9, 40)), options={"soft_cap": 2.0}),
    "sinks": Case(rows=((1, 30), (9, 40)), options={"sinks": np.array([-1.0, 0.0, 1.0, 5.0], np.float32)}),
    "shared prefix": Case(rows=((1, 20), (1, 30)), shared_pages=True),
    "bias": Case(rows=((1, 1), (1, 30), (9, 40), (12, 12)), bias=True),
    "bias and soft cap": Case(rows=((1, 30), (9, 40)), bias=True, options={"soft_cap": 2.0}),
    "trees": Case(rows=((1, 30), (9, 140), (32, 32), (5, 300)), tree_words=1),
    "trees of two words beside a long chunk": Case(rows=((40, 90), (3, 9), (90, 100)), tree_words=2),
    "tree in a window": Case(rows=((9, 140), (30, 31)), tree_words=1, options={"window": 20}),
    "int8": Case(rows=((1, 30), (9, 40), (20, 20)), kv_dtype="int8"),
    "int8, bias": Case(rows=((1, 30), (9, 40)), kv_dtype="int8", bias=True),
    "fp8": Case(rows=((1, 30), (9, 40), (20, 20)), kv_dtype="float8_e4m3fn"),
}


@pytest.mark.parametrize("name", CASES)
def test_named(name: str):
    check(CASES[name])


@pytest.mark.parametrize("name", ["decode", "mixed", "window", "int8", "fp8"])
def test_bfloat16(name: str):
    check(CASES[name], dtype="bfloat16")


@pytest.mark.parametrize("name", ["mixed", "int8"])
def test_the_tpus_way_of_writing(name: str, monkeypatch):
    """On TPUs this backend writes token by token; run here, where it is only slower."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, tpu, default: tpu(*args))
    check(CASES[name])


row = st.tuples(st.integers(2, 40), st.integers(0, 150)).map(lambda r: (r[0], r[0] + r[1]))
decode_row = st.integers(1, 300).map(lambda length: (1, length))


@settings(max_examples=15, deadline=None)
@given(decode=st.lists(decode_row, max_size=5), chunks=st.lists(row, max_size=4), seed=st.integers(0, 1000),
       reach=st.sampled_from([{}, {"window": 16}, {"window": 100}, {"chunk": 77}]),
       heads=st.sampled_from([(4, 2), (3, 3), (6, 1)]))
def test_random_batches(decode, chunks, seed, reach, heads):
    """Fixed shapes, so that few programs are compiled."""
    rows = (*decode, *chunks)
    if not rows:
        return
    check(Case(rows=rows, heads=heads, num_rows=9, num_tokens=192, seed=seed, options=reach))


def test_a_decode_only_batch_fills_a_decode_only_shape():
    """T == S is the shape without chunks: the same numbers as in a larger shape."""
    small = inputs(Case(rows=((1, 5), (1, 77), (1, 130)), num_rows=4, num_tokens=4))
    run = jax.jit(partial(ragged_paged_attention, scale=0.25))
    tight, _ = run(small.q, small.k, small.v, small.values, *small.step)
    wide = [np.pad(a, ((0, 28), (0, 0), (0, 0))) for a in (small.q, small.k, small.v)]
    loose, _ = run(*wide, small.values, *small.step)
    np.testing.assert_allclose(tight[:3], loose[:3], atol=1e-6)


@pytest.mark.parametrize("fields", [
    {}, {"row_dim": 16}, {"row_dim": 16, "side_by_side": True}, {"dtype": jnp.dtype("int8")},
])  # fmt: skip
def test_layout_moves_through_the_canonical_order(fields):
    layout = KVLayout(**{"num_layers": 2, "num_pages": 3, "page_size": 4, "num_kv_heads": 2, "head_dim": 8,
                         "dtype": jnp.dtype("float32"), **fields})  # fmt: skip
    canonical = np.random.default_rng(0).integers(0, 99, (2, 3, 4, 2, 2, 8)).astype(layout.dtype)
    values = layout.from_canonical(jnp.asarray(canonical))
    assert values.shape == layout.shape
    np.testing.assert_array_equal(layout.to_canonical(values), canonical)
    pages = layout.zeros()
    arrays = pages if isinstance(pages, QuantizedPages) else (pages,)
    assert layout.page_bytes * layout.num_pages == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("dtype, step", [("int8", 0.5), ("float8_e4m3fn", 16)])
def test_quantized_rows(dtype, step):
    """The largest of a row is kept, the others are off by half a step at most; a row of zeros stays so."""
    rows = jnp.array([[4.0, -2.0, 1.0, 0.3], [0.0, 0.0, 0.0, 0.0], [1e-3, -5e-4, 0.0, 2e-5]])
    values, scales = quantize_rows(rows, jnp.dtype(dtype))
    assert values.dtype == jnp.dtype(dtype)
    restored = values.astype(jnp.float32) * scales[:, None]
    np.testing.assert_allclose(restored[:, 0], rows[:, 0], rtol=1e-6)
    error = np.asarray(jnp.abs(restored - rows))
    assert (error <= step * np.asarray(scales)[:, None] * 1.001).all()


SPEC = dict(num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, dtype=jnp.dtype("float32"),
            kv_dtype=jnp.dtype("float32"))  # fmt: skip


def test_the_backend_is_chosen_once_and_says_what_it_cannot_do():
    cpu = jax.devices("cpu")[0]
    assert choose_backend("auto", AttentionSpec(**SPEC), cpu).choice.name == "xla"
    with pytest.raises(ValueError, match="attention backend 'cuda' is not one of auto"):
        choose_backend("cuda", AttentionSpec(**SPEC), cpu)
    with pytest.raises(ValueError, match="num_heads=3 must be a multiple of num_kv_heads=2"):
        AttentionSpec(**{**SPEC, "num_heads": 3})
    for field in ("num_heads", "num_kv_heads", "head_dim", "page_size"):
        with pytest.raises(ValueError, match=f"{field}=0 must be at least 1"):
            AttentionSpec(**{**SPEC, field: 0})


def test_where_the_fallback_cannot_serve_either_both_reasons_are_said():
    backends = {"mosaic_tpu": lambda spec, kind: "page_size=16 must be 32", "xla": lambda spec, kind: "it would copy"}
    tpu = SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")
    said = "attention: no backend can serve this. mosaic_tpu: page_size=16 must be 32; xla: it would copy"
    with pytest.raises(ValueError, match=said):
        choose("attention", "auto", backends, None, tpu)


@pytest.mark.parametrize("change, message", [
    ({"kv_dtype": jnp.dtype("uint8")}, "uint8 pages: it takes float32, bfloat16, float16, int8, float8_e4m3fn"),
    ({"kv_dtype": jnp.dtype("float8_e5m2")}, "float8_e5m2 pages"),
    ({"dtype": jnp.dtype("float64")}, "float64 queries: it takes float32, bfloat16, float16"),
    ({"dtype": jnp.dtype("int8")}, "int8 queries"),
])  # fmt: skip
def test_numbers_that_xla_would_round_or_cannot_multiply_are_refused(change, message):
    with pytest.raises(ValueError, match=f"attention backend 'xla': {message}"):
        choose_backend("xla", AttentionSpec(**{**SPEC, **change}), jax.devices("cpu")[0])
