"""Weights of a mixture of experts in 8 bits, with a float32 scale for every group of contracted elements.

Axis letters: E experts, D contracted, F columns, G contracted elements that share a scale.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

DTYPES = (jnp.dtype("int8"), jnp.dtype("float8_e4m3fn"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QuantizedExperts:
    """values[e, d, f] * scales[e, d // G, f], symmetric; G divides D, and G = D is one scale a column."""

    values: Num[Array, "E D F"]  # int8 or float8_e4m3fn
    scales: Float[Array, "E D//G F"]  # float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def group_size(self) -> int:
        """G"""
        return self.values.shape[1] // self.scales.shape[1]


def quantize_experts(
    weights: Float[Array, "E D F"], dtype=jnp.int8, group_size: int | None = None
) -> QuantizedExperts:
    """The largest magnitude of a group becomes the largest value of dtype; others round to the nearest.

    group_size must divide D; None is D, one scale a column. Raises ValueError otherwise.
    """
    dtype, (experts, depth, columns) = jnp.dtype(dtype), weights.shape
    group_size = depth if group_size is None else group_size
    if dtype not in DTYPES:
        raise ValueError(f"{dtype=} must be one of {', '.join(map(str, DTYPES))}")
    if depth % group_size:
        raise ValueError(f"{group_size=} must divide {depth=}")
    largest = float(jnp.iinfo(dtype).max if dtype == jnp.int8 else jnp.finfo(dtype).max)
    groups = weights.astype(jnp.float32).reshape(experts, depth // group_size, group_size, columns)
    scales = jnp.abs(groups).max(axis=2) / largest
    scaled = groups / jnp.where(scales > 0, scales, 1.0)[:, :, None]
    scaled = jnp.round(scaled) if dtype == jnp.int8 else jnp.clip(scaled, -largest, largest)
    return QuantizedExperts(values=scaled.reshape(weights.shape).astype(dtype), scales=scales)


def dequantize_experts(experts: QuantizedExperts, dtype=jnp.float32) -> Float[Array, "E D F"]:
    values = experts.values.astype(jnp.float32)
    return (values * jnp.repeat(experts.scales, experts.group_size, axis=1)).astype(dtype)
