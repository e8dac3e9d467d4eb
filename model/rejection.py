"""Rejection sampling of drafts that were drawn from a known distribution (Leviathan et al. 2023, arXiv 2211.17192; Chen
et al. 2023, arXiv 2302.01318): what comes out has the target's distribution, whatever the drafter's is.

A draft x, drawn from q, is accepted with probability min(1, p(x) / q(x)). In place of the first that is not, a token of
norm(max(0, p - q)) is drawn; after drafts that all were, one of p. So a draft is accepted with probability
sum(min(p, q)), the most that is possible.

A draft, its acceptance and what replaces it must not share random numbers, so each has a stream of its own, made from
the row's seed. Nothing depends on the other rows. But where a row's drafts end does change what its seed gives: a token
that was drafted comes from other numbers than one that was not.

Axis letters: S rows, K drafts of a row, J = K + 1 places where the target gives a distribution, v tokens of this
device's slice of the vocabulary (all, on one device), w: v in lanes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from model.sampling import SamplingFlags, SamplingRows, chances, in_lanes, race, shaped_weights
from model.vocabulary import Vocabulary

# What a seed's key is folded with. Output indices, which are folded in too, never reach these.
_DRAFT, _ACCEPT = 0xFFFFFFFF, 0xFFFFFFFE


class Verdict(NamedTuple):
    accepted: Int[Array, " S"]  # drafts, from the first on
    token: Int[Array, " S"]  # what follows them


def draw_draft(logits: Float[Array, "S v"], depth: int | Int[Array, ""], rows: SamplingRows, flags: SamplingFlags,
               vocabulary: Vocabulary) -> tuple[Int[Array, " S"], Float[Array, "S v"]]:  # fmt: skip
    """A draft of each row and the distribution that it was drawn from: the drafter's logits under the row's
    temperature, top_k, top_p and min_p. Of a greedy row the best token, and zeros but for it.

    rows.output_index: of the row's first draft; depth: how many drafts there are before this one.
    """
    most, best = vocabulary.best(logits)
    only_best = (jnp.arange(logits.shape[1]) + vocabulary.first == best[:, None]).astype(logits.dtype)

    def draw():
        weights = shaped_weights(logits, most, rows, flags, vocabulary)
        token = race(weights, _stream(_at(rows, depth), _DRAFT), vocabulary)
        weights = weights.reshape(len(weights), -1)[:, : logits.shape[1]]
        drawn = rows.temperature > 0
        q = weights / vocabulary.sum(weights.sum(-1))[:, None]
        return jnp.where(drawn, token, best), jnp.where(drawn[:, None], q, only_best)

    return lax.cond(flags.random, draw, lambda: (best, only_best))


def reject(weights: Float[Array, "S J v"], best: Int[Array, "S J"], drafts: Int[Array, "S K"],
           q: Float[Array, "S K v"], num_drafts: Int[Array, " S"], rows: SamplingRows, vocabulary: Vocabulary
           ) -> Verdict:  # fmt: skip
    """weights: what the target's distribution is proportional to at each place, after all options; best: its best
    token, which is all that counts in a greedy row. num_drafts: of each row, the others are padding.

    rows.output_index: of the row's first draft. Three collectives.
    """
    S, K = drafts.shape
    place, mine = vocabulary.here(drafts)

    def at_drafts(x: Float[Array, "S K v"]) -> Float[Array, "S K"]:
        return jnp.where(mine, jnp.take_along_axis(x, place[:, :, None], axis=-1)[:, :, 0], 0)

    sums = vocabulary.sum(jnp.concatenate([weights.sum(-1), at_drafts(weights[:, :K]), at_drafts(q)], axis=1))
    total, w_x, q_x = sums[:, : K + 1], sums[:, K + 1 : 2 * K + 1], sums[:, 2 * K + 1 :]
    p_x = w_x / total[:, :K]
    chance = jnp.stack([chances(_stream(_at(rows, i), _ACCEPT), jnp.uint32(0)) for i in range(K)], axis=1)
    accepts = (chance * q_x <= p_x) & (p_x > 0)  # a chance may be 1, never 0
    greedy = rows.temperature <= 0
    accepts = jnp.where(greedy[:, None], drafts == best[:, :K], accepts) & (jnp.arange(K) < num_drafts[:, None])
    accepted = jnp.cumprod(accepts, axis=1, dtype=jnp.int32).sum(1)

    row = jnp.arange(S)
    p = weights[row, accepted] / total[row, accepted][:, None]
    left = jnp.where((accepted < num_drafts)[:, None], p - q[row, jnp.minimum(accepted, K - 1)], p)
    left = jnp.maximum(left, 0)
    # Nothing is left where p = q but for rounding, which then rejected the draft.
    left = jnp.where(vocabulary.sum(left.sum(-1))[:, None] > 0, left, p)
    drawn = race(in_lanes(left, fill=0), _at(rows, accepted), vocabulary)
    return Verdict(accepted, jnp.where(greedy, best[row, accepted], drawn))


def _at(rows: SamplingRows, depth: int | Int[Array, "..."]) -> SamplingRows:
    return rows._replace(output_index=rows.output_index + depth)


def _stream(rows: SamplingRows, stream: int) -> SamplingRows:
    """The same rows with other random numbers."""

    def of_seed(seed: Int[Array, " 2"]) -> Int[Array, " 2"]:
        key = jax.random.wrap_key_data(lax.bitcast_convert_type(seed, jnp.uint32), impl="threefry2x32")
        return lax.bitcast_convert_type(jax.random.bits(jax.random.fold_in(key, jnp.uint32(stream)), (2,)), jnp.int32)

    return rows._replace(seed=jax.vmap(of_seed)(rows.seed))

