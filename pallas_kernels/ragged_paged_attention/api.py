"""Ragged paged attention: one contract for every backend, and the choice of one.

A step holds T tokens of S rows; row s owns the tokens cu_q_lens[s] .. cu_q_lens[s + 1] - 1, which are the newest of its
kv_lens[s] tokens. Rows of one token come first.

Axis letters: T tokens, S rows, N query heads, K kv heads, H head dim, L layers, P pages, B tokens of a page, M pages of
the longest row, C words of a tree mask.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.ragged_paged_attention import mosaic_gpu, mosaic_tpu, xla
from pallas_kernels.ragged_paged_attention.layout import KVLayout, KVPages
from pallas_kernels.ragged_paged_attention.spec import AttentionSpec

__all__ = ["AttentionFn", "AttentionSpec", "Backend", "KVLayout", "KVPages", "choose_backend"]


class AttentionFn(Protocol):
    def __call__(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        kv_pages: KVPages,
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
        kv_bias: Float[Array, "L P K B"] | None = None,
        tree_mask: UInt32[Array, "T C"] | None = None,
    ) -> tuple[Float[Array, "T N H"], KVPages]:
        """Writes the new K and V into their pages, then attends causally. Returns (out, kv_pages); kv_pages is donated.

        kv_pages: laid out as the backend's `layout` says. page_table[s] lists the row's pages in order; entries beyond
        its length are not read. Page 0 is scratch. No other row has a page that a row writes to. What lies beyond a
        row's length, and in unused pages, may be anything, NaN included.
        distribution: (rows of one token, end of the rows that only prefill, rows in use). T == S: no row has more.
        The outputs of tokens that belong to no row are undefined.

        window: a token sees itself and the window - 1 tokens before it. soft_cap: cap * tanh(score / cap).
        sinks: one extra logit a head that takes attention and gives nothing (gpt-oss).
        kv_bias: added to the scores of a key, after the soft cap; for compacted caches. Of the tokens before this step
        only: new tokens have none, and whoever compacts zeroes what it gives back.
        tree_mask: for rows of 2 to 32 * C tokens, which of the row's new tokens a token sees instead of those before
        it: bit i of word i // 32 for the row's i-th. Its own bit must be set, those of later tokens must not be. It
        sees all that the row had before this step. Longer rows, and rows of one token, are causal.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation, fitted to a spec."""

    name: str
    spec: AttentionSpec
    attend: AttentionFn
    simulated: bool  # runs in Pallas' interpret mode on a CPU: exact and slow
    fallback: str | None  # why the device's own kernel was not taken, where "auto" could not take it

    def layout(self, num_layers: int, num_pages: int, num_kv_heads: int) -> KVLayout:
        """num_kv_heads: of all devices."""
        spec = self.spec
        return _MODULES[self.name].layout(
            num_layers=num_layers, num_pages=num_pages, page_size=spec.page_size, num_kv_heads=num_kv_heads,
            head_dim=spec.head_dim, dtype=spec.kv_dtype,
        )  # fmt: skip


_MODULES = {"mosaic_tpu": mosaic_tpu, "mosaic_gpu": mosaic_gpu, "xla": xla}
_PLATFORM = {"mosaic_tpu": "tpu", "mosaic_gpu": "gpu"}


def choose_backend(name: str, spec: AttentionSpec, device: Any) -> Backend:
    """`name` is a backend or "auto": the jax device's kernel where it supports the spec, else "xla".

    A kernel asked for by name on a CPU is simulated. Raises ValueError with what is missing.
    """
    fallback = None
    if name == "auto":
        name = {"tpu": "mosaic_tpu", "gpu": "mosaic_gpu"}.get(device.platform, "xla")
        if (missing := _MODULES[name].unsupported(spec, device.device_kind)) is not None:
            name, fallback = "xla", f"{name}: {missing}"
    if name not in _MODULES:
        raise ValueError(f"attention backend {name!r} is not one of auto, {', '.join(_MODULES)}")
    platform = _PLATFORM.get(name)
    if platform not in (None, device.platform) and device.platform != "cpu":
        raise ValueError(f"attention backend {name!r} runs on {platform} (simulated on cpu), not on {device.platform}")
    simulated = platform is not None and device.platform == "cpu"
    kind = None if simulated else device.device_kind
    if (missing := _MODULES[name].unsupported(spec, kind)) is not None:
        raise ValueError(f"attention backend {name!r}: {missing}")
    attend = _MODULES[name].ragged_paged_attention
    return Backend(name=name, spec=spec, attend=partial(attend, interpret=True) if simulated else attend,
                   simulated=simulated, fallback=fallback)  # fmt: skip
