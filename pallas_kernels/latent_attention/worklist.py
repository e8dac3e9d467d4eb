"""The work of a step as flat lists that a kernel walks through: query blocks, and pages that get new rows.

Axis letters: T tokens, S rows, B tokens of a page, M pages of the longest row, Q tokens of a query block; I items.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.latent_attention.config import round_up


class QueryBlocks(NamedTuple):
    """Consecutive new tokens of one row each. Entries from `used` on mean nothing."""

    row: jax.Array  # [I] int32
    start: jax.Array  # [I] first token
    tokens: jax.Array  # [I]
    position: jax.Array  # [I] index of the first token in the cache
    kv_len: jax.Array  # [I] of the row, its new tokens included
    new: jax.Array  # [I] new tokens of the row
    steps: jax.Array  # [I] KV blocks that the tokens see
    used: jax.Array  # [1] how many entries
    total: jax.Array  # [1] steps of all


def decode_blocks(kv_lens, cu_q_lens, distribution, kv_tokens: int) -> QueryBlocks:
    """One block for each of the first distribution[0] rows, which have one token."""
    rows = jnp.arange(kv_lens.shape[0], dtype=jnp.int32)
    one = jnp.ones_like(rows)
    steps = jnp.where(rows < distribution[0], -(-kv_lens // kv_tokens), 0)
    return QueryBlocks(rows, cu_q_lens[:-1], one, kv_lens - 1, kv_lens, one, steps, distribution[:1],
                       steps.sum(keepdims=True))  # fmt: skip


def chunk_blocks(
    num_tokens: int, kv_lens, cu_q_lens, distribution, kv_tokens: int, query_tokens: int
) -> QueryBlocks:
    """The blocks of the other rows, in order of their tokens."""
    rows = jnp.arange(kv_lens.shape[0], dtype=jnp.int32)
    lengths = jnp.where((rows >= distribution[0]) & (rows < distribution[2]), cu_q_lens[1:] - cu_q_lens[:-1], 0)
    blocks = -(-lengths // query_tokens)
    end = jnp.cumsum(blocks)
    item = jnp.arange(min(num_tokens // query_tokens + rows.size, num_tokens), dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(end, item, side="right", method="compare_all"), rows.size - 1).astype(jnp.int32)
    offset = (item - end[row] + blocks[row]) * query_tokens
    tokens = jnp.minimum(lengths[row] - offset, query_tokens)
    position = kv_lens[row] - lengths[row] + offset
    steps = jnp.where(item < end[-1], -(-(position + tokens) // kv_tokens), 0)
    return QueryBlocks(row, cu_q_lens[row] + offset, tokens, position, kv_lens[row], lengths[row], steps, end[-1:],
                       steps.sum(keepdims=True))  # fmt: skip


class PageWrites(NamedTuple):
    """Pages that get new rows: slots first .. end - 1 of a page. Entries from `used` on mean nothing."""

    page: jax.Array  # [I] int32
    first: jax.Array  # [I]
    end: jax.Array  # [I]
    source: jax.Array  # [I] the new token that slot 0 would get: negative where the page starts before all new ones
    used: jax.Array  # [1] how many entries


def page_writes(num_tokens: int, page_size: int, page_table, kv_lens, cu_q_lens, distribution) -> PageWrites:
    """Of the rows that have more than one new token."""
    rows = jnp.arange(kv_lens.shape[0], dtype=jnp.int32)
    lengths = jnp.where((rows >= distribution[0]) & (rows < distribution[2]), cu_q_lens[1:] - cu_q_lens[:-1], 0)
    begin = kv_lens - lengths
    pages = jnp.where(lengths > 0, (kv_lens - 1) // page_size - begin // page_size + 1, 0)
    end = jnp.cumsum(pages)
    most = min(num_tokens, round_up(num_tokens, page_size) // page_size + 2 * rows.size)
    item = jnp.arange(most, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(end, item, side="right", method="compare_all"), rows.size - 1).astype(jnp.int32)
    number = item - end[row] + pages[row] + begin[row] // page_size  # of the page in its row
    at = number * page_size
    page = page_table[row, jnp.where(item < end[-1], number, 0)]
    return PageWrites(page, jnp.maximum(begin[row] - at, 0), jnp.minimum(kv_lens[row] - at, page_size),
                      cu_q_lens[row] + at - begin[row], end[-1:])  # fmt: skip
