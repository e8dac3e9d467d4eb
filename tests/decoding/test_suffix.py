"""The context tree against counting by hand, and what suffix decoding makes of it."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.decoding.speculation import suffix
from serving.decoding.speculation.config import SpeculativeConfig
from serving.decoding.speculation.context_tree import ContextTree
from serving.decoding.speculation.continuation import grow
from serving.decoding.speculation.suffix import PastOutputs, SuffixDrafter

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=25), min_size=1, max_size=4)


def make_tree(texts: list[list[int]], depth: int) -> ContextTree:
    tree = ContextTree(depth)
    for text in texts:
        for token in text:
            tree.append(token)
        tree.end_text()
    return tree


def counted(texts: list[list[int]], context: tuple[int, ...]) -> Counter[int]:
    """What followed the context, looking everywhere."""
    size = len(context)
    return Counter(
        text[i] for text in texts for i in range(size, len(text)) if tuple(text[i - size : i]) == context
    )


@given(texts=TEXTS, depth=st.integers(1, 6), context=st.lists(st.integers(0, 2), min_size=1, max_size=6))
@settings(max_examples=300)
def test_counts_are_exact(texts, depth, context):
    tree = make_tree(texts, depth)
    context = context[-depth:]
    wanted = [counted(texts, tuple(context[-length:])) for length in range(1, len(context) + 1)]
    places = tree.match(context)
    assert len(places) == sum(bool(followers) for followers in wanted)
    assert tree.find(context) == (places[-1] if len(places) == len(context) else None)
    for place, followers in zip(places, wanted, strict=False):
        assert tree.total(place) == followers.total()
        if place < 0:
            assert followers == {tree.text[~place]: 1}
            continue
        told = tree.followers(place)
        assert all(followers[token] == times for token, times in told)
        assert [times for _, times in told] == [times for _, times in followers.most_common(2)]


def path_to(parents: list[int], index: int) -> list[int]:
    return [] if index < 0 else [*path_to(parents, parents[index]), index]


@given(
    texts=TEXTS,
    context=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    limit=st.integers(1, 8),
    min_prob=st.sampled_from([0.05, 0.3, 0.6]),
    branches=st.sampled_from([1, 2]),
)
@settings(max_examples=300)
def test_continuations_are_likely_paths(texts, context, limit, min_prob, branches):
    tree = make_tree(texts, depth=20)
    place = tree.find(context)
    if place is None:
        return
    grown = grow(tree, context, place, limit, min_prob=min_prob, branches=branches, endless=False)
    expected, seen = 0.0, set()
    assert len(grown.tokens) <= limit
    for index, parent in enumerate(grown.parents):
        assert -1 <= parent < index and (branches == 2 or parent == index - 1)
        path, probability = context, 1.0
        for step in path_to(grown.parents, index):
            followers = counted(texts, tuple(path))
            probability *= followers[grown.tokens[step]] / followers.total()
            assert branches == 2 or followers[grown.tokens[step]] == max(followers.values())
            path = [*path, grown.tokens[step]]
        assert probability >= min_prob - 1e-9 and tuple(path) not in seen
        seen.add(tuple(path))
        expected += probability
    assert grown.expected == pytest.approx(expected)


def drafter(**keys) -> SuffixDrafter:
    given = {"method": "suffix"} | {f"suffix_decoding_{key}": value for key, value in keys.items()}
    return SuffixDrafter(SpeculativeConfig.of(given))


def propose(drafter: SuffixDrafter, tokens: list[int], most: int = 24, name: str = "a") -> list[int] | None:
    draft = drafter.propose(name, np.array(tokens, np.int32), most)
    return None if draft is None else draft.tokens.tolist()


def test_more_of_a_match_brings_more_drafts():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert propose(drafter(), [*text, 2]) == [3]
    assert propose(drafter(), [*text, 2, 3, 4]) == [5, 6, 7]
    assert propose(drafter(max_spec_factor=2), [*text, 2, 3]) == [4, 5, 6, 7]
    assert propose(drafter(), [*text, 2, 3, 4], most=2) == [5, 6]
    assert propose(drafter(), text) is None


def test_rare_continuations_are_left_out():
    text = [1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 7, 0, 1, 2, 5, 0, 9, 1, 2]
    assert propose(drafter(min_token_prob=0.4), text) == [5, 0]  # 2 of 4, then 2 of 2
    assert propose(drafter(min_token_prob=0.6), text) is None


def test_a_copy_goes_on_with_itself():
    assert propose(drafter(), [7, 8, 7, 8]) == [7, 8]  # two tokens match, one place
    assert propose(drafter(max_spec_factor=4), [7, 8, 9, 7, 8]) == [9, 7, 8, 9, 7, 8, 9, 7]


def test_past_outputs_help_others():
    one = drafter(max_cached_requests=2)
    assert propose(one, [9, 1, 2, 3, 4]) is None
    one.forget("a", np.array([9, 1, 2, 3, 4], np.int32), 1)
    assert propose(one, [5, 1, 2], name="b") == [3, 4]  # and not beyond the end of that output
    assert propose(one, [5, 9, 1], name="c") == [2]  # the prompt's 9 was not kept: one token matches
    one.forget("a", np.array([1, 2, 8], np.int32), 0)
    one.forget("a", np.array([1, 2, 8], np.int32), 0)
    assert propose(one, [5, 1, 2], name="d") == [8]  # the first output is forgotten
    none = drafter(max_cached_requests=0)
    none.forget("a", np.array([9, 1, 2, 3, 4], np.int32), 1)
    assert propose(none, [5, 1, 2]) is None and len(none._sequences) == 1


def test_trees_hold_both_branches():
    one = drafter(tree=True)
    text = [1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 5, 4, 1, 2]
    draft = one.propose("a", np.array(text, np.int32), 24)
    assert draft is not None and draft.parents is not None
    assert (draft.tokens.tolist(), draft.parents.tolist()) == ([5, 6], [-1, -1])


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(suffix, "MOST_KEPT", 400)
    past = PastOutputs(8, 10_000)
    for start in range(50):
        past.add(list(range(start, start + 30)))
        assert sum(len(tree.text) for tree in past.trees) <= 400 and past.trees[0].match([start])


def test_long_prompts_are_read_in_parts(monkeypatch):
    monkeypatch.setattr(suffix, "MOST_READ", 10)
    one, tokens = drafter(), [*range(24), 0, 1]
    assert propose(one, tokens) is None and propose(one, [*tokens, 2]) is None
    assert propose(one, [*tokens, 2]) == [3, 4, 5]
