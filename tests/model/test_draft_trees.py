"""Trees of drafts against a plain one that is grown node by node."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.speculative.growth import Best, Level, grow_dynamic, grow_static, num_fed
from model.speculative.trees import Candidates, DynamicTree, StaticTree, ancestors, depth_first, rerank, words

VOCAB, ROWS = 11, 3


def log_probs(paths: np.ndarray) -> np.ndarray:
    """Of what follows a path of tokens: fixed, and different for every path. The last axis is the path."""
    seeds = (np.asarray(paths, np.int64) + 1) @ (17 ** np.arange(np.asarray(paths).shape[-1])) % 9973
    logits = np.sin(seeds[..., None] * (np.arange(VOCAB) + 1.7)) * 3
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


class Toy:
    """A drafter whose hidden state is the path to a token, as numbers: what it gives is known without running it."""

    length = 8

    def best(self, hidden: jax.Array, k: int) -> Best:
        known = jax.pure_callback(lambda h: log_probs(h).astype(np.float32),
                                  jax.ShapeDtypeStruct((*hidden.shape[:2], VOCAB), jnp.float32), hidden)
        return Best(*jax.lax.top_k(known, k), hidden)

    def root(self, k: int) -> Best:
        return self.best(jnp.zeros((ROWS, 1, self.length)).at[:, 0, 0].set(jnp.arange(ROWS)), k)

    def feed(self, k: int):
        depth = iter(range(1, self.length))

        def feed(level: Level) -> Best:
            return self.best(level.hidden.at[:, :, next(depth)].set(level.tokens), k)

        return feed


def oracle(row: int, tree: DynamicTree, num: int) -> set[tuple[int, ...]]:
    """The paths of the drafts: plain Python over dictionaries."""
    start = [row] + [0] * (Toy.length - 1)
    values: dict[tuple[int, ...], float] = {}
    alive: list[tuple[int, ...]] = [()]
    for _ in range(tree.depth):
        children = []
        for path in alive:
            given = log_probs(np.array(start[:1] + list(path) + start[1 + len(path):]))
            for token in np.argsort(-given, kind="stable")[: tree.top_k]:
                children.append((*path, int(token)))
                values[children[-1]] = values.get(path, 0.0) + float(given[token])
        alive = sorted(children, key=lambda path: -values[path])[: tree.top_k]
    return set(sorted(values, key=lambda path: -values[path])[:num])


def paths_of(tokens: np.ndarray, parents: np.ndarray) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert -1 <= parent < len(found), "a token comes after its parent"
        found.append((*(found[parent] if parent >= 0 else ()), int(token)))
    return found


@pytest.mark.parametrize("top_k, depth, num", [(3, 4, 9), (1, 5, 5)])
def test_dynamic_tree_holds_the_best_paths_and_their_ancestors(top_k: int, depth: int, num: int) -> None:
    tree, toy = DynamicTree(top_k=top_k, depth=depth), Toy()

    @jax.jit
    def grow() -> tuple[Candidates, Candidates, Candidates]:
        met = grow_dynamic(tree, depth, toy.root(top_k), toy.feed(top_k))
        chosen = rerank(met, num)
        return met, chosen, depth_first(chosen, depth)

    met, chosen, ordered = grow()
    assert met.tokens.shape == (ROWS, tree.num_candidates)
    values, parents = np.asarray(met.values), np.asarray(met.parents)
    of_parent = np.where(parents < 0, 0.0, np.take_along_axis(values, np.maximum(parents, 0), 1))
    assert (values <= of_parent).all(), "no child is worth more than its parent"
    for row in range(ROWS):
        paths = paths_of(np.asarray(ordered.tokens)[row], np.asarray(ordered.parents)[row])
        assert set(paths) == oracle(row, tree, num) == set(paths_of(*map(lambda x: np.asarray(x)[row],
                                                                        (chosen.tokens, chosen.parents))))
        assert all(path[:-1] in {(), *paths} for path in paths)
        best = max((path for path in paths if len(path) == 1), key=lambda path: log_probs(
            np.array([row, 0, 0, 0, 0, 0, 0, 0]))[path[0]])
        assert paths[0] == best
        branch = [path for path in paths if path[:1] == paths[0]]
        assert paths[: len(branch)] == branch, "a branch stays together"


def test_equal_values_keep_ancestors() -> None:
    """A drafter that is sure gives its children the value of the parent."""
    tokens = jnp.arange(6)[None]
    sure = Candidates(tokens, jnp.zeros((1, 6)), jnp.array([[-1, -1, 0, 1, 2, 3]]))
    assert rerank(sure, 4).parents.tolist() == [[-1, -1, 0, 1]]
    impossible = sure._replace(values=jnp.full((1, 6), -jnp.inf))
    assert rerank(impossible, 3).parents.tolist() == [[-1, -1, 0]]


def test_static_tree_takes_each_rank_at_its_parent() -> None:
    tree = StaticTree.of([(1,), (0,), (1, 0), (0, 2), (0, 0), (0, 2, 1)])
    assert tree.paths == ((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 2, 1)) and tree.parents == (-1, -1, 0, 0, 1, 3)
    toy = Toy()
    most = tree.most_children
    found = jax.jit(lambda: grow_static(tree, toy.root(most), toy.feed(most)))()
    assert num_fed(tree) == 3
    for row in range(ROWS):
        paths = paths_of(np.asarray(found.tokens)[row], np.asarray(found.parents)[row])
        for ranks, path in zip(tree.paths, paths, strict=True):
            start = [row] + [0] * (Toy.length - 1)
            before = np.array(start[:1] + list(path[:-1]) + start[len(path):])
            assert np.argsort(-log_probs(before), kind="stable")[ranks[-1]] == path[-1]


@pytest.mark.parametrize("paths", [[], [(0, 1)], [(0,), (0,)]])
def test_trees_that_are_none_are_refused(paths: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="tree of drafts"):
        StaticTree.of(paths)


def test_words_are_the_ancestor_relation() -> None:
    rng = np.random.default_rng(0)
    parents = np.array([[rng.integers(-1, i) if i else -1 for i in range(70)] for _ in range(2)])
    depth = 70
    packed = np.asarray(words(ancestors(jnp.asarray(parents), depth)))
    assert packed.shape == (2, 70, 3)
    for row in range(2):
        for token in range(70):
            wanted, at = set(), token
            while at >= 0:
                wanted.add(at)
                at = parents[row, at]
            assert {i for i in range(96) if packed[row, token, i // 32] >> (i % 32) & 1} == wanted
