"""What a token's position does to its queries and keys: rotary embedding (Su et al. 2021), and growth.

Axis letters: T tokens, N heads (query or kv), H head dim, R rotated pairs of a head (2R <= H).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.config import AttentionGrowth, RopeConfig


def rope_angles(config: RopeConfig, positions: Int[Array, " T"]) -> Float[Array, "T 2 R"]:
    """Cosines and sines of every token, computed once a step and shared by all layers with this config."""
    # Angles in f32: bf16 rounds position 257 to 256.
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(config.frequencies, jnp.float32)
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1) * config.magnitude


def growth_of(config: AttentionGrowth, positions: Int[Array, " T"]) -> Float[Array, " T"]:
    """What every token's queries are multiplied with."""
    return 1 + config.strength * jnp.log1p(((positions + 1) // config.every).astype(jnp.float32))


def apply_rope(config: RopeConfig, x: Float[Array, "T N H"], angles: Float[Array, "T 2 R"]) -> Float[Array, "T N H"]:
    cos, sin = angles[:, 0, None], angles[:, 1, None]
    pairs = len(config.frequencies)
    wide = x[..., : 2 * pairs].astype(jnp.float32)
    if config.pairs == "halves":
        first, second = wide[..., :pairs], wide[..., pairs:]
    else:
        first, second = wide[..., ::2], wide[..., 1::2]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if config.pairs == "halves":
        rotated = jnp.concatenate(turned, axis=-1)
    else:
        rotated = jnp.stack(turned, axis=-1).reshape(wide.shape)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., 2 * pairs :]], axis=-1)
