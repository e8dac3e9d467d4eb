"""The GPU kernel on a CPU, in Pallas' interpret mode with race detection, against the dense reference."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.interpret import reset
from pallas_kernels.ragged_paged_attention import mosaic_gpu
from pallas_kernels.ragged_paged_attention.api import AttentionSpec
from pallas_kernels.ragged_paged_attention.mosaic_gpu import schedule as plan
from pallas_kernels.ragged_paged_attention.mosaic_gpu.config import Blocks, chunk_blocks, decode_blocks
from pallas_kernels.ragged_paged_attention.reach import Reach
from tests.kernels.ragged_cases import Case, check, inputs

needs_interpreter = pytest.mark.skipif(
    tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12), reason="the GPU kernel needs jax 0.12 or newer"
)


@pytest.fixture(autouse=True)
def _forget_a_failed_kernel():
    yield
    reset()


SINKS = np.array([-1.0, 0.0, 1.0, 5.0], np.float32)
FAST = {
    "decode, cut between workers": (Case(rows=((1, 1), (1, 8), (1, 9), (1, 200))), "float32"),
    "mixed": (Case(rows=((1, 40), (40, 60), (3, 70)), num_tokens=64, num_rows=5), "float32"),
    "everything": (
        Case(rows=((1, 30), (9, 140), (5, 70)), heads=(6, 2), bias=True, tree_words=1,
             options={"window": 70, "soft_cap": 2.0, "sinks": np.tile(SINKS, 2)[:6]}),
        "float32",
    ),
    "chunks": (Case(rows=((1, 33), (1, 150), (9, 100)), options={"chunk": 24}), "float32"),
    "int8, bfloat16 queries": (
        Case(rows=((1, 50), (9, 40)), heads=(4, 1), head_dim=32, page_size=16, kv_dtype="int8", seed=1), "bfloat16",
    ),
}  # fmt: skip
SLOW = {
    "prefill of two query blocks": (Case(rows=((100, 100),)), "float32"),
    "padding": (Case(rows=((1, 5),), num_rows=4, num_tokens=4), "float32"),
    "no rows": (Case(rows=(), num_rows=4, num_tokens=16), "float32"),
    "one head": (Case(rows=((1, 20), (20, 20)), heads=(1, 1)), "bfloat16"),
    "float16": (Case(rows=((1, 20), (20, 40)), heads=(3, 3), options={"window": 25}), "float16"),
    "one kv head of 16": (Case(rows=((1, 20), (20, 20)), heads=(16, 1)), "float32"),
    "page 256": (Case(rows=((1, 300), (20, 257)), page_size=256), "bfloat16"),
    "biases of pages of 16": (Case(rows=((1, 50), (9, 40)), heads=(3, 3), page_size=16, bias=True), "float32"),
    "trees beside a long chunk": (Case(rows=((40, 90), (3, 9), (90, 100)), tree_words=2), "float32"),
    "fp8": (Case(rows=((1, 30), (20, 20)), head_dim=32, page_size=16, kv_dtype="float8_e4m3fn"), "float32"),
}
SWEEP = {
    "one long row among short ones": Case(rows=((1, 3), (1, 700), (1, 2), (1, 1))),
    "chunk in the middle": Case(rows=((37, 150),)),
    "whole pages": Case(rows=((1, 16), (8, 16), (16, 16), (8, 8))),
    "head size 128": Case(rows=((1, 33), (20, 40)), head_dim=128, page_size=16),
    "head size 256": Case(rows=((1, 33), (20, 40)), head_dim=256, page_size=32),
    "page 128": Case(rows=((1, 200), (20, 140)), page_size=128),
    "window": Case(rows=((1, 300), (3, 9), (40, 200)), options={"window": 8}),
    "window longer than the row": Case(rows=((1, 30), (9, 9)), options={"window": 300}),
    "chunks": Case(rows=((1, 17), (1, 300), (3, 33), (40, 200)), options={"chunk": 16}),
    "chunks that no block divides": Case(rows=((1, 300), (70, 200)), options={"chunk": 75}),
    "tree in chunks": Case(rows=((9, 140), (30, 31)), tree_words=1, options={"chunk": 20}),
    "int8, chunks": Case(rows=((1, 30), (9, 40)), head_dim=32, kv_dtype="int8", options={"chunk": 16}),
    "soft cap": Case(rows=((1, 30), (9, 40)), options={"soft_cap": 2.0}),
    "sinks": Case(rows=((1, 30), (9, 40)), options={"sinks": SINKS}),
    "shared prefix": Case(rows=((1, 20), (1, 30)), shared_pages=True),
    "bias": Case(rows=((1, 1), (1, 30), (9, 40), (12, 12)), bias=True),
    "trees": Case(rows=((1, 30), (9, 140), (32, 32), (5, 300)), tree_words=1),
    "tree in a window": Case(rows=((9, 140), (30, 31)), tree_words=1, options={"window": 20}),
    "int8, bias": Case(rows=((1, 30), (9, 40)), head_dim=32, kv_dtype="int8", bias=True),
}


@needs_interpreter
@pytest.mark.parametrize("name", FAST)
def test_against_the_reference(name: str):
    check(FAST[name][0], "mosaic_gpu", FAST[name][1])


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_against_the_reference(name: str):
    check(SLOW[name][0], "mosaic_gpu", SLOW[name][1])


@needs_interpreter
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", SWEEP)
def test_sweep(name: str, dtype: str):
    check(SWEEP[name], "mosaic_gpu", dtype)


row = st.tuples(st.integers(2, 40), st.integers(0, 150)).map(lambda r: (r[0], r[0] + r[1]))
decode_row = st.integers(1, 300).map(lambda length: (1, length))


@needs_interpreter
@pytest.mark.kernels
@settings(max_examples=30, deadline=None)
@given(decode=st.lists(decode_row, max_size=5), chunks=st.lists(row, max_size=4), seed=st.integers(0, 1000),
       reach=st.sampled_from([{}, {"window": 1}, {"window": 100}, {"chunk": 77}]),
       heads=st.sampled_from([(4, 2), (3, 3), (6, 1)]))
def test_random_batches(decode, chunks, seed, reach, heads):
    rows = (*decode, *chunks)
    if rows:
        case = Case(rows=rows, heads=heads, num_rows=9, num_tokens=192, seed=seed, options=reach)
        check(case, "mosaic_gpu")


def _schedule(rows, *, group, heads, block_rows, decode, reach, workers, kv_tokens=32):
    lens, kv_lens = (np.array([r[i] for r in rows]) for i in (0, 1))
    first_chunk = int(np.argmax(lens > 1)) if (lens > 1).any() else len(lens)
    distribution = jnp.array([first_chunk, first_chunk, len(lens)])
    batch = plan.Batch(jnp.array(kv_lens), jnp.array([0, *np.cumsum(lens)]), distribution)
    made = plan.make_schedule(
        batch, group=group, num_kv_heads=heads, rows=block_rows, num_tokens=int(lens.sum()) + 5, kv_tokens=kv_tokens,
        num_workers=workers, decode=decode, reach=reach, tree_words=0,
    )
    return np.asarray(made.items), np.asarray(made.workers)


batches = st.lists(st.one_of(row, decode_row), min_size=1, max_size=4)


@settings(max_examples=10, deadline=None)
@given(rows=batches.map(lambda rows: sorted(rows, key=lambda r: r[0] > 1)), group=st.sampled_from([1, 3, 4]),
       heads=st.integers(1, 3), decode=st.booleans(),
       reach=st.sampled_from([Reach(), Reach(window=1), Reach(window=50), Reach(chunk=40)]),
       workers=st.sampled_from([1, 2, 7]))
def test_every_pair_of_query_and_key_is_visited_once(rows, group, heads, decode, reach, workers):
    """Counts, from the schedule alone, which (query row, head, KV block) each worker attends to."""
    kinds = dict(group=group, heads=heads, block_rows=64, decode=decode, reach=reach, workers=workers)
    items, parts = _schedule(rows, **kinds)
    visits: dict[tuple, int] = {}
    merged: dict[int, int] = {}
    for worker in parts:
        for item in range(worker[plan.ITEM], worker[plan.ITEM] + worker[plan.SEGMENTS]):
            # The arithmetic of read_segment, which needs a Ref only to be indexed.
            segment = plan.read_segment(items, jnp.int32(item), worker[plan.BEGIN], worker[plan.STOP], heads)
            assert int(segment.lo) < int(segment.hi)
            if not segment.whole:
                merged[item] = merged.get(item, 0) + 1
            for block in range(int(segment.first + segment.lo), int(segment.first + segment.hi)):
                for query in range(int(segment.query), int(segment.query + segment.rows)):
                    key = (query, int(segment.head), block)
                    visits[key] = visits.get(key, 0) + 1
    assert set(visits.values()) <= {1}
    starts = {int(w[plan.MERGE_ITEM]): int(w[plan.MERGE_PARTS]) for w in parts if w[plan.MERGE_ITEM] >= 0}
    assert starts == merged
    *sizes, _ = [size for size in parts[:, plan.STOP] - parts[:, plan.BEGIN] if size] or [0]
    assert len(set(sizes)) <= 1  # all workers but the last have the same share
    start = 0
    for length, kv_len in rows:
        for token in range(length):
            if (length == 1) == decode:
                position = kv_len - length + token
                lowest = max(position - (reach.window or 1000) + 1, position - position % (reach.chunk or 1000), 0)
                for query in range((start + token) * group, (start + token + 1) * group):
                    for head in range(heads):
                        assert {(query, head, b) for b in range(lowest // 32, position // 32 + 1)} <= visits.keys()
        start += length


@pytest.mark.parametrize("reach, blocks", [(Reach(), 125), (Reach(window=64), 2), (Reach(chunk=1024), 29)])
def test_pages_that_no_token_sees_are_skipped(reach, blocks):
    """Of 4000 tokens in blocks of 32."""
    items, _ = _schedule([(1, 4000)], group=4, heads=1, block_rows=64, decode=True, reach=reach, workers=2)
    assert items[0, plan.COUNT] == blocks


@needs_interpreter
@pytest.mark.slow
def test_inside_a_scan_over_layers_and_a_shard_map():
    """As a model calls it: traced layer index, donated pages, manual axes.

    One device: jax 0.12's interpreter has all devices' barriers in one table, and when the first device is done it
    raises because another still has some. `scripts.aot_check` compiles the kernel for 8.
    """
    given = inputs(Case(rows=((1, 20), (5, 12)), heads=(4, 2)))
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    spec = jax.sharding.PartitionSpec
    heads, pages = spec(None, "tensor"), spec(None, None, None, "tensor")

    def layers(attend, q, k, v, pages, table, kv_lens, cu_q_lens, distribution):
        def layer(pages, index):
            out, pages = attend(q, k, v, pages, index, table, kv_lens, cu_q_lens, distribution, scale=0.25)
            return pages, out

        pages, outs = jax.lax.scan(layer, pages, jnp.arange(2))
        return outs, pages

    arguments = (given.q, given.k, given.v, given.values, *given.step[1:])
    from pallas_kernels.ragged_paged_attention import xla

    want, want_pages = jax.jit(partial(layers, xla.ragged_paged_attention))(*arguments)
    run = jax.shard_map(
        partial(layers, partial(mosaic_gpu.ragged_paged_attention, interpret=True)), mesh=mesh, check_vma=False,
        in_specs=(heads, heads, heads, pages, spec(), spec(), spec(), spec()),
        out_specs=(spec(None, None, "tensor"), pages),
    )
    got, got_pages = jax.jit(run, donate_argnums=3)(*map(jnp.asarray, arguments))
    real = given.num_real_tokens
    np.testing.assert_allclose(got[:, :real], want[:, :real], atol=1e-5)
    np.testing.assert_array_equal(got_pages[:, 1:], want_pages[:, 1:])


SPEC = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, page_size=64, dtype=jnp.dtype("bfloat16"),
                     kv_dtype=jnp.dtype("bfloat16"))  # fmt: skip


@needs_interpreter
@pytest.mark.parametrize("change, message", [
    ({}, None),
    ({"kv_dtype": jnp.dtype("int8")}, None),
    ({"page_size": 48}, "page_size=48 must be one of 16, 32, 64, 128, 256"),
    ({"head_dim": 80}, "head_dim=80 must be one of 64, 128, 256"),
    ({"dtype": jnp.dtype("float32")}, "float32 queries"),
    ({"kv_dtype": jnp.dtype("float16")}, "float16 pages with bfloat16 queries"),
    ({"num_heads": 136}, "17 query heads a kv head"),
])  # fmt: skip
def test_what_is_missing_is_said(change, message):
    missing = mosaic_gpu.unsupported(replace(SPEC, **change), "NVIDIA H200")
    assert missing is None if message is None else message in missing
    assert "Hopper" in str(mosaic_gpu.unsupported(SPEC, "NVIDIA B200"))
    assert mosaic_gpu.unsupported(SPEC, "NVIDIA H100 PCIe") is None
    float32 = jnp.dtype("float32")
    assert mosaic_gpu.unsupported(replace(SPEC, dtype=float32, kv_dtype=float32), None) is None
    for head_dim in (80, 96):  # no whole number of the columns that are stored at a time
        assert "head_dim" in str(mosaic_gpu.unsupported(replace(SPEC, head_dim=head_dim), None))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("bias", [False, True])
def test_default_blocks_fit(head_dim, kv_dtype, bias):
    kinds = (head_dim, jnp.dtype("bfloat16"), jnp.dtype(kv_dtype), bias)
    for blocks in (decode_blocks(*kinds), chunk_blocks(*kinds)):
        blocks.check(*kinds)
        assert blocks.stages >= 2 and blocks.kv_tokens >= 64


def test_blocks_that_do_not_fit_are_refused_with_numbers():
    """Queries 2 * 64 * (256 + 64) * 2 = 81,920; ring 2 * 4 * 128 * 1024 = 1,048,576; 4,096 for the compiler."""
    nearest = r"takes 1134592 bytes of shared memory, more than 232448; Blocks\(kv_tokens=64, stages=1, .* takes 217088"
    with pytest.raises(ValueError, match=nearest):
        Blocks(kv_tokens=128, stages=4).check(256, jnp.bfloat16, jnp.bfloat16)
    with pytest.raises(ValueError, match="kv_tokens=48 must be 16, 32, 64 or 128"):
        Blocks(kv_tokens=48)
