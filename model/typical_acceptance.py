"""Medusa's typical acceptance (Cai et al., arXiv 2401.10774, 3.3.1). It CHANGES THE DISTRIBUTION of what comes out.

A draft x is accepted if p(x) > min(epsilon, delta * exp(-H(p))), where p is the target's distribution after all options
of the request and H its entropy: whatever is not unlikely passes, however much more likely something else is. Of a tree
the longest accepted path counts, of equally long ones the likeliest. What follows the accepted drafts is the target's
best token, as in the published `medusa_generate`, also where there are no drafts: what a request gets must not depend
on when others leave time for speculation. So its tokens are not random at all, and neither seed nor `n` changes them.

Greedy rows are exact: a draft is accepted if it is the best token.

Axis letters: S rows, K drafts, J = K + 1 positions, R = S J, v tokens of this device's slice of the vocabulary, w: v in
lanes.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.sampling import SamplingRows
from model.verification import Accepted, Positions, kept_of
from model.vocabulary import Vocabulary

_UNLIKELY = -1e30  # a log-probability, finite


class Typical(NamedTuple):
    epsilon: float = 0.09  # posterior_threshold
    delta: float = 0.3  # posterior_alpha


def accept_typical(
    weights: Float[Array, "R w 128"], best: Int[Array, "S J"], positions: Positions, rows: SamplingRows,
    typical: Typical, vocabulary: Vocabulary,
) -> tuple[Int[Array, "S J"], Accepted]:  # fmt: skip
    """(the accepted drafts and the token after them, of each row). weights: what p is proportional to at each position;
    best: its best token. One collective."""
    S, K = positions.drafts.shape
    flat = weights.reshape(S, K + 1, -1)
    place, mine = vocabulary.here(positions.drafts)
    row = jnp.arange(S)
    of_draft = jnp.where(mine, flat[row[:, None], positions.parents, place], 0)
    log_weights = jnp.log(jnp.where(flat > 0, flat, 1))
    sums = vocabulary.sum(jnp.concatenate([flat.sum(-1), (flat * log_weights).sum(-1), of_draft], axis=1))
    total, of_logs, of_draft = jnp.split(sums, [K + 1, 2 * (K + 1)], axis=1)
    entropy = jnp.log(total) - of_logs / total  # [S, J]
    threshold = jnp.minimum(typical.epsilon, typical.delta * jnp.exp(-entropy))

    def at_parents(x: Array) -> Array:
        return jnp.take_along_axis(x, positions.parents, axis=1)

    chance = of_draft / at_parents(total)
    fits = jnp.where((rows.temperature > 0)[:, None], chance > at_parents(threshold),
                     positions.drafts == at_parents(best))  # fmt: skip
    fits &= positions.used
    likelihood = jnp.log(jnp.maximum(chance, jnp.finfo(jnp.float32).tiny))
    return _longest(fits, likelihood, best, positions)


def _longest(fits, likelihood, best, positions: Positions) -> tuple[Int[Array, "S J"], Accepted]:
    """Of the positions that are reached by drafts which all fit, the deepest, then the likeliest."""
    ancestors, depth = positions.ancestors, positions.depth
    reached = ~(ancestors & ~fits[:, None]).any(-1)  # [S, J]; the first position always is
    score = jnp.where(ancestors, likelihood[:, None], 0).sum(-1)
    count = jnp.where(reached, depth, 0).max(1)
    end = jnp.where(reached & (depth == count[:, None]), score, _UNLIKELY).argmax(1)
    on_path = jnp.take_along_axis(ancestors, end[:, None, None], axis=1)[:, 0]  # [S, K]
    step = jnp.arange(depth.shape[1], dtype=jnp.int32)
    at_step = on_path[:, None] & (depth[:, None, 1:] == step[:, None])  # [S, J, K]
    path = (jnp.where(at_step, step[1:], 0)).sum(-1, dtype=jnp.int32)
    accepted = Accepted(path, count, kept_of(path, count))
    drafts = jnp.pad(positions.drafts, ((0, 0), (1, 0)))  # by position
    following = jnp.roll(jnp.take_along_axis(drafts, path, axis=1), -1, axis=1)
    return jnp.where(step < count[:, None], following, accepted.of_path(best)), accepted
