"""Rows of one token: each row's K and V stream through VMEM once, and its query against them.

One program over blocks of rows; fetches run ahead over blocks of KV and over rows, in a ring of slots. The new token is
merged into its page in VMEM, where it is attended to, and its tile written back.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.mosaic_tpu.block import Block, Ranges, Softmax, finish, lane_index, row_index
from pallas_kernels.ragged_paged_attention.mosaic_tpu.config import DecodeBlocks
from pallas_kernels.ragged_paged_attention.mosaic_tpu.pages import clear_values, start_fetch, wait_fetch
from pallas_kernels.ragged_paged_attention.mosaic_tpu.problem import LANES, LOWEST, Problem, cdiv

# refs.cursor, in SMEM: the block to fetch next, and how many were fetched and used.
_ROW, _BLOCK, _FETCHED, _USED = range(4)


def decode_kernel(refs: Any, *, problem: Problem, blocks: DecodeBlocks):
    """Prefetched scalars: layer [1], page_table [S * M], kv_lens [S], distribution [3].

    Inputs: q [rows, K, D, R], new [rows, X * K (+ 1 for scales), R] f32, sinks [K, D, 128].
    Outputs: out [rows, K, D, R]; kv and its scales in place.
    Scratch: the ring of pages; stage [2, X, K, tile, R], stage_scales [2, 2, K, B]; maximum, total [K, D, 128] and
    output [K, D, R] f32.
    """
    num_rows = refs.distribution[0]
    first_row = pl.program_id(0) * blocks.rows
    mine = jnp.clip(num_rows - first_row, 0, blocks.rows)
    advance = partial(_fetch_next, refs, problem, blocks, num_rows)

    @pl.when(pl.program_id(0) == 0)
    def _():
        for field in range(4):
            refs.cursor[field] = 0
        for _ in range(blocks.slots - 1):
            advance()

    def one_row(i, _):
        row = first_row + i
        kv_len = refs.kv_lens[row]
        first_page, count = _span(refs, problem, blocks, row)
        _start(refs, problem)

        def one_block(b, _):
            slot = refs.cursor[_USED] % blocks.slots
            refs.cursor[_USED] += 1
            advance()  # into the slot that was used last
            page = first_page + b * blocks.fetch_pages
            wait_fetch(refs, problem, _pages_of(problem, blocks, kv_len, page), slot)
            base = page * problem.page_size

            @pl.when(b == count - 1)
            def _():
                _write_new(refs, problem, blocks, i, row, slot, kv_len, base)

            _attend(refs, problem, blocks, i, slot, kv_len, base)

        lax.fori_loop(0, count, one_block, None)
        for head in range(problem.num_kv_heads):
            softmax = Softmax(refs.maximum[head], refs.total[head], refs.output[head])
            refs.out[i, head] = finish(softmax, refs.out.dtype)

    lax.fori_loop(0, mine, one_row, None)

    @pl.when((mine > 0) & (first_row + mine == num_rows))
    def _():
        for last in (2, 1):

            @pl.when(num_rows >= last)
            def _(last=last):
                _write_copies(refs, problem, num_rows - last, "wait")


def _span(refs, problem: Problem, blocks: DecodeBlocks, row):
    """The first page that a row's query sees, and in how many blocks its pages are fetched."""
    kv_len = refs.kv_lens[row]
    first = problem.reach.oldest(kv_len - 1) // problem.page_size
    return first, cdiv(cdiv(kv_len, problem.page_size) - first, blocks.fetch_pages)


def _pages_of(problem: Problem, blocks: DecodeBlocks, kv_len, page):
    return jnp.minimum(cdiv(kv_len, problem.page_size) - page, blocks.fetch_pages)


def _fetch_next(refs, problem: Problem, blocks: DecodeBlocks, num_rows):
    row, b = refs.cursor[_ROW], refs.cursor[_BLOCK]

    @pl.when(row < num_rows)
    def _():
        first, count = _span(refs, problem, blocks, row)
        page = first + b * blocks.fetch_pages
        slot = refs.cursor[_FETCHED] % blocks.slots
        start_fetch(refs, problem, row, page, _pages_of(problem, blocks, refs.kv_lens[row], page), slot)
        last = b + 1 == count
        refs.cursor[_ROW] = jnp.where(last, row + 1, row)
        refs.cursor[_BLOCK] = jnp.where(last, 0, b + 1)
        refs.cursor[_FETCHED] += 1


def _start(refs, problem: Problem):
    if problem.sinks:  # One more key: weight 1 at its own maximum, no value.
        refs.maximum[...] = refs.sinks[...]
        refs.total[...] = jnp.where(lane_index(refs.total.shape[1:]) == 0, 1.0, 0.0)[None] + jnp.zeros_like(refs.total)
    else:
        refs.maximum[...] = jnp.full_like(refs.maximum, LOWEST)
        refs.total[...] = jnp.zeros_like(refs.total)
    refs.output[...] = jnp.zeros_like(refs.output)


def _write_copies(refs, problem: Problem, row, action: str):
    position = refs.kv_lens[row] - 1
    page = refs.page_table[row * refs.max_pages + position // problem.page_size]
    offset = position % problem.page_size // problem.tile * problem.tile
    rows = pl.ds(pl.multiple_of(offset, problem.tile), problem.tile)
    half = row % 2
    pairs = [(refs.stage.at[half], refs.kv.at[refs.layer[0], page, :, :, rows, :])]
    if problem.quantized:
        pairs.append((refs.stage_scales.at[half], refs.scales_hbm.at[refs.layer[0], page]))
    for source, target in pairs:
        getattr(pltpu.make_async_copy(source, target, refs.written.at[half]), action)()


def _write_new(refs, problem: Problem, blocks: DecodeBlocks, i, row, slot, kv_len, base):
    """Merges the new token into its tile, in VMEM and in HBM; after it, V is zero up to where it is computed with."""
    position = kv_len - 1
    page, tile = (position - base) // problem.page_size, problem.tile
    offset = position % problem.page_size // tile * tile
    rows = pl.ds(pl.multiple_of(offset, tile), tile)
    index, at = row_index((tile, 1)), position % tile

    @pl.when(row >= 2)
    def _():
        _write_copies(refs, problem, row - 2, "wait")

    new = refs.new[i]  # [X * K, R]
    for plane in range(problem.planes):
        for head in range(problem.num_kv_heads):
            n = plane * problem.num_kv_heads + head
            old = refs.values[slot, page, plane, head, rows].astype(jnp.float32)
            merged = jnp.where(index == at, new[n : n + 1], old)
            refs.stage[row % 2, plane, head] = merged.astype(problem.kv_dtype)
            kept = jnp.where(index <= at, merged, 0.0)
            refs.values[slot, page, plane, head, rows] = kept.astype(problem.kv_dtype)
    if problem.quantized:
        _merge_scales(refs, problem, new, row, slot, page, position % problem.page_size)
    _write_copies(refs, problem, row, "start")
    length = kv_len - base
    end = cdiv(length, blocks.edge_tokens) * blocks.edge_tokens
    clear_values(refs, problem, slot, cdiv(length, tile) * tile, end)


def _merge_scales(refs, problem: Problem, new, row, slot, page, at):
    """The new token's scales, lanes 0 .. 2K - 1 of the row after its values, in VMEM and to be written."""
    heads, size = problem.num_kv_heads, problem.page_size
    lanes = jnp.broadcast_to(new[-1:, :LANES], (LANES, LANES)).T[:, :1]  # [128, 1]
    here = lane_index((heads, size)) == at
    for k_or_v in range(2):
        kept = refs.scales[slot, page, k_or_v]
        merged = jnp.where(here, lanes[k_or_v * heads : (k_or_v + 1) * heads], kept)
        refs.scales[slot, page, k_or_v] = merged
        refs.stage_scales[row % 2, k_or_v] = merged


def _attend(refs, problem: Problem, blocks: DecodeBlocks, i, slot, kv_len, base):
    """All heads against one fetched block: whole compute blocks without a mask, those at the edges with one."""
    end = jnp.minimum(kv_len - base, blocks.fetch_pages * problem.page_size)
    start = problem.reach.oldest(kv_len - 1, base)
    old_end = kv_len - 1 - base  # the new token has no bias
    ranges = Ranges(blocks, start, start, jnp.minimum(end, old_end) if problem.biased else end, end)

    for first in range(0, problem.num_kv_heads, blocks.heads):
        heads = range(first, first + blocks.heads)
        queries = [refs.q[i, head] for head in heads]

        def step(page, _, carry, pages, masked, heads=heads, queries=queries):
            block = Block(refs, problem, slot, page, pages)
            lane = lane_index((queries[0].shape[0], LANES)) + page * problem.page_size

            def visible(j):
                return (lane + j * LANES >= start) & (lane + j * LANES < end)

            def biased(j):
                return lane + j * LANES < old_end

            masks = (visible, biased) if masked else (None, None)
            scores = [block.scores(q, head) for q, head in zip(queries, heads, strict=True)]
            new = []
            for s, old, head in zip(scores, carry, heads, strict=True):
                maximum, total, rescale, weights = block.weights(s, old, head, *masks)
                new.append(Softmax(maximum, total, block.output(old.output, rescale, weights, head)))
            return new

        carry = [Softmax(refs.maximum[head], refs.total[head], refs.output[head]) for head in heads]
        carry = ranges.loop(step, carry)
        for head, softmax in zip(heads, carry, strict=True):
            refs.maximum[head], refs.total[head], refs.output[head] = softmax
