"""Decoding over context-sharded pages: each device attends to its own tokens, partial softmaxes merge over the axis.

Every device has the queries of all rows; per row, layer and head one maximum, one sum and one vector cross the network.

Axis letters: S rows, N query heads, K kv heads, G = N / K, H head dim, R numbers of K in a stored row, P pages,
B page tokens, M pages of the longest row, W tokens of a KV block.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.ring_attention import pages
from pallas_kernels.ring_attention.plan import NOWHERE, Positions
from pallas_kernels.ring_attention.xla import Partial, attend, divided, merge, merge_over, nothing, see
from quant.kv import QuantizedPages

_KV_TOKENS = 128  # W, where a page has fewer


def _slots(page_table, kv_lens, owned, page_size):
    """(page [S], offset [S]) of each row's new token, page 0 where another device keeps it."""
    index = jnp.where(owned, kv_lens - 1, 0)
    page = jnp.take_along_axis(page_table, index[:, None] // page_size, 1)[:, 0]
    return jnp.where(owned, page, 0), index % page_size


def write_decode_positions(
    slot_positions: Int[Array, "P B"], page_table: Int[Array, "S M"], kv_lens: Int[Array, " S"],
    positions: Int[Array, " S"], owned: Bool[Array, " S"],
) -> Int[Array, "P B"]:  # fmt: skip
    """Records the positions of the new tokens that this device keeps. Once a step."""
    page, offset = _slots(page_table, kv_lens, owned, slot_positions.shape[1])
    return slot_positions.at[page, offset].set(positions, mode="promise_in_bounds")


def context_decode_attention(
    q: Float[Array, "S N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    kv_pages: pages.KVPages,
    layer: Int[Array, ""],
    where: Positions,
    page_table: Int[Array, "S M"],
    kv_lens: Int[Array, " S"],
    positions: Int[Array, " S"],
    owned: Bool[Array, " S"],
    *,
    axis_name: str,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "S N H"], pages.KVPages]:
    """One token a row. q, k, v, positions: the same on all devices of `axis_name`. The rest is the device's own.
    where: positions of the tokens that it keeps.

    owned[s]: this device keeps row s's new token, in slot kv_lens[s] - 1; exactly one device of the axis does (for the
    striped layout device `position % devices`). kv_lens: this device's tokens, the new one included where owned; 0
    where it has none. Rows in no use have kv_lens 0 everywhere and get zeros. The cost follows the longest row.
    """
    how, page_size = pages.stored(kv_pages, q.shape[2]), pages.values_of(kv_pages).shape[4]
    num_rows, heads = q.shape[0], how.num_kv_heads
    page, offset = _slots(page_table, kv_lens, owned, page_size)
    kv_pages = jax.tree.map(
        lambda pool, new: pool.at[layer, page, :, :, offset].set(new, mode="promise_in_bounds"),
        kv_pages, pages.new_rows(k, v, kv_pages),
    )  # fmt: skip

    queries = (q.astype(jnp.float32) * scale).astype(q.dtype).reshape(num_rows, heads, -1, q.shape[2])
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, 0), (0, how.width - q.shape[2])))
    count = max(_KV_TOKENS // page_size, 1)  # pages of a block
    size = count * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % count)))

    def body(block, acc: Partial) -> Partial:
        present = block * size + jnp.arange(size) < kv_lens[:, None]  # [S, W]
        here = jnp.where(present[:, ::page_size], lax.dynamic_slice_in_dim(table, block * count, count, 1), 0)

        def read(pool):  # [S, W / B, 2, K, B, ...] to [2, S, K, W, ...]
            kv = jnp.moveaxis(pool[layer, here], (2, 1), (0, 3))
            return kv.reshape(*kv.shape[:3], size, *kv.shape[5:])

        kv, scales = read(pages.values_of(kv_pages)), None
        if isinstance(kv_pages, QuantizedPages):
            scales = read(kv_pages.scales)
        index = jnp.broadcast_to(block * size + jnp.arange(size), present.shape)
        held = jnp.where(present, where.of(index, here), NOWHERE)
        visible = see(positions[:, None], held, window)[:, None]  # [S, 1, 1, W]
        return merge(acc, attend(queries, kv, scales, visible, present[:, None], soft_cap))

    acc = lax.fori_loop(0, -(-kv_lens.max() // size), body, nothing(queries.shape[:3], how.width))
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(heads, -1)
    output = divided(merge_over(axis_name, acc), sink)[..., how.value_at : how.value_at + q.shape[2]]
    return output.reshape(q.shape).astype(q.dtype), kv_pages
