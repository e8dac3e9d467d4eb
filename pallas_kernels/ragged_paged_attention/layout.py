"""Where K and V live in a page, for each backend.

Axis letters: L layers, P pages, B tokens in a page, K kv heads, H head dim.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """One KV group's stacked page array. Page 0 is scratch: padding tokens are written there and nobody reads it."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype

    # Heads before tokens: attention reads one head's tokens of a page as one contiguous [B, H] matrix.
    axes = ("layers", "pages", "k_or_v", "kv_heads", "page_tokens", "head_dim")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_layers, self.num_pages, 2, self.num_kv_heads, self.page_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        per_token = self.num_layers * 2 * self.num_kv_heads * self.head_dim
        return per_token * self.page_size * jnp.dtype(self.dtype).itemsize

    def to_canonical(self, kv_pages: jax.Array) -> jax.Array:
        """[L, P, B, 2, K, H]: token-major, the order in which KV moves between machines, tiers and layouts."""
        return kv_pages.transpose(0, 1, 4, 2, 3, 5)

    def from_canonical(self, kv: jax.Array) -> jax.Array:
        return kv.transpose(0, 1, 3, 4, 2, 5)
