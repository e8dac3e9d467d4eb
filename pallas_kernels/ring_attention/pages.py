"""Between tokens and what the kernels work on: tiles of pages to write, query tiles to attend.

Two layouts of pages, as ragged paged attention's KVLayout has them: [L, P, 2, K, B, R], K and V apart, and side by side
[L, P, 1, K, B, 2 R], a token's K and V in one row. R >= H, zeros behind a head. Queries get zeros behind them, so that
a product with a row is one with K alone; the part of the weighted sum where V lies is the result.

Axis letters: T tokens, N query heads, K kv heads, G = N / K, H head dim, R numbers of K in a stored row, P pages,
B page tokens; J tiles of Q tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ring_attention.plan import RingPlan
from quant.kv import QuantizedPages, quantize_rows

KVPages = jax.Array | QuantizedPages


class Stored(NamedTuple):
    """How pages hold a head of H numbers."""

    num_kv_heads: int
    row_dim: int  # R
    side_by_side: bool
    value_at: int  # where V begins in a row of the values' half

    @property
    def width(self) -> int:
        return 2 * self.row_dim if self.side_by_side else self.row_dim


def stored(kv_pages: KVPages, head_dim: int) -> Stored:
    """Read from the pages' shape; ValueError for any other than the two layouts."""
    shape = values_of(kv_pages).shape
    row = {2: shape[5], 1: shape[5] // 2}.get(shape[2], 0) if len(shape) == 6 else 0
    if row < head_dim:
        raise ValueError(f"kv_pages {shape} must be [L, P, 2, K, B, R] or [L, P, 1, K, B, 2 R] with R >= {head_dim}")
    return Stored(shape[3], row, shape[2] == 1, row if shape[2] == 1 else 0)


def values_of(kv_pages: KVPages) -> jax.Array:
    return kv_pages.values if isinstance(kv_pages, QuantizedPages) else kv_pages


def new_rows(k: jax.Array, v: jax.Array, kv_pages: KVPages) -> KVPages:
    """[T, K, H] each to rows as pages hold them, [T, 2, K, R] or [T, 1, K, 2 R]; scales [T, 2, K]."""
    how, dtype = stored(kv_pages, k.shape[2]), values_of(kv_pages).dtype
    both = jnp.stack([k, v], 1)
    values, scales = quantize_rows(both, dtype) if isinstance(kv_pages, QuantizedPages) else (both.astype(dtype), None)
    values = jnp.pad(values, ((0, 0),) * 3 + ((0, how.row_dim - k.shape[2]),))
    if how.side_by_side:
        values = values.swapaxes(1, 2).reshape(k.shape[0], 1, how.num_kv_heads, how.width)
    return values if scales is None else QuantizedPages(values, scales)


def new_tiles(k: jax.Array, v: jax.Array, kv_pages: jax.Array, plan: RingPlan) -> jax.Array:
    """[X, 2, K, Z, R] or [X, 1, K, Z, 2 R]: new tokens in the tiles plan.writes.page; in other slots, anything."""
    rows = new_rows(k, v, kv_pages)
    assert isinstance(rows, jax.Array), "the kernel that writes tiles has no quantized KV"
    return jnp.moveaxis(rows.at[plan.writes.token].get(mode="clip"), 1, 3)


def query_tiles(q: jax.Array, kv_pages: KVPages, scale: float, plan: RingPlan) -> jax.Array:
    """[T, N, H] to scaled [J, K, Q G, width], zeros where a tile has no token and behind a head."""
    how = stored(kv_pages, q.shape[2])
    if q.shape[1] % how.num_kv_heads:
        raise ValueError(f"num_heads={q.shape[1]} must be a multiple of num_kv_heads={how.num_kv_heads}")
    tiles, places = plan.tile_token.shape
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    q = q.at[plan.tile_token].get(mode="fill", fill_value=0)
    q = q.reshape(tiles, places, how.num_kv_heads, -1, q.shape[3]).transpose(0, 2, 1, 3, 4)
    q = q.reshape(tiles, how.num_kv_heads, -1, q.shape[4])
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, how.width - q.shape[3])))


def from_tiles(out: jax.Array, shape: tuple[int, ...], how: Stored, plan: RingPlan) -> jax.Array:
    """[J, K, Q G, width] back to [T, N, H]; zeros for padding tokens."""
    tiles, places = plan.tile_token.shape
    out = out[..., how.value_at : how.value_at + shape[2]]
    out = out.reshape(tiles, how.num_kv_heads, places, -1, shape[2]).transpose(0, 2, 1, 3, 4)
    out = out.reshape(tiles * places, *shape[1:])
    place = plan.token_place
    return jnp.where((place >= 0)[:, None, None], out[jnp.maximum(place, 0)], 0)


def rows_of_tile(per_token: jax.Array, group: int) -> jax.Array:
    """[J, Q] to [J, Q G]: a row of a tile is a (token, head of the group), the head running fastest."""
    return jnp.repeat(per_token, group, axis=-1)


def sink_rows(sinks: jax.Array, num_kv_heads: int, places: int) -> jax.Array:
    """[N] to float32 [K, Q G]."""
    return jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, -1), (1, places))
