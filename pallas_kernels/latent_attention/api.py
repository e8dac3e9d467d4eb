"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over pages: one contract, and the choice of a backend.

The absorbed form: the up-projections of keys and values are folded into the queries and the output by the model, so
that all heads attend to one shared row per token, of which the values are the first R numbers:

    score = (q_latent . latent + q_rope . rope) * scale        out = sum softmax(score) latent

A step is ragged as in `pallas_kernels.ragged_paged_attention.api`; a row's tokens, lengths and pages mean the same.

Axis letters: T tokens, S rows, N query heads, R latent numbers, E rope numbers, L layers, P pages, M pages of the
longest row; a page is [rows, numbers of a row] as the backend's layout says.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.backends import Choice, choose
from pallas_kernels.latent_attention import mosaic_gpu, mosaic_tpu, xla
from pallas_kernels.latent_attention.layout import LatentLayout
from pallas_kernels.latent_attention.spec import LatentSpec

__all__ = ["Choice", "LatentAttentionFn", "LatentBackend", "LatentLayout", "LatentSpec", "choose_backend"]


class LatentAttentionFn(Protocol):
    def __call__(
        self,
        q_latent: Float[Array, "T N R"],
        q_rope: Float[Array, "T N E"],
        latent: Float[Array, "T R"],
        rope: Float[Array, "T E"],
        kv_pages: Float[Array, "L P rows row"],
        layer: Int[Array, ""],
        page_table: Int[Array, "S M"],
        kv_lens: Int[Array, " S"],
        cu_q_lens: Int[Array, " S+1"],
        distribution: Int[Array, " 3"],
        *,
        scale: float,
        soft_cap: float | None = None,
        tree_mask: UInt32[Array, "T W"] | None = None,
    ) -> tuple[Float[Array, "T N R"], Float[Array, "L P rows row"]]:
        """Writes the new rows (latent, rope) into their pages, then attends causally. kv_pages is donated.

        q_latent: the queries without position, times the up-projection of keys. q_rope, rope: rotated. latent: after
        its norm. The model multiplies `out` by the up-projection of values.
        scale: of naive attention, (nope + rope head dim) ** -0.5 and whatever YaRN adds; not that of R.
        kv_pages, page_table, kv_lens, cu_q_lens, distribution, soft_cap, tree_mask: as of ragged paged attention.
        The outputs of tokens that belong to no row are undefined.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LatentBackend:
    """One implementation, fitted to a spec."""

    choice: Choice
    spec: LatentSpec
    attend: LatentAttentionFn

    def layout(self, num_layers: int, num_pages: int) -> LatentLayout:
        spec = self.spec
        return _MODULES[self.choice.name].layout(
            num_layers=num_layers, num_pages=num_pages, page_size=spec.page_size, latent_dim=spec.latent_dim,
            rope_dim=spec.rope_dim, dtype=spec.kv_dtype,
        )  # fmt: skip


_MODULES = {"mosaic_tpu": mosaic_tpu, "mosaic_gpu": mosaic_gpu, "xla": xla}


def choose_backend(name: str, spec: LatentSpec, device: Any) -> LatentBackend:
    """See `pallas_kernels.backends.choose`. Raises ValueError with what is missing."""
    unsupported = {backend: module.unsupported for backend, module in _MODULES.items()}
    choice = choose("latent attention", name, unsupported, spec, device)
    attend = _MODULES[choice.name].latent_attention
    return LatentBackend(
        choice=choice, spec=spec, attend=partial(attend, interpret=True) if choice.simulated else attend
    )
