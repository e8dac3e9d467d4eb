"""How EAGLE's trees grow: level after level, each fed to the drafter together with all levels before it.

Axis letters: S rows, n tokens of a level, D model dim, k best tokens after a token.
"""

from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from model.speculative.trees import Candidates, DynamicTree, StaticTree


class Level(NamedTuple):
    """Tokens whose children are wanted."""

    tokens: Int[Array, "S n"]
    hidden: Float[Array, "S n D"]  # what the drafter gave at each one's parent
    parents: Int[Array, "S n"]  # among all that were fed in earlier levels, -1: what the tree hangs on


class Best(NamedTuple):
    """What may follow each of n tokens."""

    values: Float[Array, "S n k"]  # log-probabilities, falling
    tokens: Int[Array, "S n k"]
    hidden: Float[Array, "S n D"]  # what the drafter gave at the token


class Feed(Protocol):
    def __call__(self, level: Level) -> Best:
        """Remembers the level: later ones may see it."""
        ...


def grow_dynamic(tree: DynamicTree, depth: int, root: Best, feed: Feed) -> Candidates:
    """All tokens that are met on so many levels. root: of the last known token, n = 1."""
    k = tree.top_k
    values, tokens = root.values[:, 0, :k], root.tokens[:, 0, :k]
    found = [Candidates(tokens, values, jnp.full(tokens.shape, -1, jnp.int32))]
    level = Level(tokens, jnp.repeat(root.hidden, k, axis=1), found[0].parents)
    places = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), tokens.shape)  # of the level's tokens among all met
    for number in range(1, depth):
        best = feed(level)
        met = k + (number - 1) * k * k
        children = (values[:, :, None] + best.values[..., :k]).reshape(len(tokens), -1)  # [S, k k]
        tokens = best.tokens[..., :k].reshape(children.shape)
        found.append(Candidates(tokens, children, jnp.repeat(places, k, axis=1)))
        values, chosen = lax.top_k(children, k)
        parent = chosen.astype(jnp.int32) // k
        hidden = jnp.take_along_axis(best.hidden, parent[:, :, None], axis=1)
        level = Level(jnp.take_along_axis(tokens, chosen, axis=1), hidden, (number - 1) * k + parent)
        places = met + chosen.astype(jnp.int32)
    return Candidates(*(jnp.concatenate(parts, axis=1) for parts in zip(*found, strict=True)))


def grow_static(tree: StaticTree, root: Best, feed: Feed) -> Candidates:
    """All its tokens. Values are 0: none is better than another."""
    parents, rank = tree.parents, [path[-1] for path in tree.paths]
    has_children, fed = set(parents), {-1: -1}  # the place of each token that was fed
    places, best, tokens = {-1: 0}, root, []  # the places in `best` of what comes before this level
    for depth in range(1, tree.depth + 1):
        level = tree.level(depth)
        tokens += [best.tokens[:, places[parents[i]], rank[i]] for i in level]
        inner = [i for i in level if i in has_children]
        if not inner:
            break
        hidden = jnp.stack([best.hidden[:, places[parents[i]]] for i in inner], axis=1)
        shape = (len(hidden), len(inner))
        before = jnp.broadcast_to(jnp.asarray([fed[parents[i]] for i in inner], jnp.int32), shape)
        best = feed(Level(jnp.stack([tokens[i] for i in inner], axis=1), hidden, before))
        places = {i: place for place, i in enumerate(inner)}
        fed |= {i: len(fed) - 1 + place for place, i in enumerate(inner)}
    found = jnp.stack(tokens, axis=1)
    of_rows = jnp.broadcast_to(jnp.asarray(parents, jnp.int32), found.shape)
    return Candidates(found, jnp.zeros(found.shape, jnp.float32), of_rows)


def num_fed(tree: DynamicTree | StaticTree) -> int:
    """Tokens of a row that the drafter is given in all."""
    if isinstance(tree, DynamicTree):
        return tree.top_k * (tree.depth - 1)
    return len(set(tree.parents) - {-1})
