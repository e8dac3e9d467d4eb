"""Attention of small blocks of tokens to all that is cached of their rows, and to all of their own block.

The paged kernels are causal, also under a tree mask, and write what they attend to. A block of DFlash is neither: its
tokens see those after them, and nothing of it may stay. So this is plain XLA: a partial softmax over the block, dense,
into which those over the cached tokens are merged, a few pages of every row at a time. The cost follows the longest
row, which suits the few layers of a drafter.

Axis letters: S rows, B tokens of a block, N query heads, K kv heads, G = N / K, H head dim, L layers, P pages,
b tokens of a page, M pages of the longest row, W cached tokens at a time.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_TOKENS = 128  # W, where a page has fewer
_MASKED = -1e30  # finite, so that differences are never NaN
PAGE_AXES = (None, "pages", None, None, "kv_heads", "head_dim")  # of [L, P, b, 2, K, H]


def write_pages(
    pages: Float[Array, "L P b 2 K H"], k: Float[Array, "L T K H"], v: Float[Array, "L T K H"],
    page_table: Int[Array, "S M"], row: Int[Array, " T"], index: Int[Array, " T"], real: Bool[Array, " T"],
) -> Float[Array, "L P b 2 K H"]:  # fmt: skip
    """All layers' keys and values of T tokens at once: `index` is the place in its row's cache. Those that are not real
    go to page 0, which nobody reads."""
    size = pages.shape[2]
    page = jnp.where(real, page_table[row, jnp.where(real, index, 0) // size], 0)
    return pages.at[:, page, index % size].set(jnp.stack([k, v], axis=2).astype(pages.dtype))


def attend_blocks(
    q: Float[Array, "S B N H"], k: Float[Array, "S B K H"], v: Float[Array, "S B K H"],
    pages: Float[Array, "L P b 2 K H"], layer: Int[Array, ""], page_table: Int[Array, "S M"],
    lens: Int[Array, " S"], *, scale: float, window: Int[Array, ""], causal: Bool[Array, ""],
) -> Float[Array, "S B N H"]:  # fmt: skip
    """Row s has lens[s] cached tokens, its block follows them.

    window: tokens that a token sees back, itself among them, and, unless `causal`, ahead as well.
    """
    S, B, N, H = q.shape
    heads, size = k.shape[2], pages.shape[2]
    count = max(_TOKENS // size, 1)  # pages at a time
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % count)))
    queries = q.astype(jnp.float32).reshape(S, B, heads, N // heads, H) * scale

    def attend(keys, values, visible):
        """Keys and values [S, W, K, H] of which query [S, B] sees `visible`: (maximum, sum, weighted values)."""
        scores = jnp.einsum("sbkgh,swkh->sbkgw", queries, keys.astype(jnp.float32))
        scores = jnp.where(visible[:, :, None, None], scores, _MASKED)
        maximum = scores.max(-1)
        weights = jnp.where(visible[:, :, None, None], jnp.exp(scores - maximum[..., None]), 0)
        return maximum, weights.sum(-1), jnp.einsum("sbkgw,swkh->sbkgh", weights, values.astype(jnp.float32))

    def merge(old, new):
        maximum = jnp.maximum(old[0], new[0])
        keep, add = jnp.exp(old[0] - maximum), jnp.exp(new[0] - maximum)
        return maximum, old[1] * keep + new[1] * add, old[2] * keep[..., None] + new[2] * add[..., None]

    place = jnp.arange(B)
    back = place[:, None] - place
    of_block = (back < window) & jnp.where(causal, back >= 0, -back < window)
    position = lens[:, None] + place  # [S, B]

    def body(step, acc):
        index = step * count * size + jnp.arange(count * size)
        cached = index < lens[:, None]  # [S, W]
        here = jnp.where(cached[:, ::size], lax.dynamic_slice_in_dim(table, step * count, count, 1), 0)
        kv = pages[layer, here].reshape(S, count * size, 2, heads, H)
        kv = jnp.where(cached[:, :, None, None, None], kv, 0)  # what an earlier owner left may be NaN
        visible = cached[:, None] & (position[:, :, None] - index < window)
        return merge(acc, attend(kv[:, :, 0], kv[:, :, 1], visible))

    acc = attend(k, v, jnp.broadcast_to(of_block, (S, B, B)))
    _, total, output = lax.fori_loop(0, -(-lens.max() // (count * size)), body, acc)
    return (output / total[..., None]).reshape(q.shape).astype(q.dtype)
