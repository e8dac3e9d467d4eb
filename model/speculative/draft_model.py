"""A smaller model of the same vocabulary guesses, token by token (Leviathan et al. 2023, arXiv 2211.17192).

It keeps keys and values of its own, in pages with the ids of the target's. Every step first feeds it what the step has
settled, so they are complete whatever was accepted, chunked, found in the prefix cache or computed again, with the
newest token behind; then each guess but the last. Guesses leave nothing behind: what they wrote is written again once
it is settled.

Axis letters: T tokens, S rows, K drafts of a row, D model dim, V vocab, M pages of the longest row.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.batch import StepBatch
from model.build import Kernels
from model.sampling import SamplingRows
from model.speculative.common import SparePages, drawn_chain, guess_batch, take_rows
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
        return self.kernels.kv_pages(self.model.rules, self.spares.with_spares(num_pages))

    def propose(self, state: jax.Array, settled: Settled, batch: StepBatch, rows: SamplingRows, num_drafts: int,
                embedding: jax.Array, output_matrix: jax.Array) -> tuple[Drafts, jax.Array]:  # fmt: skip
        model, groups = self.model, self.spares.groups
        layout = self.kernels.kv_layout(1)
        table = self.spares.table(batch, state.shape[layout.axes.index("pages")])

        def draw(hidden: Float[Array, "S D"], depth: int | Int[Array, ""]):
            return draw_drafts(self.sampling, model.rules, hidden, model.output_matrix, model.project, rows,
                               jnp.asarray(depth))  # fmt: skip

        step, newest = settled_and_newest(settled, batch, table, groups)
        hidden, pages, _ = model(state, step)
        first = draw(take_rows(model.rules, hidden, newest), 0)

        def feed(pages: jax.Array, token: Int[Array, " S"], depth: Int[Array, ""]):
            guess = guess_batch(settled, batch, table, groups, token[:, None], first=depth + 1)
            hidden, pages, _ = model(pages, guess)
            return pages, *draw(hidden, depth + 1)

        return drawn_chain(feed, pages, first, num_drafts)


def settled_and_newest(settled: Settled, batch: StepBatch, page_table: Int[Array, "S M+"], groups: int
                       ) -> tuple[StepBatch, Int[Array, " S"]]:  # fmt: skip
    """The step's settled tokens, and after those of each row its newest token. T + S tokens. Second: where in its data
    group each row's newest token is."""

    def of_group(tokens, positions, cu_q_lens, distribution, last, newest, lens):
        row, place = jnp.arange(len(last)), jnp.arange(len(tokens) + len(last), dtype=jnp.int32)
        in_use = distribution[2]
        count = jnp.where(row < in_use, last - cu_q_lens[:-1] + 2, 0).astype(jnp.int32)
        ends = jnp.cumsum(count, dtype=jnp.int32)
        of = jnp.minimum(jnp.searchsorted(ends, place, side="right", method="compare_all"), len(last) - 1)
        offset = place - (ends - count)[of]
        start = jnp.minimum(cu_q_lens[of], len(tokens) - 1)
        settled_token = tokens[jnp.minimum(start + offset, len(tokens) - 1)]
        return (
            jnp.where(offset == count[of] - 1, newest[of], settled_token),
            jnp.where(place < ends[-1], positions[start] + offset, 0),
            lens + (row < in_use),
            jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
            jnp.stack([jnp.zeros_like(in_use)] * 2 + [in_use]),
            jnp.maximum(ends - 1, 0),
        )

    given = (batch.tokens, batch.positions, batch.cu_q_lens, batch.distribution, settled.last, settled.token,
             settled.lens)  # fmt: skip
    of_groups = jax.vmap(of_group)(*(x.reshape(groups, -1) for x in given))
    tokens, positions, kv_lens, cu_q_lens, distribution, where = (x.reshape(-1) for x in of_groups)
    step = batch._replace(tokens=tokens, positions=positions, page_table=page_table, kv_lens=kv_lens,
                          cu_q_lens=cu_q_lens, distribution=distribution)  # fmt: skip
    return step, where
