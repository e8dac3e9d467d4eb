"""Which drafts a step accepts.

Every position of a row, after its last known token and after each of its drafts, gets the token that sampling would
give there without speculation: the same options, seed and output index. A draft is accepted where it equals the token
sampled after its parent. For drafts that were chosen, not drawn, this is exact rejection sampling (Leviathan et al.
2023; per node of a tree as in EAGLE): a draft x is accepted with probability p(x), siblings share out the rest, and
what is sampled instead has the distribution p without them. So a drafter never changes what comes out, only how soon.

Axis letters: S rows, T tokens, of one data group; K drafts, J = K + 1 positions of a row: the last known token, then
the drafts; C words.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32


class DraftRows(NamedTuple):
    """As packed. A row's drafts are its last tokens."""

    number: Int[Array, " S"]  # of drafts
    following: Int[Array, " S"]  # the known token after the row's last, where it does not sample
    parents: Int[Array, "S K"] | None  # a draft's parent, -1: the last known token; None: each follows the one before


class Positions(NamedTuple):
    """Where a row is sampled. `ancestors`: the drafts on the way to a position, its own included."""

    token: Int[Array, "S J"]  # index in T; beyond the row's drafts that of its last one
    drafts: Int[Array, "S K"]  # their ids
    used: Bool[Array, "S K"]
    parents: Int[Array, "S K"]  # positions: 0 is the last known token
    ancestors: Bool[Array, "S J K"]

    @property
    def depth(self) -> Int[Array, "S J"]:
        """Drafts before the token sampled there."""
        return self.ancestors.sum(-1, dtype=jnp.int32)


class Accepted(NamedTuple):
    path: Int[Array, "S J"]  # positions: 0, then those of the accepted drafts; what follows them means nothing
    number: Int[Array, " S"]  # of accepted drafts
    kept: Int[Array, " S"]  # of them from the first on, those that are at their place in the row

    def of_path(self, x: Array) -> Array:
        """[S, J, ...] by position to the same along the path."""
        return jnp.take_along_axis(x, self.path.reshape(*self.path.shape, *[1] * (x.ndim - 2)), axis=1)

    @property
    def is_on_path(self) -> Bool[Array, "S J"]:
        return jnp.arange(self.path.shape[1]) <= self.number[:, None]


def positions_of(drafts: DraftRows | None, tokens: Int[Array, " T"], cu_q_lens: Int[Array, " S+1"], num_drafts: int
                 ) -> Positions:  # fmt: skip
    """drafts: of num_drafts, or None where that is 0."""
    last, rows = jnp.maximum(cu_q_lens[1:] - 1, 0), len(cu_q_lens) - 1
    if drafts is None:
        nothing = jnp.zeros((rows, 0), jnp.int32)
        return Positions(last[:, None], nothing, nothing.astype(bool), nothing, jnp.zeros((rows, 1, 0), bool))
    offset = jnp.arange(num_drafts + 1, dtype=jnp.int32)
    token = jnp.minimum((last - drafts.number)[:, None] + offset, last[:, None])
    used = offset[:-1] < drafts.number[:, None]
    return Positions(token, tokens[token[:, 1:]], used, *_family(drafts.parents, rows, num_drafts))


def _family(parents: Int[Array, "S K"] | None, rows: int, num_drafts: int):
    """(parents as positions, ancestors)."""
    shape = (rows, num_drafts + 1, num_drafts)
    if parents is None:
        chain = jnp.arange(num_drafts, dtype=jnp.int32)
        before = chain < jnp.arange(num_drafts + 1)[:, None]
        return jnp.broadcast_to(chain, (rows, num_drafts)), jnp.broadcast_to(before, shape)

    def add(draft, ancestors):
        of_parent = jnp.take_along_axis(ancestors, (parents[:, draft] + 1)[:, None, None], axis=1)[:, 0]
        return ancestors.at[:, draft + 1].set(of_parent | (jnp.arange(num_drafts) == draft))

    return parents + 1, lax.fori_loop(0, num_drafts, add, jnp.zeros(shape, bool))


def accept(sampled: Int[Array, "S J"], positions: Positions) -> Accepted:
    """Follows the drafts that equal what was sampled after their parents."""
    drafts, used, parents = positions.drafts, positions.used, positions.parents
    if not drafts.shape[1]:
        return accept_first(jnp.zeros(len(sampled), jnp.int32), 1)

    def step(carry, _):
        at, alive = carry
        wanted = jnp.take_along_axis(sampled, at[:, None], axis=1)
        fits = used & (parents == at[:, None]) & (drafts == wanted)
        alive &= fits.any(1)
        at = jnp.where(alive, fits.argmax(1).astype(jnp.int32) + 1, at)
        return (at, alive), (at, alive)

    first = jnp.zeros(len(sampled), jnp.int32), jnp.ones(len(sampled), bool)
    _, (path, alive) = lax.scan(step, first, None, length=drafts.shape[1])
    path = jnp.concatenate([first[0][None], path]).T
    number = alive.sum(0, dtype=jnp.int32)
    return Accepted(path, number, kept_of(path, number))


def kept_of(path: Int[Array, "S J"], number: Int[Array, " S"]) -> Int[Array, " S"]:
    """See `Accepted`."""
    step = jnp.arange(1, path.shape[1], dtype=jnp.int32)
    in_place = (path[:, 1:] == step) & (step <= number[:, None])
    return jnp.cumprod(in_place, axis=1, dtype=jnp.int32).sum(1)


def accept_first(count: Int[Array, " S"], num_sampled: int) -> Accepted:
    """The first drafts of chains."""
    path = jnp.broadcast_to(jnp.arange(num_sampled, dtype=jnp.int32), (len(count), num_sampled))
    return Accepted(path, count, count)


def tree_mask(positions: Positions, drafts: DraftRows, cu_q_lens: Int[Array, " S+1"], by_index: Int[Array, " T"],
              words: int) -> tuple[UInt32[Array, "T C"], Int[Array, " T"]]:  # fmt: skip
    """What each token sees of its row, as ragged paged attention wants it, and its position: a draft's follows its
    parent's. by_index: positions as they would be in a chain. Rows of more than 32 C tokens must have no drafts."""
    num_tokens, num_rows = len(by_index), len(drafts.number)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], token, side="right"), num_rows - 1)
    index = token - cu_q_lens[row]
    known = (cu_q_lens[1:] - cu_q_lens[:-1] - drafts.number)[row]
    is_draft = (index >= known) & (token < cu_q_lens[-1])
    number = jnp.where(is_draft, index - known + 1, 0)  # among the row's positions
    ancestors = positions.ancestors[row, number]  # [T, K]
    bit = jnp.arange(32 * words, dtype=jnp.int32)
    draft = jnp.clip(bit - known[:, None], 0, ancestors.shape[1] - 1)
    sees = jnp.where(bit < known[:, None], bit <= index[:, None], jnp.take_along_axis(ancestors, draft, axis=1))
    sees &= bit <= index[:, None]
    weights = jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)
    packed = (sees.reshape(num_tokens, words, 32) * weights).sum(-1, dtype=jnp.uint32)
    return packed, by_index - number + ancestors.sum(1, dtype=jnp.int32)


def settled_order(accepted: Accepted, positions: Positions, num_tokens: int) -> Int[Array, " T"]:
    """Which token's hidden state belongs at each place, once a row holds its accepted path only."""
    order = jnp.arange(num_tokens, dtype=jnp.int32)
    target = jnp.where(accepted.is_on_path, positions.token[:, :1] + jnp.arange(accepted.path.shape[1]), num_tokens)
    return order.at[target].set(accepted.of_path(positions.token), mode="drop")


def following_tokens(
    tokens: Int[Array, " T"], accepted: Accepted, positions: Positions, sampled: Int[Array, "S J"],
    samples: Bool[Array, " S"], goes_on: Bool[Array, " S"], drafts: DraftRows,
) -> Int[Array, " T"]:  # fmt: skip
    """The token after each settled one. sampled: along the path. goes_on: rows that have tokens and do not sample."""
    after = jnp.roll(tokens, -1)
    first, out = positions.token[:, 0], len(tokens)
    target = first[:, None] + jnp.arange(accepted.path.shape[1])
    target = jnp.where(accepted.is_on_path & samples[:, None], target, out)
    after = after.at[jnp.where(goes_on, first, out)].set(drafts.following, mode="drop")
    return after.at[target].set(sampled, mode="drop")


def allowed_tokens(words: Int[Array, "S W"], first: jax.Array | int, size: int) -> Bool[Array, "S v"]:
    """Whether each of `size` tokens from `first` on is allowed: bit i % 32 of word i // 32."""
    # Not by picking each token's word: XLA for TPUs wants more of its VMEM for such a gather than there is.
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1 == 1
    return lax.dynamic_slice_in_dim(bits.reshape(len(words), -1), first, size, axis=1)
