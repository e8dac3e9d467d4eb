"""What a model asks of attention; a backend says from it whether it can serve."""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.backends import require_positive


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Heads are those of one device. dtype: of queries; kv_dtype: of the pages."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: jnp.dtype
    kv_dtype: jnp.dtype

    def __post_init__(self):
        require_positive(self, "num_heads", "num_kv_heads", "head_dim", "page_size")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
