"""Pages between HBM and VMEM, and what must be done to them there.

refs.values [slots, pages, X, K, B, R], refs.scales [slots, pages, 2, K, B] and refs.bias [slots, pages, K, B] are VMEM;
refs.kv, refs.scales_hbm and refs.bias_hbm the pages in HBM with L, P in front; refs.fetched one DMA semaphore a slot.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.mosaic_tpu.block import row_index
from pallas_kernels.ragged_paged_attention.mosaic_tpu.problem import Problem, cdiv


def _copies(refs: Any, problem: Problem, page, slot, i):
    layer = refs.layer[0]
    paged = [(refs.kv, refs.values)]
    if problem.quantized:
        paged.append((refs.scales_hbm, refs.scales))
    if problem.biased:
        paged.append((refs.bias_hbm, refs.bias))
    return [pltpu.make_async_copy(hbm.at[layer, page], vmem.at[slot, i], refs.fetched.at[slot]) for hbm, vmem in paged]


def start_fetch(refs: Any, problem: Problem, row, first_page, count, slot):
    """Starts the copies of `count` pages of a row; one copy a page, for a page is contiguous."""
    start = row * refs.max_pages + first_page

    def one(i, _):
        for copy in _copies(refs, problem, refs.page_table[start + i], slot, i):
            copy.start()

    lax.fori_loop(0, count, one, None)


def wait_fetch(refs: Any, problem: Problem, count, slot):
    def one(i, _):
        for copy in _copies(refs, problem, 0, slot, i):
            copy.wait()

    lax.fori_loop(0, count, one, None)


def clear_values(refs: Any, problem: Problem, slot, start, end):
    """Zeroes tokens start .. end - 1 of a slot, end a multiple of a tile: 0 * NaN left there would be NaN."""
    tile, size = problem.tile, problem.page_size
    plane = problem.planes - 1

    @pl.when((start % tile != 0) & (start < end))
    def _():
        page, offset = start // size, start % size // tile * tile
        rows = pl.ds(pl.multiple_of(offset, tile), tile)
        keep = row_index((tile, 1)) < start % tile
        for head in range(problem.num_kv_heads):
            old = refs.values[slot, page, plane, head, rows].astype(jnp.float32)
            refs.values[slot, page, plane, head, rows] = jnp.where(keep, old, 0.0).astype(problem.kv_dtype)

    zeros = jnp.zeros((tile, problem.row_lanes), problem.kv_dtype)

    def one(i, _):
        page, offset = i * tile // size, i * tile % size
        rows = pl.ds(pl.multiple_of(offset, tile), tile)
        for head in range(problem.num_kv_heads):
            refs.values[slot, page, plane, head, rows] = zeros

    lax.fori_loop(cdiv(start, tile), end // tile, one, None)
