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

from pallas_kernels.backends import Choice, choose
from pallas_kernels.ragged_paged_attention import mosaic_gpu, mosaic_tpu, xla
from pallas_kernels.ragged_paged_attention.layout import KVLayout, KVPages
from pallas_kernels.ragged_paged_attention.spec import AttentionSpec

__all__ = ["AttentionFn", "AttentionSpec", "Backend", "Choice", "KVLayout", "KVPages", "choose_backend"]


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
        chunk: int | None = None,
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

        window: a token sees itself and the window - 1 tokens before it. chunk: it sees those from cache index
        index // chunk * chunk on, its own chunk (Llama 4). soft_cap: cap * tanh(score / cap).
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

    choice: Choice
    spec: AttentionSpec
    attend: AttentionFn

    def layout(self, num_layers: int, num_pages: int, num_kv_heads: int) -> KVLayout:
        """num_kv_heads: of all devices."""
        spec = self.spec
        return _MODULES[self.choice.name].layout(
            num_layers=num_layers, num_pages=num_pages, page_size=spec.page_size, num_kv_heads=num_kv_heads,
            head_dim=spec.head_dim, dtype=spec.kv_dtype,
        )  # fmt: skip


_MODULES = {"mosaic_tpu": mosaic_tpu, "mosaic_gpu": mosaic_gpu, "xla": xla}


def choose_backend(name: str, spec: AttentionSpec, device: Any) -> Backend:
    """See `pallas_kernels.backends.choose`. Raises ValueError with what is missing."""
    unsupported = {backend: module.unsupported for backend, module in _MODULES.items()}
    choice = choose("attention", name, unsupported, spec, device)
    attend = _MODULES[choice.name].ragged_paged_attention
    return Backend(choice=choice, spec=spec, attend=partial(attend, interpret=True) if choice.simulated else attend)
