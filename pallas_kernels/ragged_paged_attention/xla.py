"""Ragged paged attention in plain XLA: the fast path on CPU, and wherever no kernel exists.

The queries of all rows are cut into query blocks of Q tokens, the cached keys of a row into KV blocks of a few pages.
Every (query block, KV block) pair that has something to attend to is one item of a flat work list; a loop with a
dynamic trip count takes the items C at a time, so the cost follows the sum of the real lengths, never the longest row
and never the pool. Partial softmaxes merge with the usual running maximum and sum (FlashAttention-2, Dao 2023).

Two passes share the code: rows of one token (Q = 1, many items at a time) and longer rows (Q = 32).

Axis letters: T tokens, S rows, N query heads, K kv heads, G = N / K, H head dim, P pages, B page tokens;
C items a loop step, Q tokens of a query block, W tokens of a KV block, J query blocks.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_NEG = -1e30  # below every real score, finite so that exp(NEG - NEG) is not NaN


class _Tile(NamedTuple):
    """How a pass is cut. Measured on 2 CPU cores with the 135M shapes, see docs/performance.md."""

    query_tokens: int
    items: int
    kv_tokens: int


_DECODE = _Tile(query_tokens=1, items=32, kv_tokens=128)
_CHUNK = _Tile(query_tokens=64, items=2, kv_tokens=128)


class _Blocks(NamedTuple):
    """The query blocks of one pass, and where each one's items lie in the work list."""

    row: jax.Array  # [J]
    query_start: jax.Array  # [J] index of its first token in the step
    position: jax.Array  # [J] index of that token in the row's cache
    count: jax.Array  # [J] real query tokens, 0 for unused blocks
    first_kv_block: jax.Array  # [J]
    num_items: jax.Array  # [J]
    item_end: jax.Array  # [J] running sum of num_items


class _Accumulator(NamedTuple):
    maximum: jax.Array  # [J + C, K, G, Q] float32
    total: jax.Array  # [J + C, K, G, Q]
    output: jax.Array  # [J + C, K, G, Q, H]


def ragged_paged_attention(
    q, k, v, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution, *,
    scale, window=None, soft_cap=None, sinks=None,
):
    """See `api.ragged_paged_attention`."""
    num_tokens, num_rows = q.shape[0], kv_lens.shape[0]
    kv_pages = _write(k, v, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution)
    queries = (q.astype(jnp.float32) * scale).astype(q.dtype)
    attend = partial(
        _attend, queries, kv_pages, layer, page_table, kv_lens, window=window, soft_cap=soft_cap, sinks=sinks
    )
    decode = _query_blocks(kv_lens, cu_q_lens, 0, distribution[0], num_rows, _DECODE, window)
    out = attend(decode, _DECODE)[:, 0]  # [S, N, H]: row s is token s
    if num_tokens == num_rows:  # a decode-only shape: every row has one token
        return out, kv_pages
    num_blocks = num_rows + num_tokens // _CHUNK.query_tokens
    chunks = _query_blocks(kv_lens, cu_q_lens, distribution[0], distribution[2], num_blocks, _CHUNK, window)
    mixed = attend(chunks, _CHUNK)  # [J, Q, N, H]
    token = jnp.arange(num_tokens)
    block = jnp.searchsorted(chunks.query_start, token, side="right") - 1
    block = jnp.clip(block, 0, num_blocks - 1)
    offset = jnp.clip(token - chunks.query_start[block], 0, _CHUNK.query_tokens - 1)
    is_decode = (token < distribution[0])[:, None, None]
    padded = jnp.pad(out, ((0, num_tokens - num_rows), (0, 0), (0, 0)))
    return jnp.where(is_decode, padded, mixed[block, offset]), kv_pages


def _write(k, v, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution):
    """Stores the new tokens' K and V; padding tokens go to page 0."""
    page_size = kv_pages.shape[4]
    token = jnp.arange(k.shape[0])
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right")
    real = row < distribution[2]
    row = jnp.minimum(row, kv_lens.shape[0] - 1)
    index = kv_lens[row] - cu_q_lens[row + 1] + token
    page = jnp.where(real, page_table[row, jnp.where(real, index, 0) // page_size], 0)
    kv = jnp.stack([k, v], axis=1).astype(kv_pages.dtype)  # [T, 2, K, H]
    return kv_pages.at[layer, page, :, :, index % page_size].set(kv, mode="promise_in_bounds")


def _query_blocks(kv_lens, cu_q_lens, first_row, end_row, num_blocks, tile, window) -> _Blocks:
    """Cuts the rows first_row .. end_row - 1 into query blocks, in order of their tokens."""
    rows = jnp.arange(kv_lens.shape[0])
    chosen = (rows >= first_row) & (rows < end_row)
    query_lens = jnp.where(chosen, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    block_end = jnp.cumsum(-(-query_lens // tile.query_tokens))
    block = jnp.arange(num_blocks)
    row = jnp.minimum(jnp.searchsorted(block_end, block, side="right"), rows.shape[0] - 1)
    used = block < block_end[-1]
    block_start = block_end[row] - -(-query_lens[row] // tile.query_tokens)
    offset = (block - block_start) * tile.query_tokens
    count = jnp.where(used, jnp.minimum(query_lens[row] - offset, tile.query_tokens), 0)
    position = kv_lens[row] - query_lens[row] + offset
    end = -(-(position + count) // tile.kv_tokens)
    start = jnp.zeros_like(end) if window is None else jnp.maximum(position - window + 1, 0) // tile.kv_tokens
    num_items = jnp.where(used, end - start, 0)
    # Unused blocks start beyond every token, so that the starts stay sorted.
    query_start = jnp.where(used, cu_q_lens[row] + offset, jnp.iinfo(jnp.int32).max)
    return _Blocks(row, query_start, position, count, start, num_items, jnp.cumsum(num_items))


def _attend(q, kv_pages, layer, page_table, kv_lens, blocks, tile, *, window, soft_cap, sinks):
    """Attention of every query block. Returns [J, Q, N, H] in q's dtype."""
    num_kv_heads, page_size, head_dim = kv_pages.shape[3:]
    num_blocks, group = blocks.row.shape[0], q.shape[1] // num_kv_heads
    size, items = tile.query_tokens, min(tile.items, num_blocks)
    pages_per_block = max(tile.kv_tokens // page_size, 1)
    if tile.kv_tokens % page_size:
        raise ValueError(f"{page_size=} must divide the KV block of {tile.kv_tokens} tokens")
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_per_block)))
    grouped = q.reshape(-1, num_kv_heads, group, head_dim)
    total_items = blocks.item_end[-1]
    slots = jnp.arange(items)
    heads = jnp.arange(num_kv_heads)[:, None]

    def body(step, acc: _Accumulator) -> _Accumulator:
        item = step * items + slots  # [C]
        block = jnp.searchsorted(blocks.item_end, item, side="right", method="compare_all")
        live = item < total_items
        block = jnp.minimum(block, num_blocks - 1)
        row = blocks.row[block]
        kv_block = item - (blocks.item_end[block] - blocks.num_items[block]) + blocks.first_kv_block[block]
        kv_block = jnp.where(live, kv_block, 0)

        query = jnp.minimum(blocks.query_start[block][:, None] + jnp.arange(size), q.shape[0] - 1)  # [C, Q]
        page = table[row[:, None], kv_block[:, None] * pages_per_block + jnp.arange(pages_per_block)]
        # Gathered straight into [C, K, W, H], the order the products want: half the time of gather and transpose.
        keys, values = (
            kv_pages[layer, page[:, None, :], k_or_v, heads].reshape(items, num_kv_heads, -1, head_dim)
            for k_or_v in (0, 1)
        )
        kv_index = kv_block[:, None] * tile.kv_tokens + jnp.arange(tile.kv_tokens)  # [C, W]
        written = kv_index < kv_lens[row][:, None]
        scores = jnp.einsum("cqkgh,ckwh->ckgqw", grouped[query], keys, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        position = blocks.position[block][:, None] + jnp.arange(size)
        visible = (kv_index[:, None] <= position[:, :, None]) & (written & live[:, None])[:, None]  # [C, Q, W]
        if window is not None:
            visible &= kv_index[:, None] > position[:, :, None] - window
        visible = visible[:, None, None]
        scores = jnp.where(visible, scores, _NEG)
        maximum = scores.max(-1)
        weights = jnp.where(visible, jnp.exp(scores - maximum[..., None]), 0.0)
        total = weights.sum(-1)
        # Zeroed beyond the row's length: 0 * NaN left there by an earlier owner would be NaN.
        values = jnp.where(written[:, None, :, None], values, 0)
        weights = weights.astype(values.dtype)
        output = jnp.einsum("ckgqw,ckwh->ckgqh", weights, values, preferred_element_type=jnp.float32)
        return _merge(acc, _Accumulator(maximum, total, output), block, live)

    padded = num_blocks + items
    shape = (padded, num_kv_heads, group, size)
    acc = _Accumulator(jnp.full(shape, _NEG), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    acc = lax.fori_loop(0, -(-total_items // items), body, acc)
    maximum, total, output = (a[:num_blocks] for a in acc)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(num_kv_heads, group, 1)
        highest = jnp.maximum(maximum, sink)
        rescale = jnp.exp(maximum - highest)
        total, output = total * rescale + jnp.exp(sink - highest), output * rescale[..., None]
    output = output / jnp.maximum(total, 1e-30)[..., None]
    return output.transpose(0, 3, 1, 2, 4).reshape(num_blocks, size, -1, head_dim).astype(q.dtype)


def _merge(acc: _Accumulator, part: _Accumulator, block, live) -> _Accumulator:
    """Folds C partial softmaxes into the accumulators of their query blocks.

    Items are sorted by block, so the C items touch at most C consecutive blocks: one slice in, one slice out.
    """
    items, first = block.shape[0], block[0]
    local = block - first
    mine = (local[None, :] == jnp.arange(items)[:, None]) & live  # [blocks C, items C]
    old = _Accumulator(*(lax.dynamic_slice_in_dim(a, first, items) for a in acc))
    selected = jnp.where(mine[:, :, None, None, None], part.maximum[None], _NEG)
    maximum = jnp.maximum(old.maximum, selected.max(1))
    rescale = jnp.exp(old.maximum - maximum)
    weight = jnp.exp(part.maximum - maximum[jnp.minimum(local, items - 1)])  # [C, K, G, Q]
    one_hot = mine.astype(jnp.float32)
    total = old.total * rescale + jnp.einsum("bc,ckgq->bkgq", one_hot, part.total * weight)
    output = old.output * rescale[..., None] + jnp.einsum("bc,ckgqh->bkgqh", one_hot, part.output * weight[..., None])
    new = _Accumulator(maximum, total, output)
    return _Accumulator(*(lax.dynamic_update_slice_in_dim(a, b, first, 0) for a, b in zip(acc, new, strict=True)))
