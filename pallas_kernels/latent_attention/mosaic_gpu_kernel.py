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
from pallas_kernels.latent_attention.mosaic_gpu import KV_TOKENS, STAGES
from pallas_kernels.ragged_paged_attention.mosaic_gpu.config import QUERY_ROWS, Blocks
from pallas_kernels.ragged_paged_attention.mosaic_gpu.kernel import (
    LOG2E, LOWEST, MASKED, ROW, SEMANTICS, TILE, Launch, matrix, rows_of, _iota as iota, _needs_mask as needs_mask, _visible as visible,
)  # fmt: skip
from pallas_kernels.ragged_paged_attention.mosaic_gpu.merge import merge
from pallas_kernels.ragged_paged_attention.mosaic_gpu.schedule import (
    BEGIN, ITEM, SEGMENTS, STOP, Batch, Segment, make_schedule, read_segment,
)  # fmt: skip

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
    # Of ragged attention: one kv head; `blocks` as its rows, keys and workers are counted: one for each block of the grid.
    launch = Launch(
        group=num_heads, num_kv_heads=1, num_pages=num_pages, page_size=page_size, head_dim=latent_dim,
        dtype=q_latent.dtype, kv_dtype=kv_pages.dtype, blocks=Blocks(kv_tokens=KV_TOKENS, warpgroups=1), sms=sms,
        window=None, soft_cap=soft_cap, tree_words=0 if tree is None else tree.shape[0], bias=False, sinks=False,
        interpret=interpret,
    )  # fmt: skip
    schedule = make_schedule(
        Batch(kv_lens, cu_q_lens, distribution.at[0].set(0)), group=num_heads, num_kv_heads=1, rows=QUERY_ROWS,
        num_tokens=num_tokens, kv_tokens=KV_TOKENS, num_workers=launch.workers, decode=False, window=None,
        tree_words=launch.tree_words,
    )  # fmt: skip
    operands = dict(
        workers=schedule.workers, items=schedule.items, layer=jnp.asarray(layer, jnp.int32).reshape(1),
        table=page_table, q_latent=q[0], q_rope=q[1], pages=kv_pages.reshape(-1, row_dim),
    )  # fmt: skip
    if tree is not None:
        operands["tree"] = tree
    names = (*operands, "out", "part_out", "part_max", "part_sum")
    places = (2 * launch.workers, 1, QUERY_ROWS)

    def body(*refs, **scratch):
        named = dict(zip(names, refs, strict=True)) | scratch
        worker, warpgroup = lax.axis_index("sm"), lax.axis_index("warpgroup")

        @pl.when(warpgroup < 2)
        def _():
            plgpu.set_max_registers(232, action="increase")
            _compute(named, launch, warpgroup, worker, scale)

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            _move(named, launch, worker)

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
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=SEMANTICS),
        interpret=gpu_params() if interpret else None,
    )
    out = merge(launch, schedule, *call(*operands.values()), None)
    return out[0, :rows].reshape(q_latent.shape)


def _scratch(launch: Launch, rope_dim: int) -> dict[str, Any]:
    columns = launch.head_dim // 2
    copies = 2 * 3 * (_HALF // _piece(launch))  # of a KV block: key halves x (column halves and rope) x pieces
    return dict(
        q_smem=matrix((2, QUERY_ROWS, columns), launch.dtype),  # the results, at the end
        q_rope_smem=matrix((QUERY_ROWS, rope_dim), launch.dtype),
        kv_smem=matrix((STAGES, 2, 2, _HALF, columns), launch.kv_dtype),  # key half, column half
        rope_smem=matrix((STAGES, 2, _HALF, rope_dim), launch.kv_dtype),
        weights_smem=matrix((2, QUERY_ROWS, _HALF), launch.dtype),
        row_smem=plgpu.SMEM((2, QUERY_ROWS), jnp.float32),  # what warpgroups tell each other of their rows
        q_full=plgpu.Barrier(num_arrivals=3),
        kv_full=plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
        kv_empty=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        both=plgpu.Barrier(num_arrivals=2),
    )


def _piece(launch: Launch) -> int:
    """Tokens of one copy."""
    return min(_HALF, launch.page_size)


def _move(refs: dict, launch: Launch, worker) -> None:
    """Fills the ring with the KV blocks of a worker's segments, one after the other."""
    workers, items, piece, page_size = refs["workers"], refs["items"], _piece(launch), launch.page_size
    begin, stop, item = workers[worker, BEGIN], workers[worker, STOP], workers[worker, ITEM]
    layer, columns = refs["layer"][0], launch.head_dim // 2
    rope_dim = refs["rope_smem"].shape[-1]

    def fetch(segment: Segment, block, slot) -> None:
        last = lax.div(segment.end - 1, page_size)
        for at in range(0, KV_TOKENS, piece):
            token = block * KV_TOKENS + at
            number = jnp.minimum(lax.div(token, page_size), last)  # the table ends there
            page = layer * launch.num_pages + refs["table"][segment.table_row, number]
            rows = pl.ds(page * page_size + (lax.rem(token, page_size) if piece < page_size else 0), piece)
            half, into = at // _HALF, pl.ds(at % _HALF, piece)
            barrier = refs["kv_full"].at[slot]
            for column in range(2):
                source = refs["pages"].at[rows, pl.ds(column * columns, columns)]
                plgpu.copy_gmem_to_smem(source, refs["kv_smem"].at[slot, half, column, into], barrier)
            source = refs["pages"].at[rows, pl.ds(2 * columns, rope_dim)]
            plgpu.copy_gmem_to_smem(source, refs["rope_smem"].at[slot, half, into], barrier)

    def one_segment(n, filled):
        segment = read_segment(items, item + n, begin, stop, 1)

        def one_block(i, filled):
            slot = lax.rem(filled, STAGES)
            pl.when(filled >= STAGES)(lambda: plgpu.barrier_wait(refs["kv_empty"].at[slot]))
            fetch(segment, i, slot)
            return filled + 1

        return lax.fori_loop(segment.lo, segment.hi, one_block, filled)

    lax.fori_loop(0, workers[worker, SEGMENTS], one_segment, jnp.int32(0))


def _compute(refs: dict, launch: Launch, lane, worker, scale: float) -> None:
    """Attends for a worker's segments. lane: which of the two warpgroups: its half of a block's keys and of the
    columns."""
    workers, items, columns = refs["workers"], refs["items"], launch.head_dim // 2
    begin, stop, item = workers[worker, BEGIN], workers[worker, STOP], workers[worker, ITEM]
    segments = workers[worker, SEGMENTS]
    halves = replace(launch, blocks=Blocks(kv_tokens=_HALF, warpgroups=1))  # masks count keys in halves of blocks
    shape = (QUERY_ROWS, _HALF)
    other = 1 - lane

    def meet() -> None:
        """What one warpgroup wrote to shared memory before, the other sees after."""
        plgpu.commit_smem()
        plgpu.barrier_arrive_and_wait(refs["both"])

    def exchange(x):
        """The other's numbers of the rows, for mine."""
        plgpu.store(refs["row_smem"].at[lane], x, optimized=False)
        meet()
        return plgpu.load(refs["row_smem"].at[other], layout=ROW, optimized=False)

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
                plgpu.wgmma(acc, refs["q_smem"].at[column], refs["kv_smem"].at[slot, lane, column].transpose((1, 0)))
            plgpu.wgmma(acc, refs["q_rope_smem"], refs["rope_smem"].at[slot, lane].transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))

    def accumulate(acc, slot):
        """The one step that differs in interpret mode, whose wgmma takes no first value."""
        if launch.interpret:
            for half in range(2):
                weights, values = refs["weights_smem"].at[half], refs["kv_smem"].at[slot, half, lane]
                acc = acc + jnp.dot(weights[...], values[...], preferred_element_type=jnp.float32)
            plgpu.commit_smem()  # its reads come before the next copy into the same place
            return acc

        def product(ref):
            for half in range(2):
                plgpu.wgmma(ref, refs["weights_smem"].at[half], refs["kv_smem"].at[slot, half, lane])

        return pl.run_state(product)(plgpu.ACC.init(acc))

    def clear(slot, valid) -> None:
        """Zeroes this warpgroup's keys from `valid` on: what lies there may be NaN, and weights of 0 would keep it."""
        for column in range(2):
            ref = refs["kv_smem"].at[slot, lane, column]
            for at in range(0, columns, 64):
                some = ref.at[:, pl.ds(at, 64)]
                values = plgpu.load(some, layout=TILE, optimized=False)
                keep = iota(values.shape, 0) < valid
                some[...] = jnp.where(keep, values, jnp.zeros_like(values))

    def one_block(segment: Segment, i, carry):
        acc, maximum, total, taken = carry
        slot = lax.rem(taken, STAGES)
        half = 2 * i + lane
        plgpu.barrier_wait(refs["kv_full"].at[slot])
        scores = scores_of(slot)
        if launch.soft_cap is None:
            factor = scale * LOG2E
        else:
            scores, factor = jnp.tanh(scores * (scale / launch.soft_cap)), launch.soft_cap * LOG2E
        scores = lax.cond(
            needs_mask(halves, segment, half, 0),
            lambda s: jnp.where(visible(refs, halves, segment, half, 0, shape), s, MASKED), lambda s: s, scores,
        )  # fmt: skip

        mine = jnp.max(scores, axis=1) * factor
        highest = jnp.maximum(maximum, jnp.maximum(mine, exchange(mine)))
        rescale = jnp.exp2(maximum - highest)
        weights = jnp.exp2(scores * factor - rows_of(highest, shape))
        total = total * rescale + jnp.sum(weights, axis=1)
        refs["weights_smem"].at[lane][...] = weights.astype(launch.dtype)
        valid = segment.end - half * _HALF
        pl.when(valid < _HALF)(lambda: clear(slot, valid))
        meet()
        acc = accumulate(acc * rows_of(rescale, acc.shape), slot)
        plgpu.barrier_arrive(refs["kv_empty"].at[slot])
        return acc, highest, total, taken + 1

    def finish(segment: Segment, acc, total) -> None:
        staging = refs["q_smem"].at[lane]  # nobody needs the queries any more
        staging[...] = (acc * rows_of(1.0 / jnp.maximum(total, 1e-30), acc.shape)).astype(launch.dtype)
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
        segment = read_segment(items, item + n, begin, stop, 1)
        fetch_queries(segment)
        plgpu.barrier_wait(refs["q_full"])
        acc = plgpu.layout_cast(jnp.zeros((QUERY_ROWS, columns), jnp.float32), TILE)
        maximum = plgpu.layout_cast(jnp.full((QUERY_ROWS,), LOWEST, jnp.float32), ROW)
        total = plgpu.layout_cast(jnp.zeros((QUERY_ROWS,), jnp.float32), ROW)
        acc, maximum, total, taken = lax.fori_loop(
            segment.lo, segment.hi, partial(one_block, segment), (acc, maximum, total, taken)
        )
        total = total + exchange(total)
        pl.when(segment.whole)(lambda: finish(segment, acc, total))
        pl.when(jnp.logical_not(segment.whole))(lambda: keep_part(segment, acc, maximum, total))
        meet()  # before the next queries and totals take the place of these
        return taken

    lax.fori_loop(0, segments, one_segment, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)
