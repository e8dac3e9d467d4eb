"""The attention kernel: a persistent grid, one block a multiprocessor, warps that move data, warpgroups that compute.

    moving warp           page ids from the table; TMA of K and V, [piece of a page, H] each     -> stage of the ring
    computing warpgroup   wgmma: scores [64, W] = queries x keys; mask, softmax in registers     -> stage of K is free
                          wgmma: output [64, H] += probabilities x values                        -> stage of V is free
    at the end of an item output / sum -> shared memory -> TMA in pieces of a power of two rows, or, where the item goes
                          on in another worker, the partial softmax to a workspace (merge.py)

Query rows are packed per kv head: row t * G + g is token t, query head g of its G. A query block is 64 of those rows
(128 with shared KV blocks), whatever they belong to within their sequence; a row of one token has G of them and the
rest of the 64 repeats its neighbours', computed and not stored: rows never mix.

Keys are masked in the blocks that need it: the diagonal, the last block, the left edge of a window or chunk, trees.
What lies beyond the last key is NaN or worse, so there the rows of V are zeroed in shared memory before the product.

One warp moves for one ring: a warpgroup for each would leave 128 registers a thread, too few, and ptxas, where Mosaic
GPU calls it, ignores what `set_max_registers` would shift between warpgroups.

8-bit pages: the block is widened to the queries' dtype in shared memory; scales multiply scores and probabilities.

Axis letters: T tokens, S rows, N query heads, K kv heads, G = N / K, H head dim, L layers, P pages, B page tokens,
M pages of a row, C tree words; W tokens of a KV block; R rings, J query blocks.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interpret import gpu_params
from pallas_kernels.ragged_paged_attention.mosaic_gpu.config import QUERY_ROWS, Blocks, out_columns
from pallas_kernels.ragged_paged_attention.mosaic_gpu.schedule import (
    BEGIN,
    ITEM,
    SEGMENTS,
    STOP,
    Schedule,
    Segment,
    read_segment,
)  # fmt: skip
from pallas_kernels.ragged_paged_attention.reach import Reach
from quant.kv import LARGEST

SEMANTICS = plgpu.LoweringSemantics.Lane  # layouts are ours to say
LOG2E = math.log2(math.e)
MASKED = -1e30  # the score of what may not be seen; finite, so that differences are never NaN
LOWEST = -1e29  # no maximum is lower: exp2(MASKED - LOWEST) is 0, also where nothing is seen

TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)  # one number for each of 64 rows
COLUMN = plgpu.Layout.WGMMA.reduce(0)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a launch is compiled for."""

    group: int  # G
    num_kv_heads: int
    num_pages: int
    page_size: int
    head_dim: int
    dtype: Any
    kv_dtype: Any
    blocks: Blocks
    sms: int
    reach: Reach
    soft_cap: float | None
    tree_words: int
    bias: bool
    sinks: bool
    interpret: bool
    mean_tokens: int  # of all rows together, a guess for the compiler's cost model

    @property
    def quantized(self) -> bool:
        return jnp.dtype(self.kv_dtype).name in LARGEST

    @property
    def workers(self) -> int:
        return self.sms * self.blocks.rings

    @property
    def parts(self) -> int:
        """Warpgroups that take different rows of one item."""
        return self.blocks.warpgroups if self.blocks.shared else 1

    @property
    def piece(self) -> int:
        """Tokens of one TMA copy: a page, or a KV block within a longer page."""
        return min(self.blocks.kv_tokens, self.page_size)

    @property
    def packed_pages(self) -> int:
        """Pages whose scales (or biases) of one head one copy brings: 2 where those of one would be too few for TMA."""
        return 2 if self.page_size == 16 else 1

    @property
    def fetched_rows(self) -> int:
        """Query rows that an item's fetch needs: of one token, the G rounded up to whole groups of 8."""
        return QUERY_ROWS if self.blocks.shared else -(-self.group // 8) * 8


def matrix(shape: tuple[int, ...], dtype) -> Any:
    """Shared memory as wgmma and TMA want it: tiles of 8 rows, swizzled so that no two rows of a tile share a bank."""
    bits = jnp.dtype(dtype).itemsize * 8
    if shape[-1] * bits < 256:  # no swizzle is so narrow; only in interpret mode, which has no need of one
        return plgpu.SMEM(shape, dtype)
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tiling = plgpu.TilingTransform((8, swizzle * 8 // bits))  # pyright: ignore[reportAbstractUsage]
    transforms = (tiling, plgpu.SwizzleTransform(swizzle))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def rows_of(x, shape):
    return lax.broadcast_in_dim(x, shape, [0])


def columns_of(x, shape):
    return lax.broadcast_in_dim(x, shape, [1])


def _iota(shape, dimension):
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=TILE)


def _scores(q_ref, k_ref, kv_tokens: int):
    """[64, W] float32."""

    def product(acc):
        plgpu.wgmma(acc, q_ref, k_ref.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((QUERY_ROWS, kv_tokens), jnp.float32))


def _accumulate(acc, weights, v_ref, interpret: bool):
    """acc [64, H] + weights [64, W] x values [W, H].

    The one step that differs in interpret mode, whose wgmma takes no operand from registers and no first value.
    """
    if interpret:
        acc = acc + jnp.dot(weights, v_ref[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # its reads come before the next copy into the same place
        return acc
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, v_ref))(plgpu.WGMMAAccumulatorRef.init(acc))


def finish(refs: dict, launch: Launch, acc, maximum, total, *, head, query, rows, offset, lane, column=0) -> None:
    """Divides by the sum and stores `rows` rows to out[head, query .., column ..].

    acc: [64, H], or some columns of it from `column` on. offset: the first row's place among those of its sequence.
    lane: whose staging buffer.
    """
    if launch.sinks:
        at = lax.rem(offset, launch.group)
        sink = plgpu.load(refs["sinks"].at[head, pl.ds(at, QUERY_ROWS)], layout=ROW, optimized=False) * LOG2E
        highest = jnp.maximum(maximum, sink)
        rescale = jnp.exp2(maximum - highest)
        total = total * rescale + jnp.exp2(sink - highest)
        acc = acc * rows_of(rescale, acc.shape)
    acc = acc * rows_of(1.0 / jnp.maximum(total, 1e-30), acc.shape)
    width = out_columns(launch.head_dim)
    staging = refs["out_smem"].at[lane]
    for at in range(0, acc.shape[1], width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.store(staging, acc[:, at : at + width].astype(launch.dtype), optimized=False)
        plgpu.commit_smem()
        for bit in reversed(range(QUERY_ROWS.bit_length())):
            size = 1 << bit
            row = rows - lax.rem(rows, 2 * size)  # the larger pieces come before

            @pl.when(rows & size != 0)
            def _(size=size, row=row, at=at):
                to = refs["out"].at[head, pl.ds(query + row, size), pl.ds(column + at, width)]
                plgpu.copy_smem_to_gmem(staging.at[pl.ds(row, size)], to)


def _move(refs: dict, launch: Launch, ring, worker) -> None:
    """Fills a ring with the KV blocks of a worker's segments, one after the other."""
    blocks, heads = launch.blocks, launch.num_kv_heads
    workers, items = refs["workers"], refs["items"]
    begin, stop, item = workers[worker, BEGIN], workers[worker, STOP], workers[worker, ITEM]
    layer = refs["layer"][0]

    def fetch_numbers(name: str, row, offset, target, index: int, barrier) -> None:
        """A float32 for each token of a piece; see _numbers."""
        packed = launch.packed_pages
        row = row if packed == 1 else lax.div(row, packed)
        source = refs[name].at[row, pl.ds(offset, packed * launch.piece)]
        plgpu.copy_gmem_to_smem(source, target.at[index], barrier)

    def fetch(segment: Segment, block, slot, k_or_v: int, barrier) -> None:
        last = lax.div(segment.end - 1, launch.page_size)
        for index in range(blocks.kv_tokens // launch.piece):
            token = block * blocks.kv_tokens + index * launch.piece
            number = jnp.minimum(lax.div(token, launch.page_size), last)  # the table ends there
            offset = lax.rem(token, launch.page_size) if launch.piece < launch.page_size else 0
            page = layer * launch.num_pages + refs["table"][segment.table_row, number]
            matrix_row = (page * 2 + k_or_v) * heads + segment.head
            into = pl.ds(index * launch.piece, launch.piece)
            source = refs["pages"].at[pl.ds(matrix_row * launch.page_size + offset, launch.piece)]
            plgpu.copy_gmem_to_smem(source, refs[("k_smem", "v_smem")[k_or_v]].at[slot, into], barrier)
            if launch.quantized:
                fetch_numbers("scales", matrix_row, offset, refs["scales_smem"].at[slot, k_or_v], index, barrier)
            if launch.bias and k_or_v == 0:
                fetch_numbers("bias", page * heads + segment.head, offset, refs["bias_smem"].at[slot], index, barrier)

    def one_segment(n, filled):
        segment = read_segment(items, item + n, begin, stop, heads)

        def one_block(i, filled):
            slot = ring * blocks.stages + lax.rem(filled, blocks.stages)
            for k_or_v, full, empty in ((0, "k_full", "k_empty"), (1, "v_full", "v_empty")):
                pl.when(filled >= blocks.stages)(lambda empty=empty: plgpu.barrier_wait(refs[empty].at[slot]))
                fetch(segment, segment.first + i, slot, k_or_v, refs[full].at[slot])
            return filled + 1

        return lax.fori_loop(segment.lo, segment.hi, one_block, filled)

    lax.fori_loop(0, workers[worker, SEGMENTS], one_segment, jnp.int32(0))


def _numbers(launch: Launch, ref, rows) -> jax.Array:
    """[W] from shared memory [copies, packed_pages * piece]; rows: of the source before packing, one for each copy.

    Mosaic GPU copies whole multiples of 128 bytes. Pages of 16 have 64 bytes of scales for a head: then a copy brings
    two rows of the array, and this takes one of them.
    """
    parts = []
    for index, row in enumerate(rows):
        at = lax.rem(row, launch.packed_pages) * launch.piece if launch.packed_pages > 1 else 0
        parts.append(plgpu.load(ref.at[index, pl.ds(at, launch.piece)], layout=COLUMN, optimized=False))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def visible(refs: dict, launch: Launch, segment: Segment, block, lane_row, shape):
    """[64, W]: whether a query row sees a key; lane_row: the first of the warpgroup's rows in the query block."""
    key = block * launch.blocks.kv_tokens + _iota(shape, 1)
    row = segment.offset + lane_row + _iota(shape, 0)
    position = segment.first_new + (row if launch.group == 1 else lax.div(row, launch.group))
    seen = key <= position
    if launch.tree_words:
        node = key - segment.first_new
        inside = (node >= 0) & (segment.tree != 0)
        named = jnp.zeros(shape, jnp.int32)
        for word in range(launch.tree_words):
            at = segment.query + lane_row
            bits = plgpu.load(refs["tree"].at[word, pl.ds(at, QUERY_ROWS)], layout=ROW, optimized=False)
            shift = node - 32 * word
            mine = (shift >= 0) & (shift < 32)
            bit = lax.shift_right_logical(rows_of(bits, shape), jnp.where(mine, shift, 0)) & 1
            named = jnp.where(mine, bit, named)
        # A tree is the row's own: its later tokens are beyond the causal limit of none that names them.
        seen = jnp.where(inside, named != 0, seen)
    if launch.reach.ends:
        seen = seen & (key >= launch.reach.oldest(position))
    return seen


def needs_mask(launch: Launch, segment: Segment, block, lane_row):
    """Whether any of the warpgroup's rows does not see all keys of a block."""
    size = launch.blocks.kv_tokens
    begin, last = block * size, block * size + size - 1
    first_position = segment.first_new + lax.div(segment.offset + lane_row, launch.group)
    needs = last > first_position
    if launch.tree_words:
        needs = needs | ((segment.tree != 0) & (last >= segment.first_new))
    if launch.reach.ends:
        last_position = segment.first_new + lax.div(segment.offset + lane_row + QUERY_ROWS - 1, launch.group)
        needs = needs | (begin < launch.reach.oldest(last_position))
    return needs


def _pieces(tokens: int, head_dim: int, columns: int):
    """Parts of a matrix [W, H] that few registers hold, beside the accumulator that is there all the time."""
    for row in range(0, tokens, QUERY_ROWS):
        for column in range(0, head_dim, columns):
            yield row, (pl.ds(row, min(QUERY_ROWS, tokens - row)), pl.ds(column, min(columns, head_dim - column)))


def _widen(source, target, valid) -> None:
    """8-bit matrix [W, H] to `target`'s dtype; rows from `valid` on become zero (None: all are kept)."""
    for row, where in _pieces(*source.shape, columns=128):  # whole tiles of 8-bit numbers
        values = source[where]
        if values.dtype == jnp.float8_e4m3fn:  # sm_90 converts it to float16 only, which holds all of it
            values = values.astype(jnp.float16)
        values = values.astype(target.dtype)
        if valid is not None:
            values = jnp.where(row + _iota(values.shape, 0) < valid, values, jnp.zeros_like(values))
        target[where] = values
    plgpu.commit_smem()


def _zero_rows(ref, valid) -> None:
    """Zeroes the rows of [W, H] from `valid` on."""
    for row, where in _pieces(*ref.shape, columns=64):
        values = ref[where]
        ref[where] = jnp.where(row + _iota(values.shape, 0) < valid, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def _compute(refs: dict, launch: Launch, lane, ring, worker) -> None:
    """Attends for a worker's segments. lane: this warpgroup's number in the block."""
    blocks, size = launch.blocks, launch.blocks.kv_tokens
    shape = (QUERY_ROWS, size)
    workers, items = refs["workers"], refs["items"]
    begin, stop, item = workers[worker, BEGIN], workers[worker, STOP], workers[worker, ITEM]
    segments = workers[worker, SEGMENTS]
    lane_row = lane * QUERY_ROWS if blocks.shared else 0
    q_smem = refs["q_smem"].at[lane]
    wide = refs["wide_smem"].at[lane] if launch.quantized else None

    def fetch_queries(segment: Segment) -> None:
        rows = launch.fetched_rows
        source = refs["q"].at[segment.head, pl.ds(segment.query + lane_row, rows)]
        plgpu.copy_gmem_to_smem(source, q_smem.at[pl.ds(0, rows)], refs["q_full"].at[lane])

    copies = size // launch.piece

    def scales(segment: Segment, slot, k_or_v: int):
        row = k_or_v * launch.num_kv_heads + segment.head  # a page has 2 K rows: an even number
        return _numbers(launch, refs["scales_smem"].at[slot, k_or_v], [row] * copies)

    def biases(segment: Segment, block, slot):
        def row(index):
            if launch.packed_pages == 1 or launch.num_kv_heads % 2 == 0:
                return segment.head
            number = jnp.minimum(block * copies + index, lax.div(segment.end - 1, launch.page_size))
            page = refs["layer"][0] * launch.num_pages + refs["table"][segment.table_row, number]
            return page * launch.num_kv_heads + segment.head

        return _numbers(launch, refs["bias_smem"].at[slot], [row(index) for index in range(copies)])

    def one_block(segment: Segment, i, carry):
        acc, maximum, total, taken = carry
        block = segment.first + i
        slot = ring * blocks.stages + lax.rem(taken, blocks.stages)
        valid = segment.end - block * size  # rows of the block that hold something

        plgpu.barrier_wait(refs["k_full"].at[slot])
        keys = refs["k_smem"].at[slot]
        if launch.quantized:
            _widen(keys, wide, None)
            keys = wide
        scores = _scores(q_smem, keys, size)
        if launch.quantized:
            scores = scores * columns_of(scales(segment, slot, 0), shape)
        if launch.soft_cap is not None:
            scores = launch.soft_cap * jnp.tanh(scores * (1 / launch.soft_cap))
        if launch.bias:
            bias = biases(segment, block, slot)
            old = block * size + _iota(shape, 1) < segment.first_new
            scores = scores + jnp.where(old, columns_of(bias, shape), 0.0)
        if launch.quantized or launch.bias:
            plgpu.commit_smem()  # the reads of scales and biases come before the next copy into the same place
        plgpu.barrier_arrive(refs["k_empty"].at[slot])

        def masked(scores):
            return jnp.where(visible(refs, launch, segment, block, lane_row, shape), scores, MASKED)

        scores = lax.cond(needs_mask(launch, segment, block, lane_row), masked, lambda scores: scores, scores)

        highest = jnp.maximum(maximum, jnp.max(scores, axis=1) * LOG2E)
        rescale = jnp.exp2(maximum - highest)
        weights = jnp.exp2(scores * LOG2E - rows_of(highest, shape))
        total = total * rescale + jnp.sum(weights, axis=1)
        acc = acc * rows_of(rescale, acc.shape)
        if not launch.quantized:
            weights = weights.astype(launch.dtype)
            acc, highest, total, weights = lax.optimization_barrier((acc, highest, total, weights))

        plgpu.barrier_wait(refs["v_full"].at[slot])
        values = refs["v_smem"].at[slot]
        if launch.quantized:
            scale = columns_of(scales(segment, slot, 1), shape)
            weights = weights * jnp.where(_iota(shape, 1) < valid, scale, 0.0)
            _widen(values, wide, valid)
            values = wide
        else:

            @pl.when(valid < size)
            def _():
                if launch.parts == 1:
                    _zero_rows(values, valid)
                else:
                    pl.when(lane == 0)(lambda: _zero_rows(values, valid))
                    plgpu.barrier_arrive_and_wait(refs["both"])

        acc = _accumulate(acc, weights.astype(launch.dtype), values, launch.interpret)
        plgpu.barrier_arrive(refs["v_empty"].at[slot])
        return acc, highest, total, taken + 1

    def keep_part(segment: Segment, acc, maximum, total) -> None:
        """A partial softmax to the workspace: an item's beginning to place 1 of the worker, anything else to 0."""
        place = 2 * worker + jnp.where(segment.lo == 0, 1, 0)
        part = lane if blocks.shared else 0
        plgpu.store(refs["part_out"].at[place, part], acc, optimized=False)
        plgpu.store(refs["part_max"].at[place, part], maximum, optimized=False)
        plgpu.store(refs["part_sum"].at[place, part], total, optimized=False)

    def one_segment(n, taken):
        segment = read_segment(items, item + n, begin, stop, launch.num_kv_heads)
        plgpu.barrier_wait(refs["q_full"].at[lane])
        acc = plgpu.layout_cast(jnp.zeros((QUERY_ROWS, launch.head_dim), jnp.float32), TILE)
        maximum = plgpu.layout_cast(jnp.full((QUERY_ROWS,), LOWEST, jnp.float32), ROW)
        total = plgpu.layout_cast(jnp.zeros((QUERY_ROWS,), jnp.float32), ROW)
        acc, maximum, total, taken = lax.fori_loop(
            segment.lo, segment.hi, partial(one_block, segment), (acc, maximum, total, taken)
        )

        @pl.when(n + 1 < segments)  # the next queries come while this item's output goes
        def _():
            fetch_queries(read_segment(items, item + n + 1, begin, stop, launch.num_kv_heads))

        @pl.when(segment.whole)
        def _():
            rows = jnp.clip(segment.rows - lane_row, 0, QUERY_ROWS)
            finish(refs, launch, acc, maximum, total, head=segment.head, query=segment.query + lane_row, rows=rows,
                   offset=segment.offset + lane_row, lane=lane)  # fmt: skip

        @pl.when(jnp.logical_not(segment.whole))
        def _():
            keep_part(segment, acc, maximum, total)

        return taken

    @pl.when(segments > 0)
    def _():
        fetch_queries(read_segment(items, item, begin, stop, launch.num_kv_heads))

    lax.fori_loop(0, segments, one_segment, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _scratch(launch: Launch) -> dict[str, Any]:
    blocks, size = launch.blocks, launch.blocks.kv_tokens
    lanes, slots = blocks.warpgroups, blocks.rings * blocks.stages
    copies = size // launch.piece
    ring = (slots, size, launch.head_dim)
    numbers = (copies, launch.packed_pages * launch.piece)
    scratch = dict(
        q_smem=matrix((lanes, QUERY_ROWS, launch.head_dim), launch.dtype),
        k_smem=matrix(ring, launch.kv_dtype),
        v_smem=matrix(ring, launch.kv_dtype),
        out_smem=plgpu.SMEM((lanes, QUERY_ROWS, out_columns(launch.head_dim)), launch.dtype),
        q_full=plgpu.Barrier(num_barriers=lanes),
        k_full=plgpu.Barrier(num_arrivals=copies * (1 + launch.quantized + launch.bias), num_barriers=slots),
        v_full=plgpu.Barrier(num_arrivals=copies * (1 + launch.quantized), num_barriers=slots),
        k_empty=plgpu.Barrier(num_arrivals=launch.parts, num_barriers=slots),
        v_empty=plgpu.Barrier(num_arrivals=launch.parts, num_barriers=slots),
    )
    if launch.parts > 1:
        scratch["both"] = plgpu.Barrier(num_arrivals=launch.parts)
    if launch.quantized:
        scratch["wide_smem"] = matrix((lanes, size, launch.head_dim), launch.dtype)
        scratch["scales_smem"] = plgpu.SMEM((slots, 2, *numbers), jnp.float32)
    if launch.bias:
        scratch["bias_smem"] = plgpu.SMEM((slots, *numbers), jnp.float32)
    return scratch


def _cost(launch: Launch) -> pl.CostEstimate:
    """Every KV token is read once and multiplied with 64 query rows at least; the lengths are data, and guessed."""
    pairs = launch.mean_tokens * launch.num_kv_heads * QUERY_ROWS * launch.parts
    token_bytes = 2 * launch.num_kv_heads * launch.head_dim * jnp.dtype(launch.kv_dtype).itemsize
    return pl.CostEstimate(
        flops=4 * pairs * launch.head_dim, transcendentals=pairs, bytes_accessed=launch.mean_tokens * token_bytes
    )


class Operands(NamedTuple):
    """What a launch reads, besides its schedule. Pages, scales and biases are the contract's arrays, reshaped."""

    layer: jax.Array  # [1]
    table: jax.Array  # [S, M]
    q: jax.Array  # [K, rows, H], already scaled; 2 * 64 rows more than there are, so that a fetch stays inside
    pages: jax.Array  # [L P 2 K B, H]
    scales: jax.Array | None  # [L P 2 K, B]; of pages of 16 two rows in one, see _numbers
    bias: jax.Array | None  # [L P K, B], the same
    sinks: jax.Array | None  # [K, 64 + G]: repeated, a query block may begin at any of the G heads
    tree: jax.Array | None  # int32 [C, rows]


def attend(launch: Launch, schedule: Schedule, given: Operands) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns out [K, rows, H] without the rows of cut items, and their partial softmaxes.

    Partial: [2 W, parts, 64, H] weighted values, [2 W, parts, 64] maxima (of base 2) and sums.
    """
    blocks, q = launch.blocks, given.q
    optional = {name: x for name, x in given._asdict().items() if x is not None}
    operands = dict(workers=schedule.workers, items=schedule.items) | optional
    names = tuple(operands)
    outputs = ("out", "part_out", "part_max", "part_sum")
    places = (2 * launch.workers, launch.parts, QUERY_ROWS)

    def body(*refs, **scratch):
        named = dict(zip((*names, *outputs), refs, strict=True)) | scratch
        sm, warpgroup = lax.axis_index("sm"), lax.axis_index("warpgroup")
        @pl.when(warpgroup < blocks.warpgroups)
        def _():
            ring = 0 if blocks.shared else warpgroup
            _compute(named, launch, warpgroup, ring, sm * blocks.rings + ring)

        @pl.when(warpgroup >= blocks.warpgroups)
        def _():
            def move(ring):
                _move(named, launch, ring, sm * blocks.rings + ring)

            if launch.interpret:
                move(warpgroup - blocks.warpgroups)
            else:
                plgpu.warp_map(lambda warp: pl.when(warp < blocks.rings)(lambda: move(warp)))

    # Simulated warps take threads of XLA's pool like warpgroups do, and where all wait for each other none is left to
    # run: there a warpgroup moves for each ring, 5 threads in all instead of 8.
    movers = blocks.rings if launch.interpret else 1
    call = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((*places, launch.head_dim), jnp.float32),
            jax.ShapeDtypeStruct(places, jnp.float32),
            jax.ShapeDtypeStruct(places, jnp.float32),
        ),
        scratch_types=_scratch(launch),
        grid=(launch.sms,),
        grid_names=("sm",),
        num_threads=blocks.warpgroups + movers,
        thread_name="warpgroup",
        cost_estimate=_cost(launch),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=SEMANTICS),
        interpret=gpu_params() if launch.interpret else None,
    )
    return call(*operands.values())
