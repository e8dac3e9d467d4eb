"""Latent attention: the reference by hand and against the naive form, and every backend against the reference."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.devices import DEVICES
from pallas_kernels.latent_attention import reference
from pallas_kernels.latent_attention.api import LatentLayout, LatentSpec, choose_backend
from pallas_kernels.latent_attention.config import Problem, TPUBlocks
from tests.kernels.latent_cases import check
from tests.kernels.ragged_cases import Case


def test_reference_by_hand():
    """Latents [1, 0] and [0, 2] with rotated keys ln 3 and 0: the second token's scores are ln 3 and 0, its output
    3/4 of the one and 1/4 of the other."""
    q_latent = np.array([[[9.0, 9.0]], [[0.0, 0.0]]], np.float32)
    q_rope = np.array([[[9.0]], [[1.0]]], np.float32)
    latent, rope = np.array([[1.0, 0.0], [0.0, 2.0]], np.float32), np.array([[np.log(3.0)], [0.0]], np.float32)
    pages = np.full((1, 2, 4, 3), np.nan, np.float32)
    out, pages = reference.latent_attention(
        q_latent, q_rope, latent, rope, pages, 0, np.array([[1]]), np.array([2]), np.array([0, 2]),
        np.array([0, 0, 1]), scale=1.0,
    )  # fmt: skip
    np.testing.assert_allclose(out[:, 0], [[1.0, 0.0], [0.75, 0.5]], atol=1e-6)
    np.testing.assert_array_equal(pages[0, 1, :2], [[1.0, 0.0, np.log(np.float32(3.0))], [0.0, 2.0, 0.0]])
    assert np.isnan(pages[0, 0]).all() and np.isnan(pages[0, 1, 2:]).all()


def rotate(x: np.ndarray, position: np.ndarray) -> np.ndarray:
    """RoPE on [tokens, ..., E], halves paired."""
    half = x.shape[-1] // 2
    angle = position[:, None] * 10000.0 ** (-np.arange(half) / half)
    angle = angle.reshape(len(position), *[1] * (x.ndim - 2), half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


@pytest.mark.parametrize("yarn_factor", [None, 40.0])
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_absorbed_equals_naive(backend: str, yarn_factor: float | None):
    """Multi-head attention with keys and values made from the latents, as the paper defines it, against the absorbed
    form: up-projections folded into the queries and the output."""
    rng = np.random.default_rng(3)
    tokens, heads, nope, rope_dim, value, rank, model = 37, 4, 24, 8, 20, 32, 48

    def weights(*shape):
        return rng.standard_normal(shape) * shape[0] ** -0.5

    x = rng.standard_normal((tokens, model))
    latent = x @ weights(model, rank)
    latent /= np.sqrt((latent**2).mean(-1, keepdims=True) + 1e-6)  # RMSNorm
    position = np.arange(tokens)
    rope = rotate(x @ weights(model, rope_dim), position)
    q = (x @ weights(model, heads * (nope + rope_dim))).reshape(tokens, heads, -1)
    q_nope, q_rope = q[..., :nope], rotate(q[..., nope:], position)
    up_key, up_value = weights(rank, heads * nope), weights(rank, heads * value)
    scale = (nope + rope_dim) ** -0.5
    if yarn_factor is not None:
        scale *= (0.1 * np.log(yarn_factor) + 1) ** 2

    keys = (latent @ up_key).reshape(tokens, heads, nope)
    keys = np.concatenate([keys, np.repeat(rope[:, None], heads, axis=1)], axis=-1)
    values = (latent @ up_value).reshape(tokens, heads, value)
    scores = np.einsum("tnh,snh->nts", np.concatenate([q_nope, q_rope], axis=-1), keys) * scale
    scores = np.where(np.tril(np.ones((tokens, tokens), bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    naive = np.einsum("nts,snv->tnv", shares / shares.sum(-1, keepdims=True), values)

    q_latent = np.einsum("tnh,rnh->tnr", q_nope, up_key.reshape(rank, heads, nope))
    pages = np.zeros((1, 4, 16, rank + rope_dim))
    arguments = [np.asarray(a, np.float32) for a in (q_latent, q_rope, latent, rope, pages)]
    step = (np.int32(0), np.array([[3, 1, 2]], np.int32), np.array([tokens], np.int32),
            np.array([0, tokens], np.int32), np.array([0, 0, 1], np.int32))  # fmt: skip
    if backend == "reference":
        out, _ = reference.latent_attention(*arguments, *step, scale=scale)
    else:
        spec = LatentSpec(num_heads=heads, latent_dim=rank, rope_dim=rope_dim, page_size=16,
                          dtype=jnp.dtype("float32"), kv_dtype=jnp.dtype("float32"))  # fmt: skip
        attend: Any = choose_backend("xla", spec, jax.devices("cpu")[0]).attend
        out, _ = attend(*map(jnp.asarray, (*arguments, *step)), scale=scale)
    absorbed = np.einsum("tnr,rnv->tnv", out, up_value.reshape(rank, heads, value))
    np.testing.assert_allclose(absorbed, naive, atol=1e-4)


def latent_case(rows, heads: int = 16, page_size: int = 32, **fields) -> Case:
    return Case(rows=rows, heads=(heads, 1), head_dim=128, page_size=page_size, **fields)


CASES = {
    "decode": latent_case(((1, 1), (1, 32), (1, 33), (1, 700))),
    "mixed": latent_case(((1, 40), (1, 129), (9, 9), (3, 200), (18, 550)), num_tokens=40, num_rows=8),
    "whole pages": latent_case(((1, 64), (8, 64), (64, 64), (32, 32))),
    "padded rows": latent_case(((1, 5),), num_rows=4, num_tokens=4),
    "no rows": latent_case((), num_rows=4, num_tokens=16),
    "one head": latent_case(((1, 20), (20, 20)), heads=1),
    "128 heads": latent_case(((1, 70), (5, 40)), heads=128),
    "page 128": latent_case(((1, 200), (20, 140)), page_size=128),
    "shared prefix": latent_case(((1, 70), (1, 90)), shared_pages=True),
    "soft cap": latent_case(((1, 30), (9, 40)), options={"soft_cap": 2.0}),
    "trees": latent_case(((1, 30), (9, 540), (40, 300), (5, 255)), tree_words=2),
}
SMALL_BLOCKS = TPUBlocks(kv_tokens=512, decode_tokens=512, chunk_tokens=256, query_tokens=8, buffers=3)


@pytest.mark.parametrize("name", CASES)
def test_xla(name: str):
    check(CASES[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla_mixed_dtypes(dtype: str):
    check(CASES["mixed"], dtype=dtype)


SLOW = ["trees"]


@pytest.mark.parametrize("name", [
    "decode", "mixed", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    *(pytest.param(name, marks=pytest.mark.kernels) for name in CASES if name not in ("decode", "mixed", *SLOW)),
])  # fmt: skip
def test_mosaic_tpu(name: str):
    check(CASES[name], "mosaic_tpu", blocks=SMALL_BLOCKS)


def test_mosaic_tpu_bfloat16():
    check(latent_case(((1, 40), (9, 45)), num_rows=3), "mosaic_tpu", "bfloat16", blocks=SMALL_BLOCKS)


needs_gpu_interpreter = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Mosaic GPU kernels: jax 0.12")


@needs_gpu_interpreter
@pytest.mark.parametrize("name", [
    "mixed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("decode", *SLOW)),
    *(pytest.param(name, marks=pytest.mark.kernels) for name in CASES if name not in ("decode", "mixed", *SLOW)),
])  # fmt: skip
def test_mosaic_gpu(name: str):
    check(CASES[name], "mosaic_gpu")


@needs_gpu_interpreter
def test_mosaic_gpu_bfloat16():
    check(latent_case(((1, 40), (9, 45)), num_rows=3), "mosaic_gpu", "bfloat16")


decode_row = st.integers(1, 600).map(lambda length: (1, length))
chunk_row = st.tuples(st.integers(2, 40), st.integers(0, 300)).map(lambda r: (r[0], r[0] + r[1]))
batch = dict(decode=st.lists(decode_row, max_size=4), chunks=st.lists(chunk_row, max_size=3), seed=st.integers(0, 999))


def check_random(backend: str, decode: list, chunks: list, seed: int, **options) -> None:
    """Fixed shapes, so that few programs are compiled."""
    if decode or chunks:
        rows = (*decode, *chunks)
        check(latent_case(rows, heads=5, num_rows=7, num_tokens=128, seed=seed), backend, **options)


@settings(max_examples=3, deadline=None)
@given(**batch)
def test_random_batches_xla(decode, chunks, seed):
    check_random("xla", decode, chunks, seed)


@pytest.mark.kernels
@settings(max_examples=30, deadline=None)
@given(**batch)
def test_random_batches_mosaic_tpu(decode, chunks, seed):
    check_random("mosaic_tpu", decode, chunks, seed, blocks=SMALL_BLOCKS)


@needs_gpu_interpreter
@pytest.mark.kernels
@settings(max_examples=30, deadline=None)
@given(**batch)
def test_random_batches_mosaic_gpu(decode, chunks, seed):
    check_random("mosaic_gpu", decode, chunks, seed)


def test_a_cache_of_latents_is_71_times_smaller():
    """576 numbers a token and layer instead of 128 heads of 192 and 128."""
    fields: dict[str, Any] = dict(num_layers=61, num_pages=10, page_size=64, latent_dim=512, rope_dim=64,
                                  dtype=jnp.dtype("bfloat16"))  # fmt: skip
    for pairs in (False, True):
        layout = LatentLayout(**fields, pairs=pairs)
        assert layout.page_bytes == 61 * 64 * 576 * 2
        assert layout.page_bytes * layout.num_pages == np.prod(layout.shape) * 2
    assert 128 * (192 + 128) // 576 == 71


@pytest.mark.parametrize("pairs", [False, True])
def test_layout_moves_through_the_canonical_order(pairs: bool):
    layout = LatentLayout(num_layers=2, num_pages=3, page_size=4, latent_dim=6, rope_dim=2, dtype=jnp.dtype("float32"),
                          pairs=pairs)  # fmt: skip
    canonical = np.random.default_rng(0).standard_normal((2, 3, 4, 8), np.float32)
    pages = layout.from_canonical(jnp.asarray(canonical))
    assert pages.shape == layout.shape
    np.testing.assert_array_equal(layout.to_canonical(pages), canonical)
    if pairs:
        np.testing.assert_array_equal(pages[1, 2, 1], np.concatenate([canonical[1, 2, 2, :6], canonical[1, 2, 3, :6],
                                                                       canonical[1, 2, 2, 6:], canonical[1, 2, 3, 6:]]))


SPEC: dict[str, Any] = dict(num_heads=16, page_size=64, dtype=jnp.dtype("bfloat16"), kv_dtype=jnp.dtype("bfloat16"))


@pytest.mark.parametrize("field, value, missing", [
    ("page_size", 48, "page_size=48 must be a multiple of 32"),
    ("rope_dim", 32, "rope_dim=32 must be 64"),
    ("latent_dim", 96, "latent_dim=96 must be a multiple of 128"),
    ("kv_dtype", jnp.dtype("int8"), "kv_dtype=int8 must be one of bfloat16, float32"),
    ("num_heads", 300, "num_heads=300 must be at most 256"),
])  # fmt: skip
def test_what_the_tpu_kernel_lacks_is_said(field: str, value, missing: str):
    with pytest.raises(ValueError, match=missing):
        choose_backend("mosaic_tpu", LatentSpec(**{**SPEC, field: value}), jax.devices("cpu")[0])


@needs_gpu_interpreter
@pytest.mark.parametrize("fields, missing", [
    ({"page_size": 48}, "page_size=48 must divide 64"),
    ({"latent_dim": 576}, "latent_dim=576 must be a multiple of 128"),
    ({"kv_dtype": jnp.dtype("int8")}, "kv_dtype=int8 must be bfloat16"),
    ({"kv_dtype": jnp.dtype("float32")}, "must be equal"),
])  # fmt: skip
def test_what_the_gpu_kernel_lacks_is_said(fields: dict, missing: str):
    with pytest.raises(ValueError, match=missing):
        choose_backend("mosaic_gpu", LatentSpec(**{**SPEC, **fields}), jax.devices("cpu")[0])


def test_the_backend_is_chosen_once():
    cpu = jax.devices("cpu")[0]
    assert choose_backend("auto", LatentSpec(**SPEC), cpu).choice.name == "xla"
    simulated = choose_backend("mosaic_tpu", LatentSpec(**SPEC), cpu)
    assert simulated.choice.simulated and simulated.layout(3, 5).shape == (3, 5, 32, 1152)
    with pytest.raises(ValueError, match="kv_dtype=int8"):
        choose_backend("xla", LatentSpec(**{**SPEC, "kv_dtype": jnp.dtype("int8")}), cpu)
    with pytest.raises(ValueError, match="dtype=float64 must be one of"):
        choose_backend("xla", LatentSpec(**{**SPEC, "dtype": np.dtype("float64")}), cpu)
    with pytest.raises(ValueError, match="page_size=0 must be at least 1"):
        LatentSpec(**{**SPEC, "page_size": 0})
    with pytest.raises(ValueError, match="would copy the whole cache"):
        choose_backend("xla", LatentSpec(**SPEC), SimpleNamespace(platform="tpu", device_kind="TPU v6 lite"))


def problem(heads: int) -> Problem:
    return Problem(heads=heads, latent_dim=512, rope_dim=64, page_size=64, itemsize=2, kv_itemsize=2)


@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("device", ["v5e", "v6e", "v7x"])
def test_blocks_fit_the_chip(device: str, heads: int):
    chosen = problem(heads).blocks(DEVICES[device])
    assert problem(heads).estimate(chosen).block_bytes < DEVICES[device].vmem_bytes
    assert chosen.kv_tokens % 64 == 0


def test_blocks_that_do_not_fit_are_refused_with_those_that_do():
    too_many = TPUBlocks(kv_tokens=2048, decode_tokens=512, chunk_tokens=512, query_tokens=256)
    with pytest.raises(ValueError, match="needs .* bytes and v7x has 67,108,864 bytes of VMEM; the nearest that fits"):
        problem(128).check(too_many, DEVICES["v7x"])
    with pytest.raises(ValueError, match="decode_tokens=100 must divide"):
        TPUBlocks(kv_tokens=512, decode_tokens=100, chunk_tokens=256, query_tokens=8)
    with pytest.raises(ValueError, match="kv_tokens=512 must be a multiple of page_size=64000"):
        Problem(**{**vars(problem(16)), "page_size": 64000}).check(SMALL_BLOCKS, DEVICES["v6e"])
