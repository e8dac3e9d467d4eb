"""The work of a step as a flat list, cut into equal parts: which KV blocks each worker attends to.

A work item is one query block of a row and one kv head; it has a block count of its own (causal limit, window). The KV
blocks of all items follow each other in one long list, and worker w takes the blocks w * per .. (w + 1) * per - 1 of
it: every worker has the same work, whatever the lengths ("stream-K", Osama et al. 2023). An item that a border cuts is
a partial softmax in each of its workers; a merge puts those together. A worker has at most two of them: one that was
begun before it, one that goes on after it.

Axis letters: T tokens, S rows, N query heads, K kv heads, G = N / K, J query blocks, W workers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention.reach import Reach

# Columns of Schedule.items.
QUERY, ROWS, OFFSET, FIRST_NEW, END, FIRST, COUNT, START, TABLE_ROW, TREE = range(10)
# Columns of Schedule.workers.
ITEM, SEGMENTS, BEGIN, STOP, MERGE_ITEM, MERGE_PARTS = range(6)


class Schedule(NamedTuple):
    items: jax.Array  # [J, 10] int32, of query blocks; item number = query block * K + kv head
    # QUERY: first of its rows among the packed queries [T * G]. ROWS: how many. OFFSET: the first one's place among the
    # rows of its sequence: row m belongs to token FIRST_NEW + (OFFSET + m) // G. FIRST_NEW: cache index of the
    # sequence's first new token. END: cache index after the last key that any of its rows sees. FIRST, COUNT: its KV
    # blocks. START: KV blocks of the query blocks before it, times K. TREE: 1 where the tree mask applies.
    workers: jax.Array  # [W, 6] int32
    # ITEM, SEGMENTS: first item and number of items. BEGIN, STOP: its part of the list. MERGE_ITEM: an item that begins
    # here and goes on in the next worker, or -1; MERGE_PARTS: how many workers have a part of it.


class Batch(NamedTuple):
    """What the schedule depends on; arrays of the contract in `api.AttentionFn`."""

    kv_lens: jax.Array  # [S]
    cu_q_lens: jax.Array  # [S + 1]
    distribution: jax.Array  # [3]


def query_blocks(batch: Batch, group: int, rows: int, num_tokens: int, decode: bool):
    """(row, offset, count) of query blocks [J], the used ones first: rows of one token, or all others."""
    num_rows = batch.kv_lens.shape[0]
    row = jnp.arange(num_rows)
    if decode:
        return row, jnp.zeros_like(row), jnp.where(row < batch.distribution[0], group, 0)
    lengths = group * (batch.cu_q_lens[1:] - batch.cu_q_lens[:-1])
    lengths = jnp.where((row >= batch.distribution[0]) & (row < batch.distribution[2]), lengths, 0)
    blocks = -(-lengths // rows)
    end = jnp.cumsum(blocks)
    block = jnp.arange(min(num_rows, num_tokens) + group * num_tokens // rows)
    row = jnp.minimum(jnp.searchsorted(end, block, side="right", method="compare_all"), num_rows - 1)
    offset = (block - end[row] + blocks[row]) * rows
    return row, offset, jnp.where(block < end[-1], jnp.minimum(lengths[row] - offset, rows), 0)


def make_schedule(
    batch: Batch, *, group: int, num_kv_heads: int, rows: int, num_tokens: int, kv_tokens: int, num_workers: int,
    decode: bool, reach: Reach, tree_words: int, min_blocks: int = 2,
) -> Schedule:
    """rows: of a query block. min_blocks: no worker gets fewer while another has more (a part costs a merge)."""
    row, offset, count = query_blocks(batch, group, rows, num_tokens, decode)
    lengths = batch.cu_q_lens[row + 1] - batch.cu_q_lens[row]
    first_new = batch.kv_lens[row] - lengths
    end = first_new + (offset + count - 1) // group + 1
    first = jnp.zeros_like(end) + reach.oldest(first_new + offset // group) // kv_tokens
    blocks = jnp.where(count > 0, -(-end // kv_tokens) - first, 0)
    start = (jnp.cumsum(blocks) - blocks) * num_kv_heads
    tree = (lengths >= 2) & (lengths <= 32 * tree_words)
    query = batch.cu_q_lens[row] * group + offset
    items = jnp.stack([query, count, offset, first_new, end, first, blocks, start, row, tree], axis=1)

    total = num_kv_heads * jnp.sum(blocks)
    per = jnp.maximum(-(-total // num_workers), min_blocks)
    begin = jnp.minimum(jnp.arange(num_workers) * per, total)
    stop = jnp.minimum(begin + per, total)

    def item_at(place):
        block = jnp.searchsorted(start + blocks * num_kv_heads, place, side="right", method="compare_all")
        block = jnp.minimum(block, row.shape[0] - 1)
        return block * num_kv_heads + (place - start[block]) // jnp.maximum(blocks[block], 1)

    used = begin < stop
    item, last = item_at(begin), item_at(stop - 1)
    block, head = last // num_kv_heads, last % num_kv_heads
    last_start = start[block] + head * blocks[block]
    last_end = last_start + blocks[block]
    cut = used & (last_start >= begin) & (last_end > stop)
    parts = jnp.where(cut, -(-last_end // per) - jnp.arange(num_workers), 0)
    segments = jnp.where(used, last - item + 1, 0)
    workers = jnp.stack([item, segments, begin, stop, jnp.where(cut, last, -1), parts], axis=1)
    return Schedule(items.astype(jnp.int32), workers.astype(jnp.int32))


class Segment(NamedTuple):
    """One item, as far as a worker has it; scalars in a kernel. lo, hi: of the item's KV blocks."""

    head: jax.Array
    query: jax.Array
    rows: jax.Array
    offset: jax.Array
    first_new: jax.Array
    end: jax.Array
    first: jax.Array
    blocks: jax.Array
    lo: jax.Array
    hi: jax.Array
    table_row: jax.Array
    tree: jax.Array

    @property
    def whole(self):
        return (self.lo == 0) & (self.hi == self.blocks)


def read_segment(items_ref, item, begin, stop, num_kv_heads: int) -> Segment:
    """Item `item` of a worker that has the blocks begin .. stop - 1 of the list."""
    block, head = lax.div(item, num_kv_heads), lax.rem(item, num_kv_heads)
    count = items_ref[block, COUNT]
    start = items_ref[block, START] + head * count
    return Segment(
        head=head, query=items_ref[block, QUERY], rows=items_ref[block, ROWS], offset=items_ref[block, OFFSET],
        first_new=items_ref[block, FIRST_NEW], end=items_ref[block, END], first=items_ref[block, FIRST], blocks=count,
        lo=jnp.maximum(begin - start, 0), hi=jnp.minimum(stop - start, count),
        table_row=items_ref[block, TABLE_ROW], tree=items_ref[block, TREE],
    )
