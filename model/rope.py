"""Rotary position embedding (Su et al. 2021), in the half-split form of Llama checkpoints.

Axis letters: T tokens, N heads (query or kv), H head dim.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Float[Array, " H//2"]:
    """Radians a position, with the config's scaling applied."""
    base = 1.0 / config.theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if config.kind == "linear":
        return base / config.factor
    if config.kind == "llama3":
        wavelength = 2 * math.pi / base
        turns = config.original_max_position / wavelength  # in the original context
        blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        blend = jnp.clip(blend, 0.0, 1.0)  # 0: low frequency, scaled; 1: high frequency, kept
        return base * (blend + (1 - blend) / config.factor)
    return base


def rope_angles(config: RopeConfig, head_dim: int, positions: Int[Array, " T"]) -> Float[Array, "T 2 H//2"]:
    """Cosines and sines of every token, computed once a step and shared by all layers."""
    # Angles in f32: bf16 rounds position 257 to 256.
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(config, head_dim)
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)


def apply_rope(x: Float[Array, "T N H"], angles: Float[Array, "T 2 H//2"]) -> Float[Array, "T N H"]:
    cos, sin = angles[:, 0, None], angles[:, 1, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)

