"""Trees of drafts as data: what is published hangs together, and what is built from accuracies is the best."""

import itertools

import numpy as np
import pytest

from serving.decoding.speculation.config import SpeculativeConfig
from serving.decoding.speculation.token_trees import PUBLISHED, from_accuracies

ACCURACIES = ((0.6, 0.2, 0.05), (0.5, 0.3), (0.4, 0.1))


def expected_tokens(paths) -> float:
    return sum(np.prod([ACCURACIES[head][rank] for head, rank in enumerate(path)]) for path in paths)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_trees_grow_from_their_start(name: str):
    paths = PUBLISHED[name]
    assert len(set(paths)) == len(paths) == 63 and paths[0] == (0,)
    assert all(path[:-1] in ((), *paths[:index]) for index, path in enumerate(paths))
    config = SpeculativeConfig.of({"method": "medusa", "model": "heads", "speculative_token_tree": name})
    assert config.speculative_token_tree is not None and set(config.speculative_token_tree) == set(paths)


@pytest.mark.parametrize("num_nodes", range(1, 8))
def test_no_tree_of_as_many_tokens_is_better(num_nodes: int):
    every = [path for depth in (1, 2, 3)
             for path in itertools.product(*(range(len(of_head)) for of_head in ACCURACIES[:depth]))]  # fmt: skip
    trees = (set(tree) for tree in itertools.combinations(every, num_nodes))
    best = max(expected_tokens(tree) for tree in trees if all(path[:-1] in tree | {()} for path in tree))
    built = from_accuracies(ACCURACIES, num_nodes)
    assert len(set(built)) == num_nodes and np.isclose(expected_tokens(built), best)
    assert all(path[:-1] in ((), *built[:index]) for index, path in enumerate(built))


def test_no_more_tokens_than_there_are():
    assert len(from_accuracies(ACCURACIES, 100)) == 3 + 3 * 2 + 3 * 2 * 2


@pytest.mark.parametrize("wrong", [(), ((),), ((0.5, 1.5),), ((0.5,), (-0.1,))])
def test_wrong_accuracies_are_refused(wrong):
    with pytest.raises(ValueError, match="accurac"):
        from_accuracies(wrong, 3)
