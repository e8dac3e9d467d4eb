"""Prompt lookup against its definition, on random texts of few tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.decoding.speculation import ngram
from serving.decoding.speculation.ngram import NgramDrafter


def by_definition(tokens: list[int], least: int, most: int, count: int) -> list[int] | None:
    for size in range(min(most, len(tokens) - 1), least - 1, -1):
        for start in range(len(tokens) - 1, size - 1, -1):  # of the follower; newest first
            if tokens[start - size : start] == tokens[-size:]:
                text = list(tokens)
                while len(text) < len(tokens) + count:
                    text.append(text[start + len(text) - len(tokens)])
                return text[len(tokens) :]
    return None


def propose(drafter: NgramDrafter, tokens: list[int], most: int = 4, name: str = "a") -> list[int] | None:
    draft = drafter.propose(name, np.array(tokens, np.int32), most)
    if draft is None:
        return None
    assert draft.tokens.dtype == np.int32 and draft.parents is None
    return draft.tokens.tolist()


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    grows=st.lists(st.integers(1, 5), max_size=40),
    bounds=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    count=st.integers(1, 9),
)
def test_is_its_definition_at_every_length(tokens, grows, bounds, count):
    drafter, end = NgramDrafter(*bounds), 1
    for grow in [0, *grows]:
        end = min(end + grow, len(tokens))
        assert propose(drafter, tokens[:end], count) == by_definition(tokens[:end], bounds[0], bounds[1], count)


def test_longest_match_then_newest():
    drafter = NgramDrafter(1, 3)
    assert propose(drafter, [1, 2, 3, 9, 8, 2, 3, 7, 6, 5, 3, 4, 1, 2, 3]) == [9, 8, 2, 3]  # three tokens match
    assert propose(NgramDrafter(1, 2), [1, 2, 3, 9, 8, 2, 3, 7, 6, 5, 2, 3]) == [7, 6, 5, 2]  # the newest of two
    assert propose(drafter, [1, 2, 3], name="b") is None
    assert propose(drafter, [5, 5], name="c") == [5, 5, 5, 5]  # on and on


def test_sequences_are_apart_and_forgotten():
    drafter = NgramDrafter(1, 1)
    assert propose(drafter, [1, 2, 1], name="a") == [2, 1, 2, 1]
    assert propose(drafter, [3, 1], name="b") is None
    drafter.forget("a", np.array([1, 2, 1], np.int32), 1)
    drafter.forget("never seen", np.array([1], np.int32), 1)
    assert propose(drafter, [7, 1], name="a") is None and len(drafter._indices) == 2


def test_drafts_are_copies():
    tokens = np.array([4, 5, 6, 4], np.int32)
    draft = NgramDrafter(1, 1).propose("a", tokens, 2)
    tokens[:] = 0
    assert draft is not None and draft.tokens.tolist() == [5, 6]


def test_long_prompts_are_read_in_parts(monkeypatch):
    monkeypatch.setattr(ngram, "MOST_READ", 10)
    drafter, tokens = NgramDrafter(2, 2), list(range(24)) + [0, 1]
    assert propose(drafter, tokens) is None
    assert propose(drafter, tokens + [2]) is None
    assert propose(drafter, tokens + [2, 3]) == [4, 5, 6, 7]
