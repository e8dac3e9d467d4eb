"""Where the latents live in a page, for each backend.

Axis letters: L layers, P pages, B tokens of a page, R latent numbers, E rope numbers.
"""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class LatentLayout:
    """[L, P, B, R + E]: a token's row is its latent and its rotated key. In pairs: [L, P, B / 2, 2 * (R + E)], the
    latents of tokens 2i and 2i + 1 and then their rotated keys, for hardware with rows of 128 numbers, and E = 64:
    nothing is padded, and all parts start at a register's first lane.

    Page 0 is scratch: padding tokens may be written there and nobody reads it.
    """

    num_layers: int
    num_pages: int
    page_size: int
    latent_dim: int
    rope_dim: int
    dtype: jnp.dtype
    pairs: bool = False

    axes = ("layers", "pages", "page_rows", "latent")

    @property
    def shape(self) -> tuple[int, ...]:
        tokens, numbers = (2 if self.pairs else 1), self.latent_dim + self.rope_dim
        return (self.num_layers, self.num_pages, self.page_size // tokens, tokens * numbers)

    def zeros(self) -> jax.Array:
        return jnp.zeros(self.shape, self.dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return prod((self.shape[0], *self.shape[2:])) * jnp.dtype(self.dtype).itemsize

    def to_canonical(self, pages: jax.Array) -> jax.Array:
        """[L, P, B, R + E]: the order in which latents move between machines, tiers and layouts."""
        if not self.pairs:
            return pages
        *outer, rows, _ = pages.shape
        latent, rope = jnp.split(pages, [2 * self.latent_dim], axis=-1)
        parts = (latent.reshape(*outer, 2 * rows, -1), rope.reshape(*outer, 2 * rows, -1))
        return jnp.concatenate(parts, axis=-1)

    def from_canonical(self, tokens: jax.Array) -> jax.Array:
        return pair_rows(tokens, self.latent_dim) if self.pairs else tokens


def pair_rows(tokens: jax.Array, latent_dim: int) -> jax.Array:
    """[..., tokens, R + E] to [..., tokens / 2, 2R + 2E]."""
    *outer, count, _ = tokens.shape
    latent, rope = jnp.split(tokens, [latent_dim], axis=-1)
    parts = (latent.reshape(*outer, count // 2, -1), rope.reshape(*outer, count // 2, -1))
    return jnp.concatenate(parts, axis=-1)
