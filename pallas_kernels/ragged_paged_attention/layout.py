"""Where K and V live in a page, for each backend.

Axis letters: L layers, P pages, B tokens in a page, K kv heads, H head dim, R numbers in a stored row.
"""

from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp

from quant.kv import LARGEST, QuantizedPages

KVPages: TypeAlias = jax.Array | QuantizedPages


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """One KV group's stacked page array. Page 0 is scratch: padding tokens are written there and nobody reads it.

    Plain: [L, P, 2, K, B, R], R >= H. Side by side: [L, P, 1, K, B, 2 * R], a token's K and V in one row, for hardware
    whose rows are 128 numbers wide and heads of 64. What a head leaves of its R numbers is zero.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype  # int8 and float8_e4m3fn: QuantizedPages
    row_dim: int | None = None  # R; None: H
    side_by_side: bool = False

    # Heads before tokens: attention reads one head's tokens of a page as one contiguous [B, R] matrix.
    axes = ("layers", "pages", "k_or_v", "kv_heads", "page_tokens", "head_dim")

    @property
    def quantized(self) -> bool:
        return jnp.dtype(self.dtype).name in LARGEST

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        row = self.row_dim or self.head_dim
        k_or_v, row = (1, 2 * row) if self.side_by_side else (2, row)
        return (self.num_layers, self.num_pages, k_or_v, self.num_kv_heads, self.page_size, row)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        return (self.num_layers, self.num_pages, 2, self.num_kv_heads, self.page_size)

    def zeros(self) -> KVPages:
        values = jnp.zeros(self.shape, self.dtype)
        return QuantizedPages(values, jnp.zeros(self.scales_shape)) if self.quantized else values

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        count = 1
        for axis in (self.shape[0], *self.shape[2:]):
            count *= axis
        scales = 4 * self.num_layers * 2 * self.num_kv_heads * self.page_size if self.quantized else 0
        return count * jnp.dtype(self.dtype).itemsize + scales

    def to_canonical(self, values: jax.Array) -> jax.Array:
        """[L, P, B, 2, K, H]: token-major, the order in which KV moves between machines, tiers and layouts."""
        if self.side_by_side:
            *outer, row = values.shape
            values = values.reshape(*outer, 2, row // 2)  # [L, P, 1, K, B, 2, R]
            values = values.squeeze(2).transpose(0, 1, 4, 2, 3, 5)  # [L, P, 2, K, B, R]
        return values[..., : self.head_dim].transpose(0, 1, 4, 2, 3, 5)

    def from_canonical(self, kv: jax.Array) -> jax.Array:
        row = self.row_dim or self.head_dim
        values = kv.transpose(0, 1, 3, 4, 2, 5)  # [L, P, 2, K, B, H]
        values = jnp.pad(values, ((0, 0),) * 5 + ((0, row - self.head_dim),))
        if self.side_by_side:
            values = values.transpose(0, 1, 3, 4, 2, 5)  # [L, P, K, B, 2, R]
            values = values.reshape(*values.shape[:4], 2 * row)[:, :, None]
        return values
