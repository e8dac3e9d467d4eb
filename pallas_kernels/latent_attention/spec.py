"""What a model asks of latent attention; a backend says from it whether it can serve."""

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Heads are those of one device. dtype: of queries; kv_dtype: of the pages."""

    num_heads: int
    latent_dim: int = 512
    rope_dim: int = 64
    page_size: int
    dtype: jnp.dtype
    kv_dtype: jnp.dtype

    def __post_init__(self):
        for field in ("num_heads", "latent_dim", "rope_dim", "page_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
