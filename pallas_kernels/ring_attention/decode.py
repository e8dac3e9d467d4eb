"""Decoding over context-sharded pages: each device attends to its own tokens, partial softmaxes merge over the axis.

Every device has the queries of all rows; per row and layer one maximum, one sum and one vector of H a head cross the network.

Axis letters: S rows, N query heads, K kv heads, G = N / K, H head dim, P pages, B page tokens, M pages of the longest row,
W tokens of a KV block.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.ring_attention import pages
from pallas_kernels.ring_attention.xla import Partial, attend, merge, nothing, see

_KV_TOKENS = 128


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
    kv_pages: Float[Array, "L P 2 K B H"],
    layer: Int[Array, ""],
    slot_positions: Int[Array, "P B"],
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
) -> tuple[Float[Array, "S N H"], Float[Array, "L P 2 K B H"]]:
    """One token a row. q, k, v, positions: the same on all devices of `axis_name`. The rest is the device's own.

    owned[s]: this device keeps row s's new token, in slot kv_lens[s] - 1; exactly one device of the axis does (for the
    striped layout device `position % devices`). kv_lens: this device's tokens, the new one included where owned; 0 where it
    has none. Rows in no use have kv_lens 0 everywhere and get zeros. The cost follows the longest row.
    """
    num_rows, num_kv_heads, page_size = q.shape[0], kv_pages.shape[3], kv_pages.shape[4]
    packed = pages.is_packed(kv_pages, q.shape[2])
    new = jnp.concatenate([k, v], -1)[:, None] if packed else jnp.stack([k, v], 1)  # [S, 2, K, H]
    page, offset = _slots(page_table, kv_lens, owned, page_size)
    kv_pages = kv_pages.at[layer, page, :, :, offset].set(new.astype(kv_pages.dtype), mode="promise_in_bounds")

    width = kv_pages.shape[5]
    queries = (q.astype(jnp.float32) * scale).astype(q.dtype).reshape(num_rows, num_kv_heads, -1, q.shape[2])
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, 0), (0, width - q.shape[2])))
    count = max(_KV_TOKENS // page_size, 1)  # pages of a block
    size = count * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % count)))

    def body(block, acc: Partial) -> Partial:
        index = block * size + jnp.arange(size)
        present = index < kv_lens[:, None]  # [S, W]
        here = jnp.where(present[:, ::page_size], lax.dynamic_slice_in_dim(table, block * count, count, 1), 0)
        kv = kv_pages[layer, here].transpose(2, 0, 3, 1, 4, 5)  # [2, S, K, W / B, B, H]
        kv = kv.reshape(*kv.shape[:3], size, width).astype(q.dtype)
        held = jnp.where(present, slot_positions[here].reshape(num_rows, size), jnp.iinfo(jnp.int32).max)
        visible = see(positions[:, None], held, window)[:, None]  # [S, 1, 1, W]
        return merge(acc, attend(queries, kv[0], kv[-1], visible, present[:, None], soft_cap))

    acc = nothing(queries.shape[:3], width)
    acc = lax.fori_loop(0, -(-kv_lens.max() // size), body, acc)
    maximum = lax.pmax(acc.maximum, axis_name)
    weight = jnp.exp(acc.maximum - maximum)
    total = lax.psum(acc.total * weight, axis_name)
    output = lax.psum(acc.output * weight[..., None], axis_name)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)
        highest = jnp.maximum(maximum, sink)
        keep = jnp.exp(maximum - highest)
        total, output = total * keep + jnp.exp(sink - highest), output * keep[..., None]
    output = (output / jnp.maximum(total, 1e-30)[..., None])[..., q.shape[2] if packed else 0 :]
    return output.reshape(q.shape).astype(q.dtype), kv_pages
