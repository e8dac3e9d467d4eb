"""Ragged paged attention in plain XLA: the fast path on CPU, and wherever no kernel exists.

The work of a step is a flat list of items, each a few queries against one KV block (a few pages) of their row. A loop
with a dynamic trip count goes through the list, so the cost follows the sum of the real lengths, never the longest row
and never the pool. Partial softmaxes merge with the usual running maximum and sum (FlashAttention-2, Dao 2023).

Two passes: rows of one token, many items at a time because each is small; then longer rows, one query block at a time.

Operands are laid out so that the two products of an item are plain batched ones, [C, K] x (M, H, W): otherwise XLA
transposes one of them, or the scores, in every loop step.

Axis letters: T tokens, S rows, N query heads, K kv heads, G = N / K, H head dim, P pages, B page tokens;
C items at a time, M queries of a kv head in an item, W tokens of a KV block, Q tokens of a query block, J query blocks.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Measured on 2 CPU cores with the 135M shapes, see docs/performance.md.
_KV_TOKENS = 128  # W
_DECODE_ITEMS = 32  # C of the first pass
_QUERY_TOKENS = 64  # Q of the second pass

_MASKED = -1e30  # the score of what may not be seen; finite, so that differences are never NaN
_LOWEST = -1e29  # no maximum is lower: exp(MASKED - LOWEST) is 0, also where nothing is seen


class _Partial(NamedTuple):
    """A softmax over some of the keys: sum of weights and weighted values, relative to a maximum."""

    maximum: jax.Array  # [...] float32
    total: jax.Array  # [...]
    output: jax.Array  # [..., H]


def _nothing(shape: tuple[int, ...], head_dim: int) -> _Partial:
    return _Partial(jnp.full(shape, _LOWEST), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))


class _Cache(NamedTuple):
    """One layer of the paged cache, and how scores are made."""

    kv_pages: jax.Array  # [L, P, 2, K, B, H]
    layer: jax.Array
    page_table: jax.Array  # [S, M'], a multiple of the pages of a KV block
    kv_lens: jax.Array  # [S]
    window: int | None
    soft_cap: float | None


def ragged_paged_attention(
    q, k, v, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution, *,
    scale, window=None, soft_cap=None, sinks=None,
):  # fmt: skip
    """See `api.ragged_paged_attention`."""
    num_tokens, num_rows = q.shape[0], kv_lens.shape[0]
    num_kv_heads, page_size = kv_pages.shape[3:5]
    if _KV_TOKENS % page_size:
        raise ValueError(f"{page_size=} must divide {_KV_TOKENS}, the tokens of a KV block")
    kv_pages = _write(k, v, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution)
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % (_KV_TOKENS // page_size))))
    cache = _Cache(kv_pages, layer, table, kv_lens, window, soft_cap)
    queries = (q.astype(jnp.float32) * scale).astype(q.dtype)
    queries = queries.reshape(num_tokens, num_kv_heads, -1, q.shape[2])  # [T, K, G, H]
    finish = partial(_finish, sinks=sinks, shape=q.shape, dtype=q.dtype)

    decoded = _attend_rows(queries[:num_rows], cache, distribution[0])
    if num_tokens == num_rows:  # a decode-only shape: every row has one token, row s is token s
        return finish(decoded), kv_pages
    # Rows that are not decoded got nothing in the first pass, tokens of decoded rows get nothing in the second.
    chunked = _attend_chunks(queries, cache, cu_q_lens, distribution)
    both = _combine(_slice(chunked, 0, num_rows), decoded)
    return finish(_put(chunked, both, 0)), kv_pages


def _finish(part: _Partial, *, sinks, shape, dtype) -> jax.Array:
    """[T, K, G, H] partial softmaxes over all keys to attention [T, N, H]."""
    maximum, total, output = part
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(maximum.shape[1:])
        highest = jnp.maximum(maximum, sink)
        rescale = jnp.exp(maximum - highest)
        total, output = total * rescale + jnp.exp(sink - highest), output * rescale[..., None]
    return (output / jnp.maximum(total, 1e-30)[..., None]).reshape(shape).astype(dtype)


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


def _attend_items(queries, row, kv_block, position, live, cache: _Cache) -> _Partial:
    """C items: queries [C, K, M, H] of rows [C], at cache positions [C, M], against KV blocks [C]. To [C, K, M]."""
    items, num_kv_heads, _, head_dim = queries.shape
    pages_per_block = _KV_TOKENS // cache.kv_pages.shape[4]
    page = cache.page_table[row[:, None], kv_block[:, None] * pages_per_block + jnp.arange(pages_per_block)]
    heads = jnp.arange(num_kv_heads)[:, None]
    keys, values = (
        cache.kv_pages[cache.layer, page[:, None, :], k_or_v, heads].reshape(items, num_kv_heads, _KV_TOKENS, head_dim)
        for k_or_v in (0, 1)
    )
    index = kv_block[:, None] * _KV_TOKENS + jnp.arange(_KV_TOKENS)  # [C, W]
    written = (index < cache.kv_lens[row][:, None]) & live[:, None]
    visible = (index[:, None] <= position[:, :, None]) & written[:, None]  # [C, M, W]
    if cache.window is not None:
        visible &= index[:, None] > position[:, :, None] - cache.window

    scores = jnp.einsum("ckmh,ckwh->ckmw", queries, keys, preferred_element_type=jnp.float32)
    if cache.soft_cap is not None:
        scores = cache.soft_cap * jnp.tanh(scores / cache.soft_cap)
    scores = jnp.where(visible[:, None], scores, _MASKED)
    maximum = jnp.maximum(scores.max(-1), _LOWEST)
    weights = jnp.exp(scores - maximum[..., None])
    # Zeroed beyond the row's length: 0 * NaN left there by an earlier owner would be NaN.
    values = jnp.where(written[:, None, :, None], values, 0)
    output = jnp.einsum("ckmw,ckwh->ckmh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return _Partial(maximum, weights.sum(-1), output)


def _combine(old: _Partial, new: _Partial) -> _Partial:
    """Two partial softmaxes of the same queries over different keys."""
    maximum = jnp.maximum(old.maximum, new.maximum)
    keep, add = jnp.exp(old.maximum - maximum), jnp.exp(new.maximum - maximum)
    output = old.output * keep[..., None] + new.output * add[..., None]
    return _Partial(maximum, old.total * keep + new.total * add, output)


def _loop(num_items, items_at_once: int, body: Callable[[jax.Array, _Partial], _Partial], start: _Partial) -> _Partial:
    return lax.fori_loop(0, -(-num_items // items_at_once), body, start)


def _slice(part: _Partial, at, size: int) -> _Partial:
    return _Partial(*(lax.dynamic_slice_in_dim(a, at, size) for a in part))


def _put(part: _Partial, piece: _Partial, at) -> _Partial:
    return _Partial(*(lax.dynamic_update_slice_in_dim(a, b, at, 0) for a, b in zip(part, piece, strict=True)))


def _first_block(position, window):
    """The first KV block that a query at `position` sees."""
    return jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0) // _KV_TOKENS


def _attend_rows(queries, cache: _Cache, num_decode) -> _Partial:
    """Rows of one token, queries [S, K, G, H]: C items (row, KV block) at a time. Returns [S, K, G]."""
    num_rows, num_kv_heads, group, head_dim = queries.shape
    items = min(_DECODE_ITEMS, num_rows)
    position = cache.kv_lens - 1
    first = _first_block(position, cache.window)
    count = jnp.where(jnp.arange(num_rows) < num_decode, position // _KV_TOKENS + 1 - first, 0)
    end = jnp.cumsum(count)

    def body(step, acc: _Partial) -> _Partial:
        item = step * items + jnp.arange(items)
        row = jnp.minimum(jnp.searchsorted(end, item, side="right", method="compare_all"), num_rows - 1)
        live = item < end[-1]
        kv_block = jnp.where(live, item - end[row] + count[row] + first[row], 0)
        part = _attend_items(queries[row], row, kv_block, position[row][:, None], live, cache)
        # Items are in order of rows, so they touch at most C consecutive ones: one slice in, one slice out.
        local = row - row[0]
        mine = (local == jnp.arange(items)[:, None]) & live  # [rows C, items C]
        old = _slice(acc, row[0], items)
        highest = jnp.where(mine[:, :, None, None], part.maximum, _LOWEST).max(1)
        weight = jnp.exp(part.maximum - highest[jnp.minimum(local, items - 1)])
        total = jnp.einsum("rc,ckg->rkg", mine.astype(jnp.float32), part.total * weight)
        output = jnp.einsum("rc,ckgh->rkgh", mine.astype(jnp.float32), part.output * weight[..., None])
        return _put(acc, _combine(old, _Partial(highest, total, output)), row[0])

    acc = _nothing((num_rows + items, num_kv_heads, group), head_dim)
    return _slice(_loop(end[-1], items, body, acc), 0, num_rows)


def _attend_chunks(queries, cache: _Cache, cu_q_lens, distribution) -> _Partial:
    """Rows of more tokens, queries [T, K, G, H]: one item (query block, KV block) at a time. Returns [T, K, G]."""
    num_tokens, num_kv_heads, group, head_dim = queries.shape
    num_rows, size = cache.kv_lens.shape[0], _QUERY_TOKENS
    padded = jnp.pad(queries, ((0, size), (0, 0), (0, 0), (0, 0)))
    rows = jnp.arange(num_rows)
    lengths = jnp.where((rows >= distribution[0]) & (rows < distribution[2]), cu_q_lens[1:] - cu_q_lens[:-1], 0)

    # Query blocks, in order of their tokens.
    block_end = jnp.cumsum(-(-lengths // size))
    block = jnp.arange(num_rows + num_tokens // size)
    row = jnp.minimum(jnp.searchsorted(block_end, block, side="right"), num_rows - 1)
    offset = (block - block_end[row] + -(-lengths[row] // size)) * size
    used = block < block_end[-1]
    tokens = jnp.where(used, jnp.minimum(lengths[row] - offset, size), 0)
    start = jnp.where(used, cu_q_lens[row] + offset, 0)
    position = cache.kv_lens[row] - lengths[row] + offset
    first = _first_block(position, cache.window)
    count = jnp.where(used, (position + tokens - 1) // _KV_TOKENS + 1 - first, 0)
    end = jnp.cumsum(count)

    def body(item, acc: _Partial) -> _Partial:
        j = jnp.searchsorted(end, item, side="right", method="compare_all")
        kv_block = item - end[j] + count[j] + first[j]
        # [Q, K, G, H] to [1, K, QG, H]
        chunk = lax.dynamic_slice_in_dim(padded, start[j], size).swapaxes(0, 1)
        chunk = chunk.reshape(1, num_kv_heads, size * group, head_dim)
        positions = jnp.repeat(position[j] + jnp.arange(size), group)
        part = _attend_items(chunk, row[j][None], kv_block[None], positions[None], jnp.ones(1, bool), cache)
        part = _Partial(*(a[0].reshape(num_kv_heads, size, group, *a.shape[3:]).swapaxes(0, 1) for a in part))
        old = _slice(acc, start[j], size)
        mine = (jnp.arange(size) < tokens[j])[:, None, None]  # the tokens after them are other rows'
        new = _combine(old, part._replace(maximum=jnp.where(mine, part.maximum, _LOWEST), total=part.total * mine,
                                          output=part.output * mine[..., None]))  # fmt: skip
        return _put(acc, new, start[j])

    acc = _nothing((num_tokens + size, num_kv_heads, group), head_dim)
    return _slice(_loop(end[-1], 1, body, acc), 0, num_tokens)
