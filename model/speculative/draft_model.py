"""A smaller model of the same vocabulary guesses, token by token (Leviathan et al. 2023, arXiv 2211.17192).

It keeps keys and values of its own, in pages with the ids of the target's. Every step first feeds it what the step has
settled, so they are complete whatever was accepted, chunked, found in the prefix cache or computed again; then the
newest token, and each guess but the last. Guesses leave nothing behind: what they wrote is written again once settled.

Axis letters: T tokens, S rows, K drafts of a row, V vocab.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from model.batch import StepBatch
from model.build import Kernels
from model.sampling import SamplingRows
from model.speculative.common import SparePages, draft_chain, guess_batch
from model.speculative.drafter import Drafts, Settled
from model.speculative.draws import DraftSampling, draw_drafts
from model.transformer import Transformer


class DraftModel(nnx.Module):
    """See `model.speculative.drafter.DeviceDrafter`."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: Transformer, kernels: Kernels, spares: SparePages, *, max_drafts: int,
                 sampling: DraftSampling):  # fmt: skip
        """model: on the target's mesh, with pages of as many tokens as the target's."""
        self.model, self.kernels, self.spares = model, kernels, spares
        self.max_drafts, self.probabilistic = max_drafts, sampling == "probabilistic"
        self.sampling: DraftSampling = sampling

    def state_shapes(self, num_pages: int) -> jax.ShapeDtypeStruct:
        layout = self.kernels.kv_layout(self.model.config, self.spares.with_spares(num_pages))
        sharding = self.model.rules.sharding(layout.axes, layout.shape)
        return jax.ShapeDtypeStruct(layout.shape, layout.dtype, sharding=sharding)

    def propose(self, state: jax.Array, settled: Settled, batch: StepBatch, rows: SamplingRows, num_drafts: int,
                embedding: jax.Array, output_matrix: jax.Array) -> tuple[Drafts, jax.Array]:  # fmt: skip
        model, groups = self.model, self.spares.groups
        layout = self.kernels.kv_layout(model.config, 1)
        table = self.spares.table(batch, state.shape[layout.axes.index("pages")])
        # A row's rejected drafts are fed, too: they come after all that is settled, and later tokens overwrite them.
        _, pages, _ = model(state, batch._replace(page_table=table))

        def feed(pages: jax.Array, token: Int[Array, " S"], depth: Int[Array, ""]):
            guess = guess_batch(settled, batch, table, groups, token[:, None], first=depth)
            hidden, pages, _ = model(pages, guess)
            drawn, q = draw_drafts(self.sampling, model.rules, hidden, model.output_matrix, model.project, rows, depth)
            return pages, drawn, q

        pages, tokens, q = draft_chain(feed, pages, settled.token, num_drafts)
        return Drafts(tokens, probabilities=None if q is None else jnp.moveaxis(q, 0, 1)), pages
