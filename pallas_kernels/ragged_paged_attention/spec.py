"""What a model asks of attention; a backend says from it whether it can serve."""

from dataclasses import dataclass

import jax.numpy as jnp


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
        for field in ("num_heads", "num_kv_heads", "head_dim", "page_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
