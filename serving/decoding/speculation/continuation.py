"""The likeliest continuation of a context, by the counts of a context tree: a chain, or a tree of two branches."""

from heapq import heappop, heappush

import numpy as np

from serving.decoding.speculation.context_tree import BREAK, ContextTree, Place


class Continuation:
    """Tokens after a context, each after its parent. `expected`: how many will be accepted, if counts are
    probabilities."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.expected = 0.0

    def add(self, token: int, parent: int, probability: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.expected += probability
        return len(self.tokens) - 1


def grow(
    tree: ContextTree, context: list[int], place: Place, limit: int, *, min_prob: float, branches: int, endless: bool
) -> Continuation:
    """At most `limit` tokens, the likeliest first, each with a probability (with all before it) of at least `min_prob`.

    place: of the context in the tree. endless: the context ends where the text ends, so a copy that comes to the end
    goes on with itself."""
    grown = Continuation()
    waiting: list[tuple[float, int, int, list[int]]] = []  # -probability, order, parent, context up to the token
    num_seen = 0

    def follow(parent: int, context: list[int], place: Place, probability: float) -> None:
        nonlocal num_seen
        if place < 0:  # it occurred once: no token of the copy is less likely than this one
            for token in _copy(tree.text, ~place, limit - len(grown.tokens), endless):
                parent = grown.add(token, parent, probability)
            return
        total = tree.total(place)
        for token, times in tree.followers(place)[:branches]:
            share = probability * times / total
            if share >= min_prob:
                heappush(waiting, (-share, num_seen, parent, [*context, token]))
                num_seen += 1

    follow(-1, context, place, 1.0)
    while waiting and len(grown.tokens) < limit:
        negative, _, parent, path = heappop(waiting)
        index = grown.add(path[-1], parent, -negative)
        found = tree.find(path)
        if found is not None:
            follow(index, path, found, -negative)
    return grown


def _copy(text: list[int], start: int, count: int, endless: bool) -> list[int]:
    tokens = text[start : start + count]
    if endless:
        return np.resize(tokens, count).tolist() if len(tokens) < count else tokens
    return tokens[: tokens.index(BREAK)] if BREAK in tokens else tokens
