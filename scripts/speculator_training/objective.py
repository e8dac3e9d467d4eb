"""What is minimized, and what is measured: drafts against the target's distributions, and against what it wrote.

Axis letters: B sequences, L tokens of one, N = B L, D model dim, V vocab, d tokens that may be drafted, k drafts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from scripts.speculator_training.batches import Batch, ahead
from scripts.speculator_training.method import Frozen, Method, Params, Target

DECAY = 0.8  # of a draft's weight with every draft before it, as in EAGLE-3's code
AT_ONCE = 256  # rows of logits of the whole vocabulary


def loss(params: Params, frozen: Frozen, batch: Batch, method: Method, target: Target) -> jax.Array:
    """Cross entropy with the target's distribution over the tokens that may be drafted. Left out: drafts of what
    follows the text, and those where the target's likeliest token may not be drafted."""
    rows, (B, L) = frozen.output[frozen.drafted], batch.tokens.shape
    hidden = batch.hidden.astype(rows.dtype).reshape(B * L, -1)
    wanted = jax.nn.softmax(target.project(rows, hidden)).reshape(B, L, -1)
    has_next = jnp.arange(L) < batch.lens[:, None] - 1
    may_be_drafted = jnp.zeros(frozen.output.shape[0], bool).at[frozen.drafted].set(True)
    usable = has_next & may_be_drafted[batch.best]
    total, weights = jnp.zeros(()), 0.0
    for i, states in enumerate(method.states(params, frozen, batch)):
        counts = (batch.drafted & ahead(usable, 1 + i)).reshape(-1)
        logits = method.logits(params, rows, states.reshape(B * L, -1))
        of_token = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(ahead(wanted, 1 + i).reshape(logits.shape) * logits, -1)
        mean = jnp.sum(jnp.where(counts, of_token, 0)) / jnp.maximum(jnp.sum(counts), 1)
        total, weights = total + DECAY**i * mean, weights + DECAY**i
    return total / weights


@partial(jax.jit, static_argnums=(3,))
def ranks(params: Params, frozen: Frozen, batch: Batch, method: Method
          ) -> tuple[Int[Array, "k B L"], Bool[Array, "B L"]]:  # fmt: skip
    """At which place each draft had what the text has there, 0 being the one that is drafted; and the positions where
    the text goes on for all drafts. What comes before a draft is taken from the text: the same as long as drafts are
    right, and after a wrong one nothing counts."""
    rows, (B, L) = frozen.output[frozen.drafted], batch.tokens.shape
    index = jnp.full(frozen.output.shape[0], -1).at[frozen.drafted].set(jnp.arange(len(frozen.drafted)))
    found = []
    for i, states in enumerate(method.states(params, frozen, batch)):
        written = index[ahead(batch.tokens, 2 + i)].reshape(-1)

        def place(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
            states, written = inputs
            logits = method.logits(params, rows, states[None])[0]
            return jnp.where(written < 0, len(rows), jnp.sum(logits > logits[written]))

        flat = states.reshape(B * L, -1)
        found.append(jax.lax.map(place, (flat, written), batch_size=AT_ONCE).reshape(B, L))
    goes_on = jnp.arange(L) + 1 + method.depth < batch.lens[:, None]
    return jnp.stack(found), batch.drafted & goes_on


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """positions: how many were measured. accepted: of each draft, how often it is accepted if all before it are.
    length: tokens a step of the target, its own one counted, of steps from the first position on (few of them are where
    drafts are easy). accuracies [k][rank]: how often each choice is right."""

    positions: int
    accepted: list[float]
    length: float
    accuracies: list[list[float]]


def acceptance(params: Params, frozen: Frozen, batches: Iterable[Batch], method: Method, num_ranks: int = 8
               ) -> Acceptance:  # fmt: skip
    measured = [tuple(map(np.asarray, ranks(params, frozen, batch, method))) for batch in batches]
    places = np.concatenate([found[:, counts] for found, counts in measured], axis=1)
    walks = [_walk(found[:, row], counts[row]) for found, counts in measured for row in range(len(counts))]
    steps, tokens = np.sum(walks, axis=0)
    right = np.cumprod(places == 0, axis=0).sum(axis=1)  # [k], steps that accept so many drafts and more
    before = np.array([places.shape[1], *right[:-1]])
    return Acceptance(
        positions=places.shape[1],
        accepted=[float(share) for share in right / np.maximum(before, 1)],
        length=float(tokens / max(steps, 1)),
        accuracies=[[float(np.mean(draft == rank)) for rank in range(num_ranks)] for draft in places],
    )


def _walk(places: Int[np.ndarray, "k L"], counts: Bool[np.ndarray, " L"]) -> tuple[int, int]:
    """Steps through one sequence and the tokens that they give. counts: one run of positions, perhaps none."""
    accepted = np.cumprod(places == 0, axis=0).sum(axis=0)
    steps, tokens, at = 0, 0, int(counts.argmax())
    while at < len(counts) and counts[at]:
        given = 1 + int(accepted[at])
        steps, tokens, at = steps + 1, tokens + given, at + given
    return steps, tokens
