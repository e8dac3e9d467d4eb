"""Ragged paged attention: one contract for every backend.

A step holds T tokens of S rows; row s owns the tokens cu_q_lens[s] .. cu_q_lens[s + 1] - 1, which are the newest of its
kv_lens[s] tokens. Rows of one token come first.

Axis letters: T tokens, S rows, N query heads, K kv heads, H head dim, M pages of the longest row.
"""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.ragged_paged_attention import xla
from pallas_kernels.ragged_paged_attention.layout import KVLayout

AttentionFn = Callable[..., tuple[jax.Array, jax.Array]]

__all__ = ["AttentionFn", "KVLayout", "ragged_paged_attention"]


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_pages: Float[Array, "L P 2 K B H"],
    layer: Int[Array, ""],
    page_table: Int[Array, "S M"],
    kv_lens: Int[Array, " S"],
    cu_q_lens: Int[Array, " S+1"],
    distribution: Int[Array, " 3"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "L P 2 K B H"]]:
    """Writes the new K and V into their pages, then attends causally. Returns (out, kv_pages); kv_pages is donated.

    page_table[s] lists the row's pages in order; entries beyond its length are not read. Page 0 is scratch.
    distribution: (rows of one token, end of the rows that only prefill, rows in use).
    window: a token sees itself and the window - 1 tokens before it. soft_cap: cap * tanh(score / cap).
    sinks: one extra logit a head that takes attention and gives nothing.
    """
    return xla.ragged_paged_attention(
        q, k, v, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution,
        scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
    )
