"""What a model asks of latent attention; a backend says from it whether it can serve."""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.backends import require_positive


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
        require_positive(self, "num_heads", "latent_dim", "rope_dim", "page_size")
