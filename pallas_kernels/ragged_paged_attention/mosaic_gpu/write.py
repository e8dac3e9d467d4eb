"""Stores the new tokens' K and V in their pages, before attention reads them.

XLA's scatter: one launch that changes the pages in place (two where they have scales). It is not part of the attention
kernel because blocks of the grid read what others would write, and a launch has no order between its blocks.

Axis letters: T tokens, S rows, K kv heads, H head dim, L layers, P pages, B page tokens.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.layout import KVPages
from pallas_kernels.ragged_paged_attention.xla import slots_of
from quant.kv import QuantizedPages, quantize_rows


def write(k, v, kv_pages: KVPages, layer, page_table, kv_lens, cu_q_lens, distribution) -> KVPages:
    """Arguments of `api.AttentionFn`; padding tokens go to page 0."""
    values = kv_pages.values if isinstance(kv_pages, QuantizedPages) else kv_pages
    page, slot = slots_of(k.shape[0], values.shape[4], page_table, kv_lens, cu_q_lens, distribution)
    new = jnp.stack([k, v], axis=1)  # [T, 2, K, H]

    def put(paged: jax.Array, rows: jax.Array) -> jax.Array:
        where = paged.at[layer, page, :, :, slot]
        return where.set(rows.astype(paged.dtype), mode="promise_in_bounds")

    if isinstance(kv_pages, QuantizedPages):
        return QuantizedPages(*map(put, kv_pages, quantize_rows(new, values.dtype)))
    return put(kv_pages, new)
