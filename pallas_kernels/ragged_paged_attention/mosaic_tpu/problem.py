"""What is fixed when the kernels are built: shapes, number formats, and which features are in use.

Axis letters: T tokens, S rows, N query heads, K kv heads, G = N / K, L layers, P pages, B tokens of a page, M pages of
the longest row; R numbers of a stored row (whole lanes of 128), X planes of a page (K and V, or one with both side by
side); F tokens fetched at a time, W tokens computed at a time, D rows of queries (tokens times G) of a query block.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.reach import WHOLE, Reach

LANES = 128
LOG2E = math.log2(math.e)
MASKED = -1e30  # the score of what may not be seen; finite, so that differences are never NaN
LOWEST = -1e29  # no maximum is lower: exp2(MASKED - LOWEST) is 0, also where nothing is seen


@dataclass(frozen=True, kw_only=True)
class Problem:
    """tree_words: 32-bit words of a tree mask, 0 without. quantized: pages have scales. compute_dtype: of queries."""

    num_kv_heads: int
    group: int
    page_size: int
    row_lanes: int
    planes: int
    compute_dtype: jnp.dtype
    kv_dtype: jnp.dtype
    scale: float
    reach: Reach = WHOLE
    soft_cap: float | None = None
    quantized: bool = False
    biased: bool = False
    sinks: bool = False
    tree_words: int = 0

    @property
    def tile(self) -> int:
        """Rows of a memory tile, the least that can be written."""
        return 32 // jnp.dtype(self.kv_dtype).itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        values = self.planes * self.num_kv_heads * self.row_lanes * jnp.dtype(self.kv_dtype).itemsize
        lanes = max(LANES, self.page_size) // self.page_size  # of a scale or a bias: small pages leave lanes unused
        return values + 4 * self.num_kv_heads * lanes * (2 * self.quantized + self.biased)

    @property
    def query_factor(self) -> float:
        """What queries are multiplied with. Scores are in powers of two: the hardware has exp2."""
        return self.scale * LOG2E if self.soft_cap is None else self.scale / self.soft_cap

    @property
    def precision(self) -> jax.lax.Precision | None:
        return jax.lax.Precision.HIGHEST if self.compute_dtype == jnp.float32 else None


def cdiv(a, b):
    return (a + b - 1) // b
