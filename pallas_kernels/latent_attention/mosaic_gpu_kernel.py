"""The kernel of `mosaic_gpu`: a persistent grid, one block a multiprocessor. See there for the data flow."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interpret import gpu_params
from pallas_kernels.latent_attention.mosaic_gpu import KV_TOKENS
from pallas_kernels.ragged_paged_attention.mosaic_gpu import kernel as ragged
from pallas_kernels.ragged_paged_attention.mosaic_gpu import schedule
from pallas_kernels.ragged_paged_attention.mosaic_gpu.config import QUERY_ROWS, Blocks
from pallas_kernels.ragged_paged_attention.mosaic_gpu.kernel import Launch
from pallas_kernels.ragged_paged_attention.mosaic_gpu.merge import merge
from pallas_kernels.ragged_paged_attention.mosaic_gpu.schedule import Segment
from pallas_kernels.ragged_paged_attention.reach import WHOLE

_HALF = KV_TOKENS // 2  # keys of a KV block whose scores one warpgroup makes


def attend(
    q_latent, q_rope, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution, *,
    scale, soft_cap, tree_mask, sms: int, interpret: bool,
):  # fmt: skip
    """Attention [T, N, R] to pages [L, P, B, R + E] that hold the new tokens already."""
    num_tokens, num_heads, latent_dim = q_latent.shape
    num_pages, page_size, row_dim = kv_pages.shape[1:]
    # A query block is 64 rows of [T * N]; its last may begin with less than 64 left.
    rows = num_tokens * num_heads
    padded = rows if num_heads % QUERY_ROWS == 0 else rows + QUERY_ROWS
    q = [jnp.pad(x.reshape(rows, -1), ((0, padded - rows), (0, 0))) for x in (q_latent, q_rope)]
    tree = None
    if tree_mask is not None:
        tree = jnp.repeat(lax.bitcast_convert_type(tree_mask, jnp.int32), num_heads, axis=0)
        tree = jnp.pad(tree, ((0, padded - rows), (0, 0))).T
    # As of ragged attention with one kv head; one warpgroup and ring means a worker for each block of the grid.
    launch = Launch(
        group=num_heads, num_kv_heads=1, num_pages=num_pages, page_size=page_size, head_dim=latent_dim,
        dtype=q_latent.dtype, kv_dtype=kv_pages.dtype, blocks=Blocks(kv_tokens=KV_TOKENS, warpgroups=1), sms=sms,
        reach=WHOLE, soft_cap=soft_cap, tree_words=0 if tree is None else tree.shape[0], bias=False, sinks=False,
        mean_tokens=page_table.size * page_size // 2, interpret=interpret,
    )  # fmt: skip
    work = schedule.make_schedule(
        schedule.Batch(kv_lens, cu_q_lens, distribution.at[0].set(0)), group=num_heads, num_kv_heads=1, rows=QUERY_ROWS,
        num_tokens=num_tokens, kv_tokens=KV_TOKENS, num_workers=launch.workers, decode=False, reach=WHOLE,
        tree_words=launch.tree_words,
    )  # fmt: skip
    operands = dict(
        workers=work.workers, items=work.items, layer=jnp.asarray(layer, jnp.int32).reshape(1),
        table=page_table, q_latent=q[0], q_rope=q[1], pages=kv_pages.reshape(-1, row_dim),
    )  # fmt: skip
    if tree is not None:
        operands["tree"] = tree
    names = (*operands, "out", "part_out", "part_max", "part_sum")
    places = (2 * launch.workers, 1, QUERY_ROWS)

    def body(*refs, **scratch):
        named = dict(zip(names, refs, strict=True)) | scratch
        worker, warpgroup = lax.axis_index("sm"), lax.axis_index("warpgroup")

        _compute(named, launch, warpgroup, worker, scale)

    call = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((1, padded, latent_dim), launch.dtype),
            jax.ShapeDtypeStruct((*places, latent_dim), jnp.float32),
            jax.ShapeDtypeStruct(places, jnp.float32),
            jax.ShapeDtypeStruct(places, jnp.float32),
        ),
        scratch_types=_scratch(launch, row_dim - latent_dim),
        grid=(sms,),
        grid_names=("sm",),
        num_threads=2,
        thread_name="warpgroup",
        cost_estimate=_cost(launch, row_dim),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=ragged.SEMANTICS, reduction_scratch_bytes=0,  # rows lie within a warp
        ),
        interpret=gpu_params() if interpret else None,
    )
    out = merge(launch, work, *call(*operands.values()), None)
    return out[0, :rows].reshape(q_latent.shape)


def _scratch(launch: Launch, rope_dim: int) -> dict[str, Any]:
    columns = launch.head_dim // 2
    copies = 3 * (KV_TOKENS // _piece(launch))  # of a KV block: column halves and rope, in pieces of tokens
    return dict(
        q_smem=ragged.matrix((2, QUERY_ROWS, columns), launch.dtype),  # the results, at the end
        q_rope_smem=ragged.matrix((QUERY_ROWS, rope_dim), launch.dtype),
        kv_smem=ragged.matrix((2, 2, KV_TOKENS, columns), launch.kv_dtype),  # by column halves
        rope_smem=ragged.matrix((2, KV_TOKENS, rope_dim), launch.kv_dtype),
        weights_smem=plgpu.SMEM((QUERY_ROWS, KV_TOKENS + 8), launch.dtype),  # 8 more: rows in different banks
        row_smem=plgpu.SMEM((2, QUERY_ROWS), jnp.float32),  # what warpgroups tell each other of their rows
        q_full=plgpu.Barrier(num_arrivals=3),
        kv_full=plgpu.Barrier(num_arrivals=copies, num_barriers=2),
        both=plgpu.Barrier(num_arrivals=2),
    )


def _cost(launch: Launch, row_dim: int) -> pl.CostEstimate:
    pairs = launch.mean_tokens * max(launch.group, QUERY_ROWS)
    return pl.CostEstimate(
        flops=2 * pairs * (row_dim + launch.head_dim), transcendentals=pairs,
        bytes_accessed=launch.mean_tokens * row_dim * jnp.dtype(launch.kv_dtype).itemsize,
    )  # fmt: skip


def _piece(launch: Launch) -> int:
    """Tokens of one copy."""
    return min(KV_TOKENS, launch.page_size)


def _fetch(refs: dict, launch: Launch, segment: Segment, block, slot, lane) -> None:
    """Starts the copies of a KV block: this warpgroup's columns, and the rotated keys by the first."""
    piece, page_size, columns = _piece(launch), launch.page_size, launch.head_dim // 2
    last = lax.div(segment.end - 1, page_size)
    barrier = refs["kv_full"].at[slot]
    for at in range(0, KV_TOKENS, piece):
        token = block * KV_TOKENS + at
        number = jnp.minimum(lax.div(token, page_size), last)  # the table ends there
        page = refs["layer"][0] * launch.num_pages + refs["table"][segment.table_row, number]
        rows = pl.ds(page * page_size + (lax.rem(token, page_size) if piece < page_size else 0), piece)
        into = pl.ds(at, piece)
        source = refs["pages"].at[rows, pl.ds(lane * columns, columns)]
        plgpu.copy_gmem_to_smem(source, refs["kv_smem"].at[slot, lane, into], barrier)

        @pl.when(lane == 0)
        def _(rows=rows, into=into):
            source = refs["pages"].at[rows, pl.ds(2 * columns, refs["rope_smem"].shape[-1])]
            plgpu.copy_gmem_to_smem(source, refs["rope_smem"].at[slot, into], barrier)


def _compute(refs: dict, launch: Launch, lane, worker, scale: float) -> None:
    """Attends for a worker's segments. lane: which of the two warpgroups: its half of a block's keys and of the
    columns."""
    workers, items, columns = refs["workers"], refs["items"], launch.head_dim // 2
    begin, stop, item = workers[worker, schedule.BEGIN], workers[worker, schedule.STOP], workers[worker, schedule.ITEM]
    segments = workers[worker, schedule.SEGMENTS]
    halves = replace(launch, blocks=Blocks(kv_tokens=_HALF, warpgroups=1))  # masks count keys in halves of blocks
    shape = (QUERY_ROWS, _HALF)
    other = 1 - lane
    mine = pl.ds(pl.multiple_of(lane * _HALF, _HALF), _HALF)  # keys of a block

    def meet() -> None:
        """What one warpgroup wrote to shared memory before, the other sees after."""
        plgpu.commit_smem()
        plgpu.barrier_arrive_and_wait(refs["both"])

    def exchange(x):
        """The other's numbers of the rows, for mine."""
        plgpu.store(refs["row_smem"].at[lane], x, optimized=False)
        meet()
        return plgpu.load(refs["row_smem"].at[other], layout=ragged.ROW, optimized=False)

    def fetch_queries(segment: Segment) -> None:
        rows = pl.ds(segment.query, QUERY_ROWS)
        mine = refs["q_latent"].at[rows, pl.ds(lane * columns, columns)]
        plgpu.copy_gmem_to_smem(mine, refs["q_smem"].at[lane], refs["q_full"])

        @pl.when(lane == 0)
        def _():
            plgpu.copy_gmem_to_smem(refs["q_rope"].at[rows], refs["q_rope_smem"], refs["q_full"])

    def scores_of(slot):
        def product(acc):
            for column in range(2):
                keys = refs["kv_smem"].at[slot, column, mine]
                plgpu.wgmma(acc, refs["q_smem"].at[column], keys.transpose((1, 0)))
            plgpu.wgmma(acc, refs["q_rope_smem"], refs["rope_smem"].at[slot, mine].transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

    def accumulate(acc, slot, weights):
        """The one step that differs in interpret mode: its wgmma takes no operand from registers and no first value."""
        values = refs["kv_smem"].at[slot, lane]
        if launch.interpret:
            acc = acc + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
            plgpu.commit_smem()  # its reads come before the next copy into the same place
            return acc
        return pl.run_state(lambda out: plgpu.wgmma(out, weights, values))(plgpu.WGMMAAccumulatorRef.init(acc))

    def clear(slot, valid) -> None:
        """Zeroes this warpgroup's columns from key `valid` on: they may be NaN, and weights of 0 would keep that."""
        for at in range(0, columns, 64):
            some = refs["kv_smem"].at[slot, lane, :, pl.ds(at, 64)]
            values = some[...]
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=ragged.TILE)
            some[...] = jnp.where(row < valid, values, jnp.zeros_like(values))

    def fetch_next(n, segment: Segment, i, slot) -> None:
        """The block after block i of segment n, or the first of the next segment."""
        pl.when(i + 1 < segment.hi)(lambda: _fetch(refs, launch, segment, i + 1, slot, lane))

        @pl.when((i + 1 >= segment.hi) & (n + 1 < segments))
        def _():
            following = schedule.read_segment(items, item + n + 1, begin, stop, 1)
            _fetch(refs, launch, following, following.lo, slot, lane)

    def one_block(n, segment: Segment, i, carry):
        acc, maximum, total, taken = carry
        slot = lax.rem(taken, 2)
        meet()  # neither reads the former block any more
        fetch_next(n, segment, i, 1 - slot)
        half = 2 * i + lane
        plgpu.barrier_wait(refs["kv_full"].at[slot])
        scores = scores_of(slot)
        if launch.soft_cap is None:
            factor = scale * ragged.LOG2E
        else:
            scores, factor = jnp.tanh(scores * (scale / launch.soft_cap)), launch.soft_cap * ragged.LOG2E
        scores = lax.cond(
            ragged.needs_mask(halves, segment, half, 0),
            lambda s: jnp.where(ragged.visible(refs, halves, segment, half, 0, shape), s, ragged.MASKED),
            lambda s: s,
            scores,
        )

        largest = jnp.max(scores, axis=1) * factor
        highest = jnp.maximum(maximum, jnp.maximum(largest, exchange(largest)))
        rescale = jnp.exp2(maximum - highest)
        weights = jnp.exp2(scores * factor - ragged.rows_of(highest, shape))
        total = total * rescale + jnp.sum(weights, axis=1)
        plgpu.store(refs["weights_smem"].at[:, mine], weights.astype(launch.dtype), optimized=False)
        valid = segment.end - i * KV_TOKENS
        pl.when(valid < KV_TOKENS)(lambda: clear(slot, valid))
        meet()
        weights = plgpu.load(refs["weights_smem"].at[:, pl.ds(0, KV_TOKENS)], layout=ragged.TILE, optimized=False)
        acc = accumulate(acc * ragged.rows_of(rescale, acc.shape), slot, weights)
        return acc, highest, total, taken + 1

    def finish(segment: Segment, acc, total) -> None:
        staging = refs["q_smem"].at[lane]  # nobody needs the queries any more
        staging[...] = (acc * ragged.rows_of(1.0 / jnp.maximum(total, 1e-30), acc.shape)).astype(launch.dtype)
        plgpu.commit_smem()
        rows = segment.rows
        for size in (64, 32, 16, 8):
            row = rows - lax.rem(rows, 2 * size)  # the larger pieces come before

            @pl.when(rows & size != 0)
            def _(size=size, row=row):
                to = refs["out"].at[0, pl.ds(segment.query + row, size), pl.ds(lane * columns, columns)]
                plgpu.copy_smem_to_gmem(staging.at[pl.ds(row, size)], to)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def keep_part(segment: Segment, acc, maximum, total) -> None:
        """A partial softmax to the workspace: an item's beginning to place 1 of the worker, anything else to 0."""
        place = 2 * worker + jnp.where(segment.lo == 0, 1, 0)
        plgpu.store(refs["part_out"].at[place, 0, :, pl.ds(lane * columns, columns)], acc, optimized=False)

        @pl.when(lane == 0)
        def _():
            plgpu.store(refs["part_max"].at[place, 0], maximum, optimized=False)
            plgpu.store(refs["part_sum"].at[place, 0], total, optimized=False)

    def one_segment(n, taken):
        segment = schedule.read_segment(items, item + n, begin, stop, 1)
        fetch_queries(segment)
        plgpu.barrier_wait(refs["q_full"])
        acc = plgpu.layout_cast(jnp.zeros((QUERY_ROWS, columns), jnp.float32), ragged.TILE)
        maximum = plgpu.layout_cast(jnp.full((QUERY_ROWS,), ragged.LOWEST, jnp.float32), ragged.ROW)
        total = plgpu.layout_cast(jnp.zeros((QUERY_ROWS,), jnp.float32), ragged.ROW)
        acc, maximum, total, taken = lax.fori_loop(
            segment.lo, segment.hi, partial(one_block, n, segment), (acc, maximum, total, taken)
        )
        total = total + exchange(total)
        pl.when(segment.whole)(lambda: finish(segment, acc, total))
        pl.when(jnp.logical_not(segment.whole))(lambda: keep_part(segment, acc, maximum, total))
        meet()  # before the next queries and totals take the place of these
        return taken

    @pl.when(segments > 0)
    def _():
        first = schedule.read_segment(items, item, begin, stop, 1)
        _fetch(refs, launch, first, first.lo, 0, lane)

    lax.fori_loop(0, segments, one_segment, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)
