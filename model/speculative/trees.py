"""Trees of drafts: fixed ones, and EAGLE-2's, which grow where the drafter is sure (Li et al., arXiv 2406.16858).

The value of a token is the sum of the log-probabilities that the drafter gives to it and its ancestors. At every level
the k best tokens get k children each; of all that were met, the m best are drafted. No child is worth more than its
parent, and of equals the first counts, so the m best always hold their ancestors.

Everything has a fixed shape; tokens come after their parents.

Axis letters: S rows, n tokens of a row met, m drafted, N any number of a tree, C words of 32 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

Path = tuple[int, ...]


class Candidates(NamedTuple):
    """Level after level. parents: index among them, -1: what the tree hangs on."""

    tokens: Int[Array, "S n"]
    values: Float[Array, "S n"]
    parents: Int[Array, "S n"]


@dataclass(frozen=True)
class StaticTree:
    """paths of ranks, level after level: (0, 2) is the third best token after the best first one."""

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        if not self.paths:
            raise ValueError("a tree of drafts needs at least one path")
        seen: set[Path] = {()}
        for path in self.paths:
            if path[:-1] not in seen or path in seen or len(path) < max(map(len, seen)):
                raise ValueError(f"path {path} of a tree of drafts must come once, after its parent and shorter ones")
            seen.add(path)

    @staticmethod
    def of(paths: Sequence[Path]) -> "StaticTree":
        """In any order."""
        return StaticTree(tuple(sorted(map(tuple, paths), key=lambda path: (len(path), path))))

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @cached_property
    def parents(self) -> tuple[int, ...]:
        place = {path: index for index, path in enumerate(self.paths)} | {(): -1}
        return tuple(place[path[:-1]] for path in self.paths)

    def level(self, depth: int) -> tuple[int, ...]:
        """The tokens so many steps after the last known one."""
        return tuple(index for index, path in enumerate(self.paths) if len(path) == depth)

    @property
    def most_children(self) -> int:
        """Of the best tokens after a token, how many must be known."""
        return max(path[-1] for path in self.paths) + 1


@dataclass(frozen=True, kw_only=True)
class DynamicTree:
    top_k: int  # children of a token, and tokens of a level that get some
    depth: int  # levels

    def __post_init__(self) -> None:
        if self.top_k < 1 or self.depth < 1:
            raise ValueError(f"{self.top_k=} and {self.depth=} must be at least 1")

    @property
    def num_candidates(self) -> int:
        return self.top_k + (self.depth - 1) * self.top_k**2


def ancestors(parents: Int[Array, "S N"], depth: int) -> Bool[Array, "S N N"]:
    """For each token those on the way to it, itself included. depth: of the tree, or more."""
    num = parents.shape[1]
    own = jnp.broadcast_to(jnp.eye(num, dtype=bool), (len(parents), num, num))
    found = own
    for _ in range(depth - 1):
        of_parent = jnp.take_along_axis(found, jnp.maximum(parents, 0)[:, :, None], axis=1)
        found = own | (of_parent & (parents >= 0)[:, :, None])
    return found


def words(seen: Bool[Array, "S N N"]) -> UInt32[Array, "S N C"]:
    """What each token sees, as the tree mask of ragged paged attention."""
    num = seen.shape[-1]
    bits = jnp.pad(seen, ((0, 0), (0, 0), (0, -num % 32))).reshape(*seen.shape[:2], -1, 32)
    return (bits * (jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32))).sum(-1, dtype=jnp.uint32)


def rerank(candidates: Candidates, num: int) -> Candidates:
    """The best `num`, in the order in which they were met."""
    _, best = lax.top_k(candidates.values, num)
    best = jnp.sort(best, axis=1)
    tokens, values, parents = (jnp.take_along_axis(x, best, axis=1) for x in candidates)
    before = (best[:, None] < parents[:, :, None]).sum(-1, dtype=jnp.int32)
    return Candidates(tokens, values, jnp.where(parents < 0, -1, before))


def depth_first(tree: Candidates, depth: int) -> Candidates:
    """The same tree with every token followed by its first child's whole branch: where that is accepted, its K/V is in
    place already."""
    num = tree.parents.shape[1]
    above = ancestors(tree.parents, depth)  # [S, token, ancestor]
    sizes = above.sum(1)  # of the branch that each one begins
    place = jnp.arange(num)
    elder = (tree.parents[:, :, None] == tree.parents[:, None]) & (place < place[:, None])  # [S, token, sibling]
    skipped = (elder * sizes[:, None]).sum(-1)
    order = above.sum(-1) - 1 + (above * skipped[:, None]).sum(-1)  # where each token goes
    came_from = jnp.argsort(order, axis=1)
    tokens, values, parents = (jnp.take_along_axis(x, came_from, axis=1) for x in tree)
    moved = jnp.take_along_axis(order, jnp.maximum(parents, 0), axis=1)
    return Candidates(tokens, values, jnp.where(parents < 0, -1, moved).astype(jnp.int32))
