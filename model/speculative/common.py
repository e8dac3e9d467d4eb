"""What drafters with K/V of their own share: where their guesses lie, and steps that feed guesses.

A drafter's pages have the ids of the target's, so that whatever holds of a sequence's tokens for the target holds for
the drafter. But its guesses go beyond the tokens of a step, where the sequence may have no page yet: each row has spare
pages for them, which nobody else reads and which mean nothing after the step.

Axis letters: T tokens, S rows, of all data groups; G data groups, M pages of the longest row, N guesses of a row that
are fed at once, C words of a tree mask, k best tokens, V vocab, D model dim, K drafts of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from model.batch import StepBatch
from model.speculative.drafter import Drafts, Settled
from model.vocabulary import Vocabulary, vocabulary_of
from sharding.rules import AxisRules

State = TypeVar("State")


@dataclass(frozen=True, kw_only=True)
class SparePages:
    """rows: of a data group, at most; guesses: of a row, at most; page_size: tokens."""

    rows: int
    guesses: int
    page_size: int
    groups: int

    @property
    def of_row(self) -> int:
        """The first guess may be the last token of a page, or the first."""
        return -(-self.guesses // self.page_size)

    def with_spares(self, num_pages: int) -> int:
        """num_pages: the target's. Of all groups, as is what this returns."""
        return num_pages + self.groups * self.rows * self.of_row

    def table(self, batch: StepBatch, num_pages: int) -> Int[Array, "S M+"]:
        """The step's page table, with each row's spare pages after the pages that it has. num_pages: of the drafter,
        of all groups."""
        first = num_pages // self.groups - self.rows * self.of_row
        num_rows, most = batch.page_table.shape
        row = jnp.arange(num_rows, dtype=jnp.int32) % (num_rows // self.groups)
        has = -(-batch.kv_lens // self.page_size)[:, None]
        place = jnp.arange(most + self.of_row, dtype=jnp.int32)
        spare = jnp.clip(place - has, 0, self.of_row - 1)
        table = jnp.pad(batch.page_table, ((0, 0), (0, self.of_row)))
        return jnp.where(place < has, table, first + row[:, None] * self.of_row + spare)


def settled_batch(settled: Settled, batch: StepBatch, page_table: Int[Array, "S M+"], groups: int) -> StepBatch:
    """The step's settled tokens, each with the token that follows it as its token. Rows are as long as in the step:
    what comes after the settled tokens is computed for nothing, and overwritten by what follows."""
    num_rows, num_tokens = len(batch.kv_lens) // groups, len(batch.tokens) // groups

    def positions(cu_q_lens: Int[Array, " S+1"], of_tokens: Int[Array, " T"]) -> Int[Array, " T"]:
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all"), num_rows - 1)
        start = cu_q_lens[row]
        return jnp.where(token < cu_q_lens[-1], of_tokens[start] + token - start, 0)

    of_groups = batch.cu_q_lens.reshape(groups, -1), batch.positions.reshape(groups, -1)
    return batch._replace(tokens=settled.next_tokens, positions=jax.vmap(positions)(*of_groups).reshape(-1),
                          page_table=page_table, tree_mask=None)  # fmt: skip


def guess_batch(
    settled: Settled, batch: StepBatch, page_table: Int[Array, "S M+"], groups: int, tokens: Int[Array, "S N"], *,
    first: int | Int[Array, ""] = 0, depths: Int[Array, " N"] | None = None,
    tree_mask: UInt32[Array, "S N C"] | None = None,
) -> StepBatch:  # fmt: skip
    """N guesses of every row, the first of which goes `first` places after the row's settled tokens. depths: how many
    places after them each one's position is; None: as in the cache. tree_mask: as of ragged paged attention.

    Positions are counted from the row's last settled token, which is the step's at that place."""
    num_rows, num = tokens.shape
    row = jnp.arange(num_rows // groups + 1, dtype=jnp.int32)
    in_use = batch.distribution.reshape(groups, 3)[:, 2:]  # [G, 1]
    zero = jnp.zeros_like(in_use)
    distribution = [in_use, in_use, in_use] if num == 1 else [zero, zero, in_use]
    depths = jnp.arange(num, dtype=jnp.int32) + first if depths is None else depths
    starts = settled_positions(settled, batch, groups)
    return batch._replace(
        tokens=tokens.reshape(-1),
        positions=(starts[:, None] + depths).reshape(-1),
        page_table=page_table,
        kv_lens=settled.lens + first + num,
        cu_q_lens=(num * jnp.minimum(row, in_use)).reshape(-1),
        distribution=jnp.concatenate(distribution, axis=1).reshape(-1),
        tree_mask=None if tree_mask is None else tree_mask.reshape(num_rows * num, -1),
    )


def settled_positions(settled: Settled, batch: StepBatch, groups: int) -> Int[Array, " S"]:
    """The position after each row's last settled token. It differs from `lens` where a cache was compacted."""

    def after(cu_q_lens, positions, last):
        start = jnp.minimum(cu_q_lens[:-1], len(positions) - 1)
        return positions[start] + last - start + 1

    of_groups = (x.reshape(groups, -1) for x in (batch.cu_q_lens, batch.positions, settled.last))
    return jax.vmap(after)(*of_groups).reshape(-1)


def take_rows(rules: AxisRules, of_tokens: Float[Array, "T D"], where: Int[Array, " S"]) -> Float[Array, "S D"]:
    """where: among the tokens of a row's own data group, as `Settled.last`."""
    out = (len(where), of_tokens.shape[1])
    (taken,) = rules.map_over_shards(lambda x, where: (x[where],), (of_tokens, where),
                                     (("tokens", "embed"), ("rows",)), (("rows", "embed"),), (out,))  # fmt: skip
    return taken


def best_tokens(rules: AxisRules, hidden: Float[Array, "S D"], matrix: Float[Array, "V D"],
                project: Callable[[jax.Array, jax.Array], jax.Array], k: int
                ) -> tuple[Float[Array, "S k"], Int[Array, "S k"]]:  # fmt: skip
    """Log-probabilities and ids of each row's k best tokens, of equals the lower ids. matrix: any, with the axes
    ("vocab", "embed"). project: (its rows on a device, hidden) to float32 logits. One best token: its log-probability
    is 0, for nobody asks."""
    vocabulary = vocabulary_of(rules, matrix.shape[0])

    def best(hidden: Float[Array, "S D"], matrix: Float[Array, "v D"]) -> tuple[jax.Array, jax.Array]:
        logits = project(matrix, hidden)
        if k == 1:
            token = vocabulary.best(logits)[1][:, None]
            return jnp.zeros(token.shape, jnp.float32), token
        values, tokens, _ = vocabulary.top_k(logits, k, jnp.zeros(len(logits), jnp.int32))
        return values - log_sum(logits, vocabulary)[:, None], tokens

    axes, shape = ("rows", None), (len(hidden), k)
    values, tokens = rules.map_over_shards(best, (hidden, matrix), (("rows", "embed"), ("vocab", "embed")),
                                           (axes, axes), (shape, shape))  # fmt: skip
    return values, tokens.astype(jnp.int32)


def log_sum(logits: Float[Array, "S v"], vocabulary: Vocabulary) -> Float[Array, " S"]:
    """The logarithm of the sum of their exponentials over the whole vocabulary."""
    most = vocabulary.max(logits.max(-1))
    return most + jnp.log(vocabulary.sum(jnp.exp(logits - most[:, None]).sum(-1)))


def draft_chain(feed: Callable[[State, Int[Array, " S"], Int[Array, ""]], tuple[State, Int[Array, " S"], Any]],
                state: State, first: Int[Array, " S"], num_tokens: int
                ) -> tuple[State, Int[Array, "S K"], Any]:  # fmt: skip
    """Feeds `first`, then the token that comes out, and so on: num_tokens times in all.

    feed: (state, a token a row, how many were fed before) -> (state, the next token, anything else).
    Returns the state, the tokens that came out [S, num_tokens], and what else did, step after step [num_tokens, ...].
    """
    def step(carry: tuple[State, jax.Array], index: jax.Array):
        state, token, more = feed(carry[0], carry[1], index)
        return (state, token), (token, more)

    steps = jnp.arange(num_tokens, dtype=jnp.int32)
    (state, _), (tokens, more) = lax.scan(step, (state, first), steps)
    return state, tokens.T, more


def drawn_chain(feed: Callable[[State, Int[Array, " S"], Int[Array, ""]], tuple[State, Int[Array, " S"], Any]],
                state: State, first: tuple[Int[Array, " S"], Float[Array, "S V"] | None], num_drafts: int
                ) -> tuple[Drafts, State]:  # fmt: skip
    """`first`, then what `draft_chain` draws after it: tokens, and the distributions that they were drawn from where
    rejection will want them."""
    token, q = first
    state, tokens, more = draft_chain(feed, state, token, num_drafts - 1)
    tokens = jnp.concatenate([token[:, None], tokens], axis=1)
    if q is None:
        return Drafts(tokens), state
    return Drafts(tokens, probabilities=jnp.concatenate([q[:, None], jnp.moveaxis(more, 0, 1)], axis=1)), state
