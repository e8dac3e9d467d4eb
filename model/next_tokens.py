"""What a step samples: of every row the drafts that it accepts, and the token after them.

Axis letters: S rows, K drafts, J = K + 1 positions, R = S J; V vocab, v tokens of this device's slice of it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from model.rejection import reject
from model.sampling import (
    SamplingFlags,
    SamplingRows,
    SamplingState,
    TokenLogprobs,
    at_positions,
    count_tokens,
    no_logprobs,
    race,
    shaped_logits,
    shaped_weights,
    token_logprobs,
)
from model.typical_acceptance import Typical, accept_typical
from model.verification import Accepted, Positions, accept, accept_first
from model.vocabulary import Vocabulary


class Sampled(NamedTuple):
    tokens: Int[Array, "S J"]  # the accepted drafts and the token after them; what follows means nothing
    accepted: Accepted
    logprobs: TokenLogprobs  # [S, J]; zeros unless asked for


def sample(
    logits: Float[Array, "R v"], rows: SamplingRows, positions: Positions, flags: SamplingFlags, state: SamplingState,
    drawn_from: Float[Array, "S K v"] | None = None, *, typical: Typical | None = None, num_logprobs: int,
    vocabulary: Vocabulary,
) -> tuple[Sampled, SamplingState]:  # fmt: skip
    """The next tokens of every row, and the state after counting them. drawn_from: the distributions of drafts, which
    are chains then; None: drafts were chosen. typical: accept drafts by this rule, which changes the distribution.

    Order of options, as in vLLM: bias, penalties, the grammar's mask, temperature, min_p, top_k, top_p.
    """
    num_rows, num_sampled = positions.token.shape
    every = at_positions(rows, positions)
    shaped = shaped_logits(logits, every, positions, flags, state, vocabulary)
    most, best = vocabulary.best(shaped)

    def by_row(x: Array) -> Array:
        return x.reshape(num_rows, num_sampled, *x.shape[1:])

    def verified(token: Int[Array, " R"]) -> tuple[Int[Array, "S J"], Accepted]:
        accepted = accept(by_row(token), positions)
        return accepted.of_path(by_row(token)), accepted

    def drawn() -> tuple[Int[Array, "S J"], Accepted]:
        weights = shaped_weights(shaped, most, every, flags, vocabulary)
        if typical is not None:
            return accept_typical(weights, by_row(best), positions, rows, typical, vocabulary)
        if drawn_from is None or not positions.drafts.shape[1]:
            return verified(jnp.where(every.temperature > 0, race(weights, every, vocabulary), best))
        weights = weights.reshape(num_rows, num_sampled, -1)[..., : logits.shape[1]]
        verdict = reject(weights, by_row(best), positions.drafts, drawn_from, positions.used.sum(1, dtype=jnp.int32),
                         rows, vocabulary)  # fmt: skip
        accepted = accept_first(verdict.accepted, num_sampled)
        drafts = jnp.pad(positions.drafts, ((0, 0), (0, 1)))
        last = jnp.arange(num_sampled) == verdict.accepted[:, None]
        return jnp.where(last, verdict.token[:, None], drafts), accepted

    tokens, accepted = lax.cond(flags.random, drawn, lambda: verified(best))
    counted = accepted.is_on_path & rows.samples[:, None]
    counts = lax.cond(
        flags.penalized,
        lambda counts: count_tokens(counts, tokens, counted, rows.slot, vocabulary),
        lambda counts: counts,
        state.output_counts,
    )

    def scored() -> TokenLogprobs:
        on_path = logits if num_sampled == 1 else accepted.of_path(by_row(logits)).reshape(logits.shape)
        return token_logprobs(on_path, tokens.reshape(-1), num_logprobs=num_logprobs, vocabulary=vocabulary)

    logprobs = lax.cond(flags.logprobs, scored, lambda: no_logprobs(len(logits), num_logprobs))
    return Sampled(tokens, accepted, jax.tree.map(by_row, logprobs)), state._replace(output_counts=counts)
