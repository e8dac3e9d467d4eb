"""Ragged paged attention in plain XLA: the fast path on CPU, and wherever no kernel exists.

The work of a step is a flat list of items, each a few queries against one KV block (a few pages) of their row. A loop
with a dynamic trip count goes through the list, so the cost follows the sum of the real lengths, never the longest row
and never the pool. Partial softmaxes merge with the usual running maximum and sum (FlashAttention-2, Dao 2023).

Rows of one token, and those of a few, as drafts make them, are computed many items at a time because each is small;
then longer rows in small tiles, which waste little, and long ones in large tiles, which multiply faster.

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

from pallas_kernels.ragged_paged_attention.layout import KVLayout, KVPages
from pallas_kernels.ragged_paged_attention.reach import WHOLE, Reach
from pallas_kernels.ragged_paged_attention.spec import AttentionSpec
from quant.kv import LARGEST, QuantizedPages, quantize_rows


class _Tile(NamedTuple):
    """What an item is, and how many are computed at a time."""

    items: int  # C
    queries: int  # Q, tokens
    keys: int  # W; rounded down to whole pages, one at least


# Measured on 2 CPU cores with the 135M shapes, see docs/performance.md.
_DECODE = _Tile(32, 1, 128)
_FEW = _Tile(8, 16, 256)  # queries: at most
_SHORT = _Tile(1, 32, 64)
_LONG = _Tile(1, 128, 256)
_LONG_ROW = 128  # new tokens

_FLOATS = ("float32", "bfloat16", "float16")
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

    values: jax.Array  # [L, P, 2, K, B, H], or [L, P, 1, K, B, H] where a value is the start of its key
    value_dim: int  # numbers of a value
    scales: jax.Array | None  # [L, P, 2, K, B]
    bias: jax.Array | None  # [L, P, K, B]
    layer: jax.Array
    page_table: jax.Array  # [S, M'], padded so that the last KV block is whole
    kv_lens: jax.Array  # [S]
    first_new: jax.Array  # [S], index in the cache of the row's first new token
    reach: Reach
    soft_cap: float | None

    def block_pages(self, tile: _Tile) -> int:
        return max(1, tile.keys // self.values.shape[4])

    def block_tokens(self, tile: _Tile) -> int:
        return self.block_pages(tile) * self.values.shape[4]

    def gather(self, paged: jax.Array, page: jax.Array, *k_or_v: int) -> jax.Array:
        """Pages [C, pages of a block] of this layer, head by head: [C, K, W, ...]."""
        num_kv_heads = self.values.shape[3]
        heads = jnp.arange(num_kv_heads)[:, None]
        blocks = paged[self.layer, page[:, None, :], *k_or_v, heads]  # [C, K, pages, B, ...]
        return blocks.reshape(page.shape[0], num_kv_heads, -1, *blocks.shape[4:])

    def keys_and_values(self, page: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = self.gather(self.values, page, 0)
        shared = self.values.shape[2] == 1
        return keys, keys[..., : self.value_dim] if shared else self.gather(self.values, page, 1)


class _Queries(NamedTuple):
    """C items of M queries each."""

    values: jax.Array  # [C, K, M, H]
    position: jax.Array  # [C, M], index in the cache
    tree: "_Tree | None"  # of [C, M]


class _Tree(NamedTuple):
    """Which tokens of its row a token sees, see `api.AttentionFn`."""

    words: jax.Array  # [..., words] uint32
    applies: jax.Array  # [...]; not to long rows


def ragged_paged_attention(
    q, k, v, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution, *,
    scale, window=None, chunk=None, soft_cap=None, sinks=None, kv_bias=None, tree_mask=None,
):  # fmt: skip
    """See `api.AttentionFn`."""
    kv_pages = _write(k, v, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution)
    out = attend_pages(
        q, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution, value_dim=v.shape[2], scale=scale,
        reach=Reach(window, chunk), soft_cap=soft_cap, sinks=sinks, kv_bias=kv_bias, tree_mask=tree_mask,
    )  # fmt: skip
    return out, kv_pages


def attend_pages(
    q, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution, *,
    value_dim, scale, reach=WHOLE, soft_cap=None, sinks=None, kv_bias=None, tree_mask=None,
):  # fmt: skip
    """Attention [T, N, value_dim] to pages that hold the new tokens already.

    Pages [L, P, 1, K, B, H] hold keys of which the first value_dim numbers are the values (latent attention).
    """
    num_tokens, num_rows = q.shape[0], kv_lens.shape[0]
    values, scales = kv_pages if isinstance(kv_pages, QuantizedPages) else (kv_pages, None)
    num_kv_heads, page_size = values.shape[3:5]
    table = jnp.pad(page_table, ((0, 0), (0, max(_DECODE.keys, _FEW.keys, _LONG.keys) // page_size)))
    lengths = cu_q_lens[1:] - cu_q_lens[:-1]
    first_new = kv_lens - lengths
    cache = _Cache(values, value_dim, scales, kv_bias, layer, table, kv_lens, first_new, reach, soft_cap)
    queries = (q.astype(jnp.float32) * scale).astype(q.dtype)
    queries = queries.reshape(num_tokens, num_kv_heads, -1, q.shape[2])  # [T, K, G, H]
    finish = partial(_finish, sinks=sinks, shape=(*q.shape[:2], value_dim), dtype=q.dtype)

    row = jnp.arange(num_rows)
    decoded = _attend_rows(queries[:num_rows, None], None, cache, jnp.where(row < distribution[0], 1, 0), _DECODE)
    decoded = _Partial(*(part[:, 0] for part in decoded))
    if num_tokens == num_rows:  # a decode-only shape: every row has one token, row s is token s
        return finish(decoded)
    # Rows that are not decoded got nothing in the first pass, tokens of decoded rows get nothing in the others.
    lengths = jnp.where((row >= distribution[0]) & (row < distribution[2]), lengths, 0)
    few = min(num_tokens // num_rows, _FEW.queries)
    chunked = _nothing((num_tokens + _LONG.queries, *queries.shape[1:3]), value_dim)
    if few > 1:
        lengths_here = jnp.where(lengths <= few, lengths, 0)
        part = _attend_few(queries, tree_mask, cache, cu_q_lens, lengths_here, _FEW._replace(queries=few))
        chunked, lengths = _put(chunked, part, 0), lengths - lengths_here
    for tile, mine in ((_SHORT, lengths < _LONG_ROW), (_LONG, lengths >= _LONG_ROW)):
        lengths_here = jnp.where(mine, lengths, 0)
        chunked = _attend_chunks(chunked, queries, tree_mask, cache, cu_q_lens, lengths_here, tile)
    chunked = _slice(chunked, 0, num_tokens)
    both = _combine(_slice(chunked, 0, num_rows), decoded)
    return finish(_put(chunked, both, 0))


def _finish(part: _Partial, *, sinks, shape, dtype) -> jax.Array:
    """[T, K, G, H] partial softmaxes over all keys to attention [T, N, H]; H: numbers of a value."""
    maximum, total, output = part
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(maximum.shape[1:])
        highest = jnp.maximum(maximum, sink)
        rescale = jnp.exp(maximum - highest)
        total, output = total * rescale + jnp.exp(sink - highest), output * rescale[..., None]
    return (output / jnp.maximum(total, 1e-30)[..., None]).reshape(shape).astype(dtype)


def unsupported(spec: AttentionSpec, device_kind: str | None) -> str | None:
    """What keeps this backend from serving `spec`: number formats only."""
    dtype, kv_dtype = jnp.dtype(spec.dtype).name, jnp.dtype(spec.kv_dtype).name
    if dtype not in _FLOATS:
        return f"{dtype} queries: it takes {', '.join(_FLOATS)}"
    if kv_dtype not in (*_FLOATS, *LARGEST):
        return f"{kv_dtype} pages: it takes {', '.join((*_FLOATS, *LARGEST))}"
    return None


def layout(**fields) -> KVLayout:
    return KVLayout(**fields)


def _write(k, v, kv_pages: KVPages, layer, page_table, kv_lens, cu_q_lens, distribution) -> KVPages:
    """Stores the new tokens' K and V; padding tokens go to page 0."""
    page_size = (kv_pages.values if isinstance(kv_pages, QuantizedPages) else kv_pages).shape[4]
    page, slot = slots_of(k.shape[0], page_size, page_table, kv_lens, cu_q_lens, distribution)
    kv = jnp.stack([k, v], axis=1)  # [T, 2, K, H]

    def scatter(paged: jax.Array, new: jax.Array) -> jax.Array:
        where = (layer, page[:, None, None], jnp.arange(2)[:, None], jnp.arange(k.shape[1]), slot[:, None, None])
        return paged.at[where].set(new, mode="promise_in_bounds")

    def one_by_one(paged: jax.Array, new: jax.Array) -> jax.Array:
        # Slices of what the compiler does not lay out anew, by its memory analysis: all heads, or one head's row.
        heads = new.reshape(new.shape[0], 2, 1, *new.shape[2:]) if new.shape[2] == 1 else new[:, None]

        def put_token(token, paged):
            for k_or_v, value in enumerate(heads[token]):  # [2 or 1, K, ...]
                value = jnp.expand_dims(value.reshape(-1, *new.shape[2:]), (0, 1, 4))  # [1, 1, 1 or 2, K, 1, ...]
                at = (layer, page[token], k_or_v, 0, slot[token], 0)[: paged.ndim]
                paged = lax.dynamic_update_slice(paged, value, at)
            return paged

        return lax.fori_loop(0, new.shape[0], put_token, paged)

    def put(paged: jax.Array, new: jax.Array) -> jax.Array:
        # XLA for TPUs scatters into a large cache by laying all of it out anew, or compiles for minutes.
        return lax.platform_dependent(paged, new.astype(paged.dtype), tpu=one_by_one, default=scatter)

    if isinstance(kv_pages, QuantizedPages):
        return QuantizedPages(*map(put, kv_pages, quantize_rows(kv, kv_pages.values.dtype)))
    return put(kv_pages, kv)


def slots_of(num_tokens: int, page_size: int, page_table, kv_lens, cu_q_lens, distribution):
    """Page [T] and place in it [T] of every new token; those of padding tokens lie in page 0."""
    token, row = jnp.arange(num_tokens), _row_of_tokens(num_tokens, cu_q_lens)
    real = row < distribution[2]
    row = jnp.minimum(row, kv_lens.shape[0] - 1)
    index = kv_lens[row] - cu_q_lens[row + 1] + token
    return jnp.where(real, page_table[row, jnp.where(real, index, 0) // page_size], 0), index % page_size


def _row_of_tokens(num_tokens: int, cu_q_lens) -> jax.Array:
    """The row of each token [T]; for those of no row, a number beyond the last."""
    token = jnp.arange(num_tokens)
    return jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all")  # one fusion, no loop


def _attend_items(queries: _Queries, row, kv_block, live, cache: _Cache, tile: _Tile) -> _Partial:
    """C items of rows [C] against KV blocks [C]. Returns [C, K, M]."""
    pages, size = cache.block_pages(tile), cache.block_tokens(tile)
    page = cache.page_table[row[:, None], kv_block[:, None] * pages + jnp.arange(pages)]
    keys, values = cache.keys_and_values(page)
    index = kv_block[:, None] * size + jnp.arange(size)  # [C, W]
    written = (index < cache.kv_lens[row][:, None]) & live[:, None]
    visible = _visible(queries, index, cache.first_new[row]) & written[:, None]  # [C, M, W]
    if cache.reach.ends:
        visible &= index[:, None] >= jnp.asarray(cache.reach.oldest(queries.position))[:, :, None]

    dtype = queries.values.dtype
    scores = jnp.einsum("ckmh,ckwh->ckmw", queries.values, keys.astype(dtype), preferred_element_type=jnp.float32)
    if cache.scales is not None:
        scores *= cache.gather(cache.scales, page, 0)[:, :, None]
    if cache.soft_cap is not None:
        scores = cache.soft_cap * jnp.tanh(scores / cache.soft_cap)
    if cache.bias is not None:
        old = index < cache.first_new[row][:, None]
        scores += jnp.where(old[:, None], cache.gather(cache.bias, page), 0)[:, :, None]
    scores = jnp.where(visible[:, None], scores, _MASKED)
    maximum = jnp.maximum(scores.max(-1), _LOWEST)
    weights = jnp.exp(scores - maximum[..., None])
    total = weights.sum(-1)
    # Zeroed beyond the row's length: 0 * NaN left there by an earlier owner would be NaN.
    values = jnp.where(written[:, None, :, None], values, 0).astype(dtype)
    if cache.scales is not None:
        scales = jnp.where(written[:, None], cache.gather(cache.scales, page, 1), 0)
        weights *= scales[:, :, None]
    output = jnp.einsum("ckmw,ckwh->ckmh", weights.astype(dtype), values, preferred_element_type=jnp.float32)
    return _Partial(maximum, total, output)


def _visible(queries: _Queries, index, first_new) -> jax.Array:
    """[C, M, W]: the keys [C, W] at cache index `index` that come before a query, or that its tree mask names."""
    causal = index[:, None] <= queries.position[:, :, None]
    if queries.tree is None:
        return causal
    words, applies = queries.tree
    node = index - first_new[:, None]  # [C, W]: its number among the row's new tokens
    word = jnp.take_along_axis(words, jnp.clip(node // 32, 0, words.shape[-1] - 1)[:, None], axis=2)  # [C, M, W]
    seen = (word >> (node % 32).astype(jnp.uint32)[:, None]) & 1 == 1
    return jnp.where(applies[:, :, None] & (node >= 0)[:, None], seen, causal)


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


def _first_block(position, cache: _Cache, tile: _Tile):
    """The first KV block that a query at `position` sees."""
    return jnp.zeros_like(position) + cache.reach.oldest(position) // cache.block_tokens(tile)


def _attend_rows(queries, words, cache: _Cache, lengths, tile: _Tile) -> _Partial:
    """Rows of `lengths` [S] new tokens, up to Q, 0: not this one, nor those after it. C items (row, KV block) at a
    time. Queries [S, Q, K, G, H], words [S, Q, words] of a `_Tree`. Returns [S, Q, K, G]."""
    num_rows, size, num_kv_heads, group, head_dim = queries.shape
    items = min(tile.items, num_rows)
    queries = queries.swapaxes(1, 2).reshape(num_rows, num_kv_heads, size * group, head_dim)
    positions = (cache.kv_lens - lengths)[:, None] + jnp.arange(size)
    first = _first_block(positions[:, 0], cache, tile)
    count = jnp.where(lengths > 0, (cache.kv_lens - 1) // cache.block_tokens(tile) + 1 - first, 0)
    end = jnp.cumsum(count)
    positions = jnp.repeat(positions, group, axis=1)  # [S, QG]
    words = None if words is None else jnp.repeat(words, group, axis=1)

    def body(step, acc: _Partial) -> _Partial:
        item = step * items + jnp.arange(items)
        row = jnp.minimum(jnp.searchsorted(end, item, side="right", method="compare_all"), num_rows - 1)
        live = item < end[-1]
        kv_block = jnp.where(live, item - end[row] + count[row] + first[row], 0)
        tree = None if words is None else _Tree(words[row], jnp.ones((items, size * group), bool))
        part = _attend_items(_Queries(queries[row], positions[row], tree), row, kv_block, live, cache, tile)
        # Items are in order of rows, so they touch at most C consecutive ones: one slice in, one slice out.
        local = row - row[0]
        mine = (local == jnp.arange(items)[:, None]) & live  # [rows C, items C]
        old = _slice(acc, row[0], items)
        highest = jnp.where(mine[:, :, None, None], part.maximum, _LOWEST).max(1)
        weight = jnp.exp(part.maximum - highest[jnp.minimum(local, items - 1)])
        total = jnp.einsum("rc,ckm->rkm", mine.astype(jnp.float32), part.total * weight)
        output = jnp.einsum("rc,ckmh->rkmh", mine.astype(jnp.float32), part.output * weight[..., None])
        return _put(acc, _combine(old, _Partial(highest, total, output)), row[0])

    acc = _nothing((num_rows + items, num_kv_heads, size * group), cache.value_dim)
    acc = _slice(_loop(end[-1], items, body, acc), 0, num_rows)
    return _Partial(*(a.reshape(num_rows, num_kv_heads, size, group, *a.shape[3:]).swapaxes(1, 2) for a in acc))


def _attend_few(queries, tree_mask, cache: _Cache, cu_q_lens, lengths, tile: _Tile) -> _Partial:
    """As `_attend_rows`, of queries [T, K, G, H] wherever they are. Returns [T, K, G]."""
    num_tokens, num_rows, size = len(queries), len(lengths), tile.queries
    rank = jnp.cumsum(lengths > 0) - 1  # of each row, among those of this pass: they come first
    order = jnp.full(num_rows, num_rows - 1).at[jnp.where(lengths > 0, rank, num_rows)].set(jnp.arange(num_rows))
    lengths_here = jnp.where(jnp.arange(num_rows) <= rank[-1], lengths[order], 0)
    token = jnp.minimum(cu_q_lens[order, None] + jnp.arange(size), num_tokens - 1)  # [S, Q]
    first = cache._replace(page_table=cache.page_table[order], kv_lens=cache.kv_lens[order],
                           first_new=cache.first_new[order])  # fmt: skip
    words = None if tree_mask is None else tree_mask[token]
    part = _attend_rows(queries[token], words, first, lengths_here, tile)

    row = jnp.minimum(_row_of_tokens(num_tokens, cu_q_lens), num_rows - 1)
    offset = jnp.arange(num_tokens) - cu_q_lens[row]
    mine = (offset < lengths[row])[:, None, None]
    maximum, total, output = (a[rank[row], jnp.minimum(offset, size - 1)] for a in part)
    return _Partial(jnp.where(mine, maximum, _LOWEST), jnp.where(mine, total, 0),
                    jnp.where(mine[..., None], output, 0))  # fmt: skip


def _attend_chunks(acc: _Partial, queries, tree_mask, cache: _Cache, cu_q_lens, lengths, tile: _Tile) -> _Partial:
    """Rows of `lengths` [S] new tokens, 0: not this one; queries [T, K, G, H]. An item: (query block, KV block).

    acc: of T + Q tokens at least. Returns it with those of the rows filled in.
    """
    num_tokens, num_kv_heads, group, head_dim = queries.shape
    num_rows, size = cache.kv_lens.shape[0], tile.queries
    padded = jnp.pad(queries, ((0, size), (0, 0), (0, 0), (0, 0)))
    words = None if tree_mask is None else jnp.pad(tree_mask, ((0, size), (0, 0)))

    # Query blocks, in order of their tokens.
    block_end = jnp.cumsum(-(-lengths // size))
    block = jnp.arange(num_rows + num_tokens // size)
    row = jnp.minimum(jnp.searchsorted(block_end, block, side="right"), num_rows - 1)
    offset = (block - block_end[row] + -(-lengths[row] // size)) * size
    used = block < block_end[-1]
    tokens = jnp.where(used, jnp.minimum(lengths[row] - offset, size), 0)
    start = jnp.where(used, cu_q_lens[row] + offset, 0)
    position = cache.kv_lens[row] - lengths[row] + offset
    first = _first_block(position, cache, tile)
    count = jnp.where(used, (position + tokens - 1) // cache.block_tokens(tile) + 1 - first, 0)
    end = jnp.cumsum(count)

    def body(item, acc: _Partial) -> _Partial:
        j = jnp.searchsorted(end, item, side="right", method="compare_all")
        kv_block = item - end[j] + count[j] + first[j]
        # [Q, K, G, H] to [1, K, QG, H]
        chunk = lax.dynamic_slice_in_dim(padded, start[j], size).swapaxes(0, 1)
        chunk = chunk.reshape(1, num_kv_heads, size * group, head_dim)
        positions = jnp.repeat(position[j] + jnp.arange(size), group)[None]
        tree = None
        if words is not None:
            mine = lax.dynamic_slice_in_dim(words, start[j], size)
            applies = jnp.broadcast_to(lengths[row[j]] <= 32 * words.shape[1], positions.shape)
            tree = _Tree(jnp.repeat(mine, group, axis=0)[None], applies)
        items = _Queries(chunk, positions, tree)
        part = _attend_items(items, row[j][None], kv_block[None], jnp.ones(1, bool), cache, tile)
        part = _Partial(*(a[0].reshape(num_kv_heads, size, group, *a.shape[3:]).swapaxes(0, 1) for a in part))
        old = _slice(acc, start[j], size)
        mine = (jnp.arange(size) < tokens[j])[:, None, None]  # the tokens after them are other rows'
        new = _combine(old, part._replace(maximum=jnp.where(mine, part.maximum, _LOWEST), total=part.total * mine,
                                          output=part.output * mine[..., None]))  # fmt: skip
        return _put(acc, new, start[j])

    return _loop(end[-1], tile.items, body, acc)
