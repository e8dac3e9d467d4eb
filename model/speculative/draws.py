"""How a drafter takes a token from its own distribution.

greedy: its best one. Where the target draws, it is accepted as often as the target draws that very token.
probabilistic: drawn, by random numbers of its own, and verified by rejection (`model.rejection`): accepted as often as
is possible. What a seed gives then depends on where a row's drafts end, and so on how many there are.
coupled: drawn by the random numbers that the target will draw with, and verified by equality, like a greedy draft. The
output is that of no speculation, bit for bit. It is accepted with probability sum over x of
1 / (sum over y of max(p(y) / p(x), q(y) / q(x))), at least (1 - d) / (1 + d) where rejection accepts 1 - d (Daliri,
Musco and Suresh 2024, arXiv 2408.07978): 0.58 instead of 0.60 for the textbook's p = (.6, .3, .1), q = (.2, .5, .3).

Axis letters: S rows, V vocab, v tokens of a device's slice of it, D model dim.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from model.rejection import draw_draft
from model.sampling import BANNED, SamplingFlags, SamplingRows, race, shaped_weights
from model.vocabulary import vocabulary_of
from sharding.rules import AxisRules

DraftSampling = Literal["greedy", "probabilistic", "coupled"]


def draw_drafts(
    kind: DraftSampling, rules: AxisRules, hidden: Float[Array, "S D"], matrix: Float[Array, "V D"],
    project: Callable[[jax.Array, jax.Array], jax.Array], rows: SamplingRows, depth: Int[Array, ""],
    known: Bool[Array, " V"] | None = None,
) -> tuple[Int[Array, " S"], Float[Array, "S V"] | None]:  # fmt: skip
    """A token of each row and, where it was drawn for rejection, the distribution that it came from.

    project: (rows of the matrix on a device, hidden) to float32 logits. rows.output_index: of a row's first draft;
    depth: how many drafts there are before this one. known: tokens that may be drafted; None: all."""
    vocabulary = vocabulary_of(rules, matrix.shape[0])
    flags = _flags(rows)

    def draw(hidden: jax.Array, matrix: jax.Array, of: SamplingRows, depth: jax.Array, flags: SamplingFlags, known):
        logits = project(matrix, hidden)
        logits = logits if known is None else jnp.where(known, logits, BANNED)
        if kind == "probabilistic":
            return draw_draft(logits, depth, of, flags, vocabulary)
        most, best = vocabulary.best(logits)
        if kind == "greedy":
            return best, ()
        then = of._replace(output_index=of.output_index + depth)

        def drawn() -> jax.Array:
            weights = shaped_weights(logits, most, of, flags, vocabulary)
            return jnp.where(of.temperature > 0, race(weights, then, vocabulary), best)

        return jax.lax.cond(flags.random, drawn, lambda: best), ()

    size = (len(hidden), matrix.shape[0])
    axes = ("rows", "vocab") if kind == "probabilistic" else ()
    token, probabilities = rules.map_over_shards(
        draw, (hidden, matrix, rows, depth, flags, known),
        (("rows", "embed"), ("vocab", "embed"), ("rows",), (), (), ("vocab",)),
        (("rows",), axes), (size[:1], size if axes else ()),
    )  # fmt: skip
    return token, probabilities if axes else None


def _flags(rows: SamplingRows) -> SamplingFlags:
    """Of all data groups: they take the same branches."""
    drawn = rows.temperature > 0
    on = dict(random=drawn.any(), top_k=(drawn & (rows.top_k > 0)).any(), top_p=(drawn & (rows.top_p < 1)).any())
    return SamplingFlags(*(on.get(name, jnp.zeros((), bool)) for name in SamplingFlags._fields))
