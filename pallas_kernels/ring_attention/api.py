"""Ring attention over paged KV that is sharded over a mesh axis: one contract for every backend, and the choice of one.

The tokens of a sequence, cached and new ones, are spread over the D devices of a `context` axis. Each device keeps the
pages of its own tokens in its own pool, so the room for context grows with the axis. All functions here are called
inside `shard_map(..., check_vma=False)` over that axis; all arrays are the device's own part. A prefill step:

    slot_positions = write_positions(slot_positions, page_table, kv_lens, cu_q_lens, positions)            once a step
    plan = ring_plan(slot_positions, page_table, kv_lens, cu_q_lens, positions, ...)       once a step and window size
    out, kv_pages = backend.attend(q, k, v, kv_pages, layer, plan, scale=...)                              every layer

and a decode step, where every device has all rows' queries and one of them keeps the new token:

    slot_positions = write_decode_positions(slot_positions, page_table, kv_lens, positions, owned)         once a step
    out, kv_pages = context_decode_attention(q, k, v, kv_pages, layer, slot_positions, ...)                every layer

`lay_out` says on the host which tokens go where. Masks come from the true positions only, so any layout is right.

Axis letters: T new tokens of one device, S rows, N query heads, K kv heads, H head dim.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from pallas_kernels.devices import device_of_kind
from pallas_kernels.ragged_paged_attention.layout import KVPages
from pallas_kernels.ragged_paged_attention.spec import AttentionSpec
from pallas_kernels.ragged_paged_attention.xla import unsupported as unsupported_numbers
from pallas_kernels.ring_attention import mosaic_tpu, xla
from pallas_kernels.ring_attention.config import Problem, RingConfig, choose_config, xla_config
from pallas_kernels.ring_attention.decode import context_decode_attention, write_decode_positions
from pallas_kernels.ring_attention.layout import Layout, RingBatch, lay_out, owners, unmasked_pairs
from pallas_kernels.ring_attention.plan import (
    Positions,
    RingPlan,
    StoredPositions,
    StripedPositions,
    ring_plan,
    write_positions,
)
from pallas_kernels.ring_attention.striped import (
    MAX_CHUNKS,
    Order,
    Rows,
    chunks,
    decode_rows,
    shared_plan,
    spread_order,
    spread_plan,
    tokens_needed,
)
from pallas_kernels.ring_attention.xla import LocalAttention

__all__ = [
    "MAX_CHUNKS", "AttentionSpec", "Backend", "Layout", "LocalAttention", "Order", "Positions", "RingBatch",
    "RingConfig", "RingFn", "RingPlan", "Rows", "StoredPositions", "StripedPositions", "choose_backend", "chunks",
    "context_decode_attention", "decode_rows", "lay_out", "owners", "ring_plan", "shared_plan", "spread_order",
    "spread_plan", "tokens_needed", "unmasked_pairs", "write_decode_positions", "write_positions", "xla_config",
]  # fmt: skip


class RingFn(Protocol):
    def __call__(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        kv_pages: KVPages,
        layer: Int[Array, ""],
        plan: RingPlan,
        *,
        scale: float,
        soft_cap: float | None = None,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "T N H"], KVPages]:
        """Writes the new K and V into this device's pages, then attends causally to the rows' tokens on all devices.

        Returns (out, kv_pages); kv_pages is donated. Padding tokens get zeros. plan: from `ring_plan`, with the axis,
        the window and the block sizes. Rows own the pages they write to. What lies beyond a row's length, and in unused
        pages, may be anything, NaN included. soft_cap: cap * tanh(score / cap). sinks: one extra logit a head that
        takes attention and gives nothing.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation, fitted to a spec."""

    name: str
    spec: AttentionSpec
    attend: RingFn
    shared: RingFn  # where all devices have all tokens: for a plan of `shared_plan`
    tiles_decode: bool  # rows of one token go through `shared` too; otherwise through `context_decode_attention`
    simulated: bool  # runs in Pallas' interpret mode on a CPU: exact and slow
    fallback: str | None  # why the device's own kernel was not taken, where "auto" could not take it
    device_kind: str

    def config(
        self, *, num_tokens: int, num_rows: int, row_pages: int, devices: int, row_dim: int | None = None,
        side_by_side: bool = False,
    ) -> RingConfig:
        """Block sizes for T tokens of S rows and M pages of the longest row, all of one device; for `ring_plan`.

        row_dim, side_by_side: as in KVLayout. ValueError if nothing fits the chip's memory.
        """
        spec = self.spec
        if self.name == "xla" or self.simulated:
            return xla_config(spec.page_size)
        problem = Problem(
            num_tokens=num_tokens, num_rows=num_rows, row_pages=row_pages, num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads, row_dim=row_dim or spec.head_dim, page_size=spec.page_size, devices=devices,
            dtype=str(spec.dtype), kv_dtype=str(spec.kv_dtype), side_by_side=side_by_side,
        )  # fmt: skip
        return choose_config(problem, device_of_kind(self.device_kind))


def choose_backend(name: str, spec: AttentionSpec, device: Any, *, local: LocalAttention | None = None) -> Backend:
    """`name`: mosaic_tpu, xla, or "auto", the TPU kernel on a TPU where it supports the spec and else "xla".

    mosaic_tpu on a CPU is simulated. local: the attention within a step of "xla"; by default its own. Raises ValueError
    with what is missing.
    """
    fallback = None
    if name == "auto":
        name = "mosaic_tpu" if device.platform == "tpu" and local is None else "xla"
        if name == "mosaic_tpu" and (missing := mosaic_tpu.unsupported(spec, device.device_kind)) is not None:
            name, fallback = "xla", f"mosaic_tpu: {missing}"
    if name == "xla":
        if (missing := unsupported_numbers(spec, None)) is not None:
            raise ValueError(f"ring attention backend {name!r}: {missing}")
        attend, shared = (partial(f, local=local) for f in (xla.ring_attention, xla.shared_attention))
        return Backend(name=name, spec=spec, attend=attend, shared=shared, tiles_decode=False, simulated=False,
                       fallback=fallback, device_kind=device.device_kind)  # fmt: skip
    if name != "mosaic_tpu":
        raise ValueError(f"ring attention backend {name!r} is not one of auto, mosaic_tpu, xla")
    if local is not None:
        raise ValueError("mosaic_tpu attends within its one kernel and takes no local attention; backend 'xla' does")
    if device.platform not in ("tpu", "cpu"):
        raise ValueError(f"ring attention backend {name!r} runs on tpu (simulated on cpu), not on {device.platform}")
    simulated = device.platform == "cpu"
    if (missing := mosaic_tpu.unsupported(spec, None if simulated else device.device_kind)) is not None:
        raise ValueError(f"ring attention backend {name!r}: {missing}")

    def attend_tpu(*args, **options):
        out, kv_pages, _ = mosaic_tpu.ring_attention(*args, interpret=simulated, **options)
        return out, kv_pages

    shared = partial(mosaic_tpu.shared_attention, interpret=simulated)
    return Backend(name=name, spec=spec, attend=attend_tpu, shared=shared, tiles_decode=True, simulated=simulated,
                   fallback=None, device_kind=device.device_kind)  # fmt: skip
