"""Quantized KV: 8-bit numbers with one symmetric float32 scale for each token and kv head.

A key's scale multiplies its scores and a value's scale its weight, after the products, so that attention reads the
8-bit numbers alone and never makes a dequantized copy.

Axis letters: L layers, P pages, B tokens of a page, K kv heads, H head dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# The largest magnitude a format holds. float8_e4m3fn gives NaN above it, so values are clamped before the cast.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


class QuantizedPages(NamedTuple):
    """Stands wherever an array of KV pages does."""

    values: jax.Array  # [L, P, 2, K, B, H] or as its layout says, int8 or float8_e4m3fn
    scales: jax.Array  # [L, P, 2, K, B] float32


def quantize_rows(
    x: Float[Array, "*rows H"], dtype: jnp.dtype
) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows"]]:
    """Values of `dtype` and a scale for each row: row = values * scale, its largest at the format's largest."""
    largest = LARGEST[jnp.dtype(dtype).name]
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) * jnp.float32(1 / largest)
    # One reciprocal a row, not a division an element, which compilers rewrite so or not: every backend rounds alike.
    scaled = x * (1 / jnp.where(scale == 0, 1.0, scale))[..., None]
    if jnp.issubdtype(dtype, jnp.integer):
        scaled = jnp.round(scaled)
    return jnp.clip(scaled, -largest, largest).astype(dtype), scale
