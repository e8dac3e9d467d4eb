"""Rows of more tokens: chunks of prompts, drafts and trees to verify.

One program in two phases. The new K and V go to their pages, segment by segment, in a ring of slots; then blocks of
queries of a row stream its pages, masks only where a block of KV needs one. Queries and pages are fetched ahead over
all boundaries.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.mosaic_tpu.block import Block, Ranges, Softmax, finish, lane_index, row_index
from pallas_kernels.ragged_paged_attention.mosaic_tpu.config import MixedBlocks
from pallas_kernels.ragged_paged_attention.mosaic_tpu.pages import clear_values, start_fetch, wait_fetch
from pallas_kernels.ragged_paged_attention.mosaic_tpu.problem import LANES, LOWEST, Problem, cdiv

# refs.cursor, in SMEM: the block to fetch next, how many were fetched and used, the same of query blocks, and how many
# rows of queries are on their way out.
_ROW, _QUERIES, _BLOCK, _FETCHED, _USED, _QUERIES_FETCHED, _QUERIES_USED, _LEAVING = range(8)


def mixed_kernel(refs: Any, *, problem: Problem, blocks: MixedBlocks):
    """Prefetched scalars: layer [1], page_table [S * M], kv_lens [S], distribution [3], cu_q_lens [S + 1], and starts
    [S + 1], where a row's tokens are in `q`.

    Inputs in HBM: q [K, tokens * G, R], new [X * K * R / 128 (+ scales), tokens, 128] f32, words [tokens * G, 128].
    Inputs in VMEM: sinks [K, D, 128], token [D, 128], which token of a query block a row belongs to.
    Outputs in HBM: out as q; kv and its scales in place.
    Scratch: the ring of pages; queries [slots, K, D, R] and words_in [slots, D, 128]; maximum, total [K, D, 128] and
    output [K, D, R] f32; leaving [K, D, R]; segments [slots, X, K, tokens, R], segment_scales [slots, 2, K, B] and
    incoming [slots, planes as new, tokens + 8, 128] f32.
    """
    _write_rows(refs, problem, blocks)
    for field in range(8):
        refs.cursor[field] = 0
    refs.cursor[_ROW] = _next_row(refs, refs.distribution[0])
    advance = partial(_fetch_next, refs, problem, blocks)
    for _ in range(blocks.slots - 1):
        advance()

    def one_row(row, _):
        def one_query_block(j, _):
            span = _Span(refs, problem, blocks, row, j)
            of_size = partial(_for_size, blocks, span)
            _start(refs, problem)

            def one_block(b, _):
                slot = refs.cursor[_USED] % blocks.slots
                refs.cursor[_USED] += 1
                query_slot = refs.cursor[_QUERIES_USED] % blocks.slots
                advance()

                @pl.when(b == 0)
                def _():
                    of_size(lambda size: _each(_query_copies(refs, problem, span, query_slot, size), "wait"))

                page = span.first_page + b * blocks.fetch_pages
                count = span.pages_from(page)
                wait_fetch(refs, problem, count, slot)
                base = page * problem.page_size
                end = jnp.minimum(span.end - base, blocks.fetch_pages * problem.page_size)
                valid = jnp.minimum(span.kv_len - base, count * problem.page_size)
                clear_values(refs, problem, slot, valid, cdiv(end, blocks.edge_tokens) * blocks.edge_tokens)
                of_size(lambda size: _attend(refs, problem, blocks, span, slot, query_slot, base, end, size))

            lax.fori_loop(0, span.count, one_block, None)
            refs.cursor[_QUERIES_USED] += 1
            of_size(lambda size: _leave(refs, problem, blocks, span, size))

        lax.fori_loop(0, _num_query_blocks(refs, blocks, row), one_query_block, None)

    lax.fori_loop(refs.distribution[0], refs.distribution[2], one_row, None)
    _wait_leaving(refs, blocks)


def _each(copies, action: str):
    for make in copies:
        getattr(make(), action)()


def _num_tokens(refs, row):
    return refs.cu_q_lens[row + 1] - refs.cu_q_lens[row]


def _num_query_blocks(refs, blocks: MixedBlocks, row):
    return cdiv(_num_tokens(refs, row), blocks.query_tokens)


def _next_row(refs, row):
    """The first row from `row` on that has tokens, or the number of rows."""
    end = refs.distribution[2]

    def is_empty(r):
        return (r < end) & (_num_tokens(refs, jnp.maximum(jnp.minimum(r, end - 1), 0)) == 0)

    return lax.while_loop(lambda state: state[1], lambda state: (state[0] + 1, is_empty(state[0] + 1)),
                          (row, is_empty(row)))[0]  # fmt: skip


class _Span:
    """What query block j of a row is, and sees."""

    def __init__(self, refs, problem: Problem, blocks: MixedBlocks, row, j):
        self._blocks, self._page_size = blocks, problem.page_size
        num_tokens = _num_tokens(refs, row)
        self.kv_len = refs.kv_lens[row]
        self.old_end = self.kv_len - num_tokens
        self.tokens = jnp.minimum(num_tokens - j * blocks.query_tokens, blocks.query_tokens)
        self.position = self.old_end + j * blocks.query_tokens  # of its first token
        self.end = self.position + self.tokens
        self.first_page = problem.reach.oldest(self.position) // problem.page_size
        self.count = cdiv(cdiv(self.end, problem.page_size) - self.first_page, blocks.fetch_pages)
        self.query_row = pl.multiple_of((refs.starts[row] + j * blocks.query_tokens) * problem.group, 16)
        self.is_tree = jnp.where(num_tokens <= 32 * problem.tree_words, 1, 0)
        self.j = j

    def pages_from(self, page):
        return jnp.minimum(cdiv(self.end, self._page_size) - page, self._blocks.fetch_pages)


def _for_size(blocks: MixedBlocks, span: _Span, body):
    """Runs the body for the smallest size that holds the block's queries: a static number of rows."""
    rows = span.tokens * blocks.group
    below = 0
    for size in blocks.query_rows:
        pl.when((rows > below) & (rows <= size))(partial(body, size))
        below = size


def _query_copies(refs, problem: Problem, span: _Span, slot, size: int):
    rows = pl.ds(span.query_row, size)
    arrived = refs.arrived.at[slot]
    copy = partial(partial, pltpu.make_async_copy)
    yield copy(refs.q.at[:, rows, :], refs.queries.at[slot, :, pl.ds(0, size), :], arrived)
    if problem.tree_words:
        yield copy(refs.words.at[rows, :], refs.words_in.at[slot, pl.ds(0, size), :], arrived)


def _fetch_next(refs, problem: Problem, blocks: MixedBlocks):
    row, j, b = refs.cursor[_ROW], refs.cursor[_QUERIES], refs.cursor[_BLOCK]

    @pl.when(row < refs.distribution[2])
    def _():
        span = _Span(refs, problem, blocks, row, j)

        @pl.when(b == 0)
        def _():
            slot = refs.cursor[_QUERIES_FETCHED] % blocks.slots
            refs.cursor[_QUERIES_FETCHED] += 1
            _for_size(blocks, span, lambda n: _each(_query_copies(refs, problem, span, slot, n), "start"))

        page = span.first_page + b * blocks.fetch_pages
        start_fetch(refs, problem, row, page, span.pages_from(page), refs.cursor[_FETCHED] % blocks.slots)
        refs.cursor[_FETCHED] += 1
        last_block = b + 1 == span.count
        last = last_block & (j + 1 == _num_query_blocks(refs, blocks, row))
        refs.cursor[_BLOCK] = jnp.where(last_block, 0, b + 1)
        refs.cursor[_QUERIES] = jnp.where(last, 0, jnp.where(last_block, j + 1, j))

        @pl.when(last)
        def _():
            refs.cursor[_ROW] = _next_row(refs, row + 1)


def _start(refs, problem: Problem):
    if problem.sinks:  # One more key: weight 1 at its own maximum, no value.
        refs.maximum[...] = jnp.broadcast_to(refs.sinks[...], refs.maximum.shape)
        first = jnp.where(lane_index(refs.total.shape[1:]) == 0, 1.0, 0.0)
        refs.total[...] = jnp.broadcast_to(first[None], refs.total.shape)
    else:
        refs.maximum[...] = jnp.full_like(refs.maximum, LOWEST)
        refs.total[...] = jnp.zeros_like(refs.total)
    refs.output[...] = jnp.zeros_like(refs.output)


def _out_copy(refs, span_row, size: int):
    return pltpu.make_async_copy(
        refs.leaving.at[:, pl.ds(0, size), :], refs.out.at[:, pl.ds(span_row, size), :], refs.left
    )


def _wait_leaving(refs, blocks: MixedBlocks):
    for size in blocks.query_rows:

        @pl.when(refs.cursor[_LEAVING] == size)
        def _(size=size):
            _out_copy(refs, 0, size).wait()


def _leave(refs, problem: Problem, blocks: MixedBlocks, span: _Span, size: int):
    """Sends a query block's output. One after the other: its last rows may lie over the next row's first."""
    _wait_leaving(refs, blocks)

    def one(head, _):
        rows = (head, pl.ds(0, size))
        refs.leaving[rows] = finish(Softmax(refs.maximum[rows], refs.total[rows], refs.output[rows]), refs.out.dtype)

    lax.fori_loop(0, problem.num_kv_heads, one, None)
    _out_copy(refs, span.query_row, size).start()
    refs.cursor[_LEAVING] = size


def _attend(refs, problem: Problem, blocks: MixedBlocks, span: _Span, slot, query_slot, base, end, size: int):
    """A query block against one fetched block: whole compute blocks without a mask, those at the edges with one."""
    position = span.position - base
    old_end = span.old_end - base
    first = problem.reach.oldest(span.position, base)
    start = problem.reach.oldest(span.end - 1, base)
    whole = jnp.maximum(old_end, 0) if problem.biased or problem.tree_words else position + 1

    def step(page, group, _, pages, masked):
        block = Block(refs, problem, slot, page, pages)
        items = blocks.items(size, edge=masked)
        first_head = group * (blocks.edge_heads if masked else blocks.heads)

        def at(item):
            head, first, rows = item
            return first_head + head, pl.ds(first, rows)

        def scores(item):
            head, rows = at(item)
            return block.scores(refs.queries[query_slot, head, rows], head)

        ahead = scores(items[0])
        for n, item in enumerate(items):
            s = ahead
            if n + 1 < len(items):
                ahead = scores(items[n + 1])
            head, rows = at(item)
            visible = biased = None
            if masked:
                offset = page * problem.page_size
                visible, biased = _masks(refs, problem, span, query_slot, rows, offset, position, old_end)
            old = Softmax(refs.maximum[head, rows], refs.total[head, rows], refs.output[head, rows])
            maximum, total, rescale, weights = block.weights(s, old, head, visible, biased)
            refs.maximum[head, rows], refs.total[head, rows] = maximum, total
            refs.output[head, rows] = block.output(old.output, rescale, weights, head)

    Ranges(blocks, first, start, whole, end).loop(step, times=(blocks.head_groups, blocks.edge_groups))


def _masks(refs, problem: Problem, span: _Span, query_slot, rows, offset, position, old_end):
    """(visible, biased): lane tile -> bool [rows, 128]. offset: of the compute block in the fetched one."""
    token = refs.token[rows]  # [rows, 128]
    key = lane_index(token.shape) + offset
    seen_from = token + position  # a query's own position in the fetched block
    oldest = problem.reach.oldest(token + span.position, span.position - position)

    def visible(j):
        index = key + j * LANES
        seen = index <= seen_from
        if problem.reach.ends:
            seen &= index >= oldest
        if problem.tree_words:
            node = index - old_end
            words = refs.words_in[query_slot, rows]
            word = words[:, :1]
            for w in range(1, problem.tree_words):
                word = jnp.where(node >= 32 * w, words[:, w : w + 1], word)
            bit = lax.shift_right_logical(jnp.broadcast_to(word, node.shape), node & 31) & 1
            seen &= (bit != 0) | (node < 0) | (span.is_tree == 0)
        return seen

    def biased(j):
        return key + j * LANES < old_end

    return visible, biased


def _write_rows(refs, problem: Problem, blocks: MixedBlocks):
    """Phase one: the new K and V to their pages, by segments of a page; what a segment holds besides stays."""
    size = blocks.segment_tokens
    end = refs.distribution[2]

    def first_segment(row):
        row = jnp.minimum(row, refs.kv_lens.shape[0] - 1)
        return (refs.kv_lens[row] - _num_tokens(refs, row)) // size

    def copies(row, segment, slot):
        """To read the old and the new, and to write: functions that make the copies."""
        position = segment * size
        page = refs.page_table[row * refs.max_pages + position // problem.page_size]
        rows = pl.ds(pl.multiple_of(position % problem.page_size, problem.tile), size)
        in_page = refs.kv.at[refs.layer[0], page, :, :, rows, :]
        source, _ = _source(refs, blocks, row, segment)
        incoming = refs.new.at[:, pl.ds(source, size + 8), :]
        read, written = refs.segment_read.at[slot], refs.segment_written.at[slot]
        copy = partial(partial, pltpu.make_async_copy)
        reads = [copy(in_page, refs.segments.at[slot], read), copy(incoming, refs.incoming.at[slot], read)]
        writes = [copy(refs.segments.at[slot], in_page, written)]
        if problem.quantized:  # a segment is a page then
            of_page = refs.scales_hbm.at[refs.layer[0], page]
            reads.append(copy(of_page, refs.segment_scales.at[slot], read))
            writes.append(copy(refs.segment_scales.at[slot], of_page, written))
        return reads, writes

    def advance(row, segment):
        last = (segment + 1) * size >= refs.kv_lens[row]
        following = lax.cond(last, lambda: _next_row(refs, row + 1), lambda: row)
        return following, jnp.where(last, first_segment(following), segment + 1)

    def read(n, row, segment):
        """Starts reading segment number n, once the slot's last write is over."""
        slot = n % blocks.segment_slots
        reads, writes = copies(row, segment, slot)

        @pl.when(n >= blocks.segment_slots)
        def _():
            _each(writes, "wait")

        _each(reads, "start")

    def maybe_read(n, row, segment):
        def go():
            read(n, row, segment)
            return (n + 1, *advance(row, segment))

        return lax.cond(row < end, go, lambda: (n, row, segment))

    def merge(n, row, segment):
        slot = n % blocks.segment_slots
        reads, writes = copies(row, segment, slot)
        _each(reads, "wait")
        _, skew = _source(refs, blocks, row, segment)
        position = segment * size + row_index((size, 1))
        kv_len = refs.kv_lens[row]
        fresh = (position >= kv_len - _num_tokens(refs, row)) & (position < kv_len)
        for plane in range(problem.planes):

            def one(head, _, plane=plane):
                kept = refs.segments[slot, plane, head].astype(jnp.float32)
                values = _shifted(refs, problem, slot, plane * problem.num_kv_heads + head, skew, size)
                refs.segments[slot, plane, head] = jnp.where(fresh, values, kept).astype(problem.kv_dtype)

            lax.fori_loop(0, problem.num_kv_heads, one, None)
        if problem.quantized:
            _merge_scales(refs, problem, slot, skew, segment * size, kv_len - _num_tokens(refs, row), kv_len)
        _each(writes, "start")

    row = _next_row(refs, refs.distribution[0])
    ahead = (jnp.int32(0), row, first_segment(row))
    for _ in range(blocks.segment_slots // 2):
        ahead = maybe_read(*ahead)

    def body(state):
        n, row, segment, ahead = state
        ahead = maybe_read(*ahead)
        merge(n, row, segment)
        return (n + 1, *advance(row, segment), ahead)

    total, *_ = lax.while_loop(lambda state: state[1] < end, body, (jnp.int32(0), row, first_segment(row), ahead))

    # The last writes of each slot are still on their way.
    def drain(slot, _):
        _each(copies(0, 0, slot)[1], "wait")

    lax.fori_loop(0, jnp.minimum(total, blocks.segment_slots), drain, None)


def _merge_scales(refs, problem: Problem, slot, skew, start, first, end):
    """The scales of tokens first .. end - 1 in a page of tokens from `start` on. They come as lanes 0 .. 2K - 1 of the
    plane after the values."""
    heads, size = problem.num_kv_heads, problem.page_size
    new = refs.incoming[slot, problem.planes * heads * (problem.row_lanes // LANES), pl.ds(skew, size)].T  # [128, B]
    position = start + lane_index((heads, size))
    fresh = (position >= first) & (position < end)
    for k_or_v in range(2):
        kept = refs.segment_scales[slot, k_or_v]
        refs.segment_scales[slot, k_or_v] = jnp.where(fresh, new[k_or_v * heads : (k_or_v + 1) * heads], kept)


def _shifted(refs, problem: Problem, slot, plane, skew, size: int):
    """Rows skew .. skew + size - 1 of a plane [tokens, R]. `incoming` has a plane for each lane tile: only so do its
    rows lie one after the other, and a load may cut through tiles."""
    tiles = problem.row_lanes // LANES
    parts = [refs.incoming[slot, plane * tiles + i, pl.ds(skew, size)] for i in range(tiles)]
    return parts[0] if tiles == 1 else jnp.concatenate(parts, axis=1)


def _source(refs, blocks: MixedBlocks, row, segment):
    """Where a segment's tokens start in `new`, rounded down to what may be copied, and by how much."""
    first = refs.kv_lens[row] - _num_tokens(refs, row)
    start = refs.cu_q_lens[row] + segment * blocks.segment_tokens - first + blocks.segment_tokens
    aligned = start // 8 * 8
    return pl.multiple_of(aligned, 8), start - aligned
