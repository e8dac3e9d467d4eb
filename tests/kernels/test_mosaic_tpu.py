"""The TPU kernels against the float32 reference, simulated: copies as late as allowed, races are errors."""

import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import interpret
from pallas_kernels.ragged_paged_attention.mosaic_tpu import layout, unsupported
from pallas_kernels.ragged_paged_attention.spec import AttentionSpec
from tests.kernels.ragged_cases import Case, check


@pytest.fixture(autouse=True)
def fresh_interpreter():
    yield
    interpret.reset()


def run(case: Case, dtype: str = "float32") -> None:
    check(case, "mosaic_tpu", dtype)
    assert not interpret.races_found()


SINKS = np.array([-1.0, 0.0, 1.0, 5.0], np.float32)
MIXED = ((1, 40), (1, 129), (64, 64), (3, 200), (70, 71))

# In simulation an edge block is 128 tokens, a compute block 256, a fetch 512, and a query block 2 * aligned tokens.
FAST = {
    "decode": Case(rows=((1, 1), (1, 16), (1, 17), (1, 600)), page_size=16),
    "mixed": Case(rows=((1, 40), (1, 129), (20, 20), (3, 200), (9, 571)), num_tokens=48, num_rows=8, page_size=16),
    "window, soft cap, sinks": Case(rows=((1, 300), (3, 19), (20, 300)), page_size=16,
                                    options={"window": 20, "soft_cap": 2.0, "sinks": SINKS}),
    "chunks": Case(rows=((1, 300), (3, 33), (20, 290)), page_size=16, options={"chunk": 24}),
    "bias and trees of two words": Case(rows=((1, 130), (40, 90), (3, 9)), page_size=16, tree_words=2, bias=True),
    "int8": Case(rows=((1, 40), (9, 40)), page_size=128, kv_dtype="int8"),
}  # fmt: skip

CASES = {
    "no rows": Case(rows=(), num_rows=4, num_tokens=16, page_size=16),
    "head 128, one kv head of 8": Case(rows=((1, 33), (20, 40)), head_dim=128, page_size=16, heads=(8, 1)),
    "window": Case(rows=((1, 300), (3, 19), (20, 300)), page_size=16, options={"window": 20}),
    "window over blocks": Case(rows=((1, 1200), (70, 1300)), page_size=16, options={"window": 700}),
    "bias": Case(rows=((1, 1), (1, 130), (9, 140)), page_size=16, bias=True),
    "decode padded rows": Case(rows=((1, 5),), num_rows=4, num_tokens=4, page_size=16),
    "more rows than one program": Case(rows=((1, 20),) * 11, num_rows=12, num_tokens=12, page_size=16),
    "one long row among short ones": Case(rows=((1, 3), (1, 700), (1, 2), (1, 1)), page_size=16),
    "prefill": Case(rows=((100, 100),), page_size=16),
    "chunk in the middle": Case(rows=((37, 350),), page_size=16),
    "mixed": Case(rows=MIXED, num_tokens=160, num_rows=8, page_size=16),
    "whole pages": Case(rows=((1, 16), (16, 16), (32, 64), (8, 8)), page_size=16),
    "one head": Case(rows=((1, 20), (20, 20)), heads=(1, 1), page_size=16),
    "three queries a kv head": Case(rows=((1, 20), (20, 20)), heads=(9, 3), page_size=16),
    "one kv head of 16": Case(rows=((1, 20), (20, 20)), heads=(16, 1), page_size=16),
    "many kv heads": Case(rows=((1, 20), (20, 20)), heads=(16, 16), page_size=16),
    "head 64": Case(rows=((1, 33), (20, 40)), head_dim=64, page_size=16),
    "head 80": Case(rows=((1, 33), (20, 40)), head_dim=80, page_size=16),
    "head 128": Case(rows=((1, 33), (20, 40)), head_dim=128, page_size=16),
    "head 256": Case(rows=((1, 33), (20, 40)), head_dim=256, page_size=16),
    "page 32": Case(rows=((1, 200), (20, 140)), page_size=32),
    "page 64, head 128": Case(rows=((1, 200), (20, 140)), page_size=64, head_dim=128),
    "page 128": Case(rows=((1, 200), (20, 140)), page_size=128),
    "page 256": Case(rows=((1, 300), (20, 257)), page_size=256),
    "window longer than the row": Case(rows=((1, 30), (9, 9)), page_size=16, options={"window": 300}),
    "window of one": Case(rows=((1, 30), (9, 40)), page_size=16, options={"window": 1}),
    "wide window": Case(rows=((1, 600), (40, 600)), page_size=16, options={"window": 290}),
    "chunks over blocks": Case(rows=((1, 1200), (1, 1401), (70, 1420)), page_size=16, options={"chunk": 700}),
    "chunks of one": Case(rows=((1, 30), (9, 40)), page_size=16, options={"chunk": 1}),
    "whole chunks": Case(rows=((1, 256), (1, 257), (40, 600)), page_size=16, options={"chunk": 256}),
    "tree in chunks": Case(rows=((9, 140), (30, 31)), tree_words=1, page_size=16, options={"chunk": 20}),
    "int8, chunks": Case(rows=((1, 300), (9, 240)), kv_dtype="int8", page_size=128, options={"chunk": 50}),
    "soft cap": Case(rows=((1, 30), (9, 40)), page_size=16, options={"soft_cap": 2.0}),
    "sinks": Case(rows=((1, 30), (9, 40)), page_size=16, options={"sinks": SINKS}),
    "shared prefix": Case(rows=((1, 20), (1, 30)), shared_pages=True, page_size=16),
    "bias over blocks": Case(rows=((1, 300), (9, 400), (12, 12)), bias=True, page_size=16),
    "bias and soft cap": Case(rows=((1, 30), (9, 40)), bias=True, page_size=16, options={"soft_cap": 2.0}),
    "bias, page 128": Case(rows=((1, 300), (9, 400)), bias=True, page_size=128),
    "trees": Case(rows=((1, 30), (9, 140), (32, 32), (5, 300)), tree_words=1, page_size=16),
    "trees of two words beside a long chunk": Case(rows=((40, 90), (3, 9), (90, 100)), tree_words=2, page_size=16),
    "tree in a window": Case(rows=((9, 140), (30, 31)), tree_words=1, page_size=16, options={"window": 20}),
    "tree with bias": Case(rows=((9, 140), (30, 31)), tree_words=1, page_size=16, bias=True),
    "int8, head 128": Case(rows=((1, 30), (9, 40), (20, 20)), kv_dtype="int8", page_size=128, head_dim=128),
    "int8, bias, page 128": Case(rows=((1, 30), (9, 240)), kv_dtype="int8", bias=True, page_size=128),
    "int8, soft cap, window, sinks": Case(rows=((1, 30), (9, 240)), kv_dtype="int8", page_size=128,
                                          options={"soft_cap": 2.0, "window": 50, "sinks": SINKS}),
    "fp8": Case(rows=((1, 30), (9, 40), (20, 20)), kv_dtype="float8_e4m3fn", page_size=128),
}  # fmt: skip


@pytest.mark.parametrize("name", FAST)
def test_named(name: str):
    run(FAST[name])


def test_bfloat16():
    run(replace(FAST["mixed"], head_dim=128), dtype="bfloat16")


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*FAST, *CASES])
def test_all(name: str, dtype: str):
    run((FAST | CASES)[name], dtype)


row = st.tuples(st.integers(2, 40), st.integers(0, 300)).map(lambda r: (r[0], r[0] + r[1]))
decode_row = st.integers(1, 600).map(lambda length: (1, length))


def random_batches(examples: int):
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(decode=st.lists(decode_row, max_size=4), chunks=st.lists(row, max_size=3), seed=st.integers(0, 1000),
           reach=st.sampled_from([{}, {"window": 1}, {"window": 100}, {"chunk": 77}]),
           heads=st.sampled_from([(4, 2), (3, 3), (8, 1)]),
           page_size=st.sampled_from([16, 128]), dtype=st.sampled_from(["float32", "bfloat16"]))  # fmt: skip
    def batches(decode, chunks, seed, reach, heads, page_size, dtype):
        rows = (*decode, *chunks)
        if rows:
            case = Case(rows=rows, heads=heads, num_rows=7, num_tokens=128, seed=seed, page_size=page_size,
                        options=reach)  # fmt: skip
            run(case, dtype)

    return batches


test_random_batches = random_batches(2)
test_many_random_batches = pytest.mark.kernels(random_batches(60))

SPEC = dict(num_heads=8, num_kv_heads=2, head_dim=128, page_size=128, dtype=jnp.dtype("bfloat16"),
            kv_dtype=jnp.dtype("bfloat16"))  # fmt: skip


@pytest.mark.parametrize("change, missing", [
    ({}, None),
    ({"page_size": 8}, "page_size=8 with bfloat16 pages; it takes powers of two from 16 .* such as 16"),
    ({"page_size": 16, "kv_dtype": jnp.dtype("int8")}, "page_size=16 with int8 pages; .* from 128 .* such as 128"),
    ({"page_size": 48}, "such as 64"),
    ({"head_dim": 512}, "head_dim=512; it takes up to 256"),
    ({"dtype": jnp.dtype("float16")}, "queries of float16"),
])  # fmt: skip
def test_what_it_cannot_do_is_said_with_what_fits(change, missing):
    said = unsupported(AttentionSpec(**{**SPEC, **change}), "TPU v6 lite")
    assert said is None if missing is None else re.search(missing, said or "")
    assert str(unsupported(AttentionSpec(**SPEC), "TPU v99")).startswith("no numbers for the device kind 'TPU v99'")


@pytest.mark.parametrize("head_dim, shape", [
    (16, (1, 2, 16, 128)), (64, (1, 2, 16, 128)), (80, (2, 2, 16, 128)), (128, (2, 2, 16, 128)),
    (256, (2, 2, 16, 256)),
])  # fmt: skip
def test_rows_are_whole_lanes(head_dim, shape):
    """Small heads hold K and V in one row, so that nothing of a tile is empty."""
    found = layout(num_layers=3, num_pages=5, page_size=16, num_kv_heads=2, head_dim=head_dim, dtype=jnp.bfloat16)
    assert found.shape == (3, 5, *shape)
