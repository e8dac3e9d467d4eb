"""Between tokens and what the kernels work on: whole pages to write, query tiles to attend.

Two layouts of pages: [L, P, 2, K, B, H], K and V apart, and for head size 64 on a TPU [L, P, 1, K, B, 128], a token's K
in the first half of a row and its V in the second. There queries get zeros behind them, so that a product with the row is
one with K alone, and the second half of the weighted sum is the one of V.

Axis letters: T tokens, N query heads, K kv heads, G = N / K, H head dim, P pages, B page tokens; J tiles of Q tokens.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.ring_attention.plan import RingPlan


def is_packed(kv_pages: jax.Array, head_dim: int) -> bool:
    """Whether K and V share a row; ValueError for any other layout than the two."""
    parts, width = kv_pages.shape[2], kv_pages.shape[5]
    if (parts, width) not in ((2, head_dim), (1, 2 * head_dim)):
        raise ValueError(f"kv_pages {kv_pages.shape} must be [L, P, 2, K, B, {head_dim}] or [L, P, 1, K, B, {2 * head_dim}]")
    return parts == 1


def pages_to_write(k: jax.Array, v: jax.Array, kv_pages: jax.Array, layer: jax.Array, plan: RingPlan) -> jax.Array:
    """The pages plan.write_page as they will be, [Wp, 2, K, B, H]: new tokens where there are any, else the old bytes."""
    joined = jnp.concatenate([k, v], -1)[:, None] if is_packed(kv_pages, k.shape[2]) else jnp.stack([k, v], 1)
    new = joined.astype(kv_pages.dtype).at[plan.write_token].get(mode="clip")  # [Wp, B, 2, K, H]
    fresh = plan.write_token < k.shape[0]
    old = kv_pages[layer, plan.write_page]
    return jnp.where(fresh[:, None, None, :, None], new.transpose(0, 2, 3, 1, 4), old)


def query_tiles(q: jax.Array, kv_pages: jax.Array, scale: float, plan: RingPlan) -> jax.Array:
    """[T, N, H] to scaled [J, K, Q G, H], zeros where a tile has no token; H as wide as the cache's rows."""
    num_kv_heads, width = kv_pages.shape[3], kv_pages.shape[5]
    if q.shape[1] % num_kv_heads:
        raise ValueError(f"num_heads={q.shape[1]} must be a multiple of {num_kv_heads=}")
    tiles, places = plan.tile_token.shape
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    q = q.at[plan.tile_token].get(mode="fill", fill_value=0).reshape(tiles, places, num_kv_heads, -1, q.shape[2])
    q = q.transpose(0, 2, 1, 3, 4).reshape(tiles, num_kv_heads, -1, q.shape[4])
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, width - q.shape[3])))


def from_tiles(out: jax.Array, shape: tuple[int, int, int], packed: bool, plan: RingPlan) -> jax.Array:
    """[J, K, Q G, H] back to [T, N, H]; zeros for padding tokens."""
    tiles, num_kv_heads = out.shape[:2]
    places = plan.tile_token.shape[1]
    if packed:
        out = out[..., shape[2] :]
    out = out.reshape(tiles, num_kv_heads, places, -1, shape[2]).transpose(0, 2, 1, 3, 4).reshape(tiles * places, *shape[1:])
    place = plan.token_place
    return jnp.where((place >= 0)[:, None, None], out[jnp.maximum(place, 0)], 0)


def rows_of_tile(per_token: jax.Array, group: int) -> jax.Array:
    """[J, Q] to [J, Q G]: a row of a tile is a (token, head of the group), the head running fastest."""
    return jnp.repeat(per_token, group, axis=-1)


def sink_rows(sinks: jax.Array, num_kv_heads: int, places: int) -> jax.Array:
    """[N] to float32 [K, Q G]."""
    return jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, -1), (1, places))
