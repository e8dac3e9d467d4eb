"""Where the latents live in a page, for each backend.

Axis letters: L layers, P pages, B tokens of a page, R latent numbers, E rope numbers, C numbers of a stored row.
"""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class LatentLayout:
    """[L, P, B, C]: a token's row is its latent, its rotated key, and zeros up to C. Page 0 is scratch: padding tokens
    may be written there and nobody reads it."""

    num_layers: int
    num_pages: int
    page_size: int
    latent_dim: int
    rope_dim: int
    dtype: jnp.dtype
    row_dim: int | None = None  # C; None: R + E

    axes = ("layers", "pages", "page_tokens", "latent")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_layers, self.num_pages, self.page_size, self.row_dim or self.latent_dim + self.rope_dim)

    def zeros(self) -> jax.Array:
        return jnp.zeros(self.shape, self.dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return prod((self.shape[0], *self.shape[2:])) * jnp.dtype(self.dtype).itemsize

    def to_canonical(self, pages: jax.Array) -> jax.Array:
        """[L, P, B, R + E]: the order in which latents move between machines, tiers and layouts."""
        return pages[..., : self.latent_dim + self.rope_dim]

    def from_canonical(self, rows: jax.Array) -> jax.Array:
        return jnp.pad(rows, ((0, 0),) * 3 + ((0, self.shape[-1] - rows.shape[-1]),))
