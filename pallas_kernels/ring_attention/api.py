"""Ring attention over paged KV that is sharded over a mesh axis: one contract for every backend.

The tokens of a sequence, cached and new ones, are spread over the D devices of a `context` axis; each device keeps the
pages of its own tokens in its own pool, so the room for context grows with the axis. All functions here are called inside
`shard_map(..., check_vma=False)` over that axis, and all arrays are the device's own part. A prefill step:

    slot_positions = write_positions(slot_positions, page_table, kv_lens, cu_q_lens, positions)       once a step
    plan = ring_plan(slot_positions, page_table, kv_lens, cu_q_lens, positions, ...)                  once a step and window
    out, kv_pages = ring_attention(q, k, v, kv_pages, layer, plan, ...)                               every layer

and a decode step, where every device has all rows' queries and one of them keeps the new token:

    slot_positions = write_decode_positions(slot_positions, page_table, kv_lens, positions, owned)
    out, kv_pages = context_decode_attention(q, k, v, kv_pages, layer, slot_positions, page_table, kv_lens, positions, owned)

`layout.lay_out` says on the host which tokens go where. Masks come from the true positions only, so any layout is right.

Axis letters: T new tokens of one device, S rows, N query heads, K kv heads, H head dim, L layers, P pages, B page tokens,
M pages of the longest row.
"""

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.ring_attention import mosaic_tpu, xla
from pallas_kernels.ring_attention.config import RingConfig, RingShape
from pallas_kernels.ring_attention.decode import context_decode_attention, write_decode_positions
from pallas_kernels.ring_attention.layout import Layout, RingBatch, lay_out, owners, unmasked_pairs
from pallas_kernels.ring_attention.plan import RingPlan, ring_plan, write_positions
from pallas_kernels.ring_attention.xla import LocalAttention

Backend = Literal["mosaic_tpu", "xla"]

__all__ = [
    "Backend", "Layout", "LocalAttention", "RingBatch", "RingConfig", "RingPlan", "RingShape", "context_decode_attention",
    "lay_out", "owners", "ring_attention", "ring_plan", "unmasked_pairs", "write_decode_positions", "write_positions",
]  # fmt: skip


def ring_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_pages: Float[Array, "L P 2 K B H"],
    layer: Int[Array, ""],
    plan: RingPlan,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    backend: Backend = "xla",
    local: LocalAttention | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T N H"], Float[Array, "L P 2 K B H"]]:
    """Writes the new K and V into this device's pages, then attends causally to the row's tokens on all devices.

    Returns (out, kv_pages); kv_pages is donated. Padding tokens get zeros. plan: from `ring_plan`, with the axis, the window and
    the block sizes. kv_pages may also be [L, P, 1, K, B, 2 H], K and V side by side (head size 64 on a TPU). Rows own the
    pages they write. soft_cap: cap * tanh(score / cap). sinks: one extra logit a head that takes attention and gives
    nothing. local: the attention inside a step of the `xla` backend. Raises ValueError for a combination that the
    backend does not have.
    """
    if backend == "xla":
        return xla.ring_attention(q, k, v, kv_pages, layer, plan, scale=scale, soft_cap=soft_cap, sinks=sinks, local=local)
    if backend != "mosaic_tpu":
        raise ValueError(f"{backend=} is none of mosaic_tpu, xla")
    if local is not None:
        raise ValueError("mosaic_tpu attends inside its one kernel and takes no local attention; backend='xla' does")
    out, kv_pages, _ = mosaic_tpu.ring_attention(
        q, k, v, kv_pages, layer, plan, scale=scale, soft_cap=soft_cap, sinks=sinks, interpret=interpret)
    return out, kv_pages
