"""What followed each run of tokens in a text, and how often: contexts of up to a given depth, growing token by token.

A node is a context that occurred more than once; its children are the contexts one token longer, to the left. A context
that occurred once is a place in the text: nothing is stored about longer ones. So text that never repeats costs one
entry a token, and a new token one step down for each token of the longest context that has occurred before.

Everything is numbers in flat tables, some 0.3-0.4 KB a token of prose or code, none of it of interest to the garbage
collector.
"""

from array import array
from collections.abc import Sequence

SHIFT = 20  # a key is a node and a token id below 2^20
BREAK = -1  # between texts: no context reaches over it

# A node's number, or ~position: the context occurred once, and what followed it stands at that position of the text.
Place = int


class ContextTree:
    def __init__(self, depth: int):
        self.depth = depth  # most tokens of a context
        self.text: list[int] = []
        self._begin = 0  # of the text being read
        self._children: dict[int, Place] = {}  # node << SHIFT | token
        self._counts: dict[int, int] = {}  # node << SHIFT | follower: how often it followed
        self._total = array("q", [0])  # of each node; node 0 is the empty context, which is not counted
        self._best = array("i", [BREAK])  # the most frequent follower
        self._second = array("i", [BREAK])  # and the next one

    def end_text(self) -> None:
        """What comes now follows nothing."""
        self.text.append(BREAK)
        self._begin = len(self.text)

    def append(self, token: int) -> None:
        """Counts `token` as a follower of all contexts that end before it."""
        text, children = self.text, self._children
        at, node = len(text), 0
        text.append(token)
        for start in range(at - 1, max(self._begin, at - self.depth) - 1, -1):
            key = node << SHIFT | text[start]
            child = children.get(key)
            if child is None:
                children[key] = ~at
                return
            if child < 0:
                child = children[key] = self._split(~child, at - start)
            self._count(child, token)
            node = child

    def match(self, context: Sequence[int]) -> list[Place]:
        """Of the last 1, 2, ... tokens of `context`, as many as have occurred with a follower."""
        places: list[Place] = []
        node, text = 0, self.text
        for length in range(1, min(len(context), self.depth) + 1):
            if node < 0:  # once: the text itself tells whether more of the context stood there
                before = ~node - length
                if before < 0 or text[before] != context[-length]:
                    break
                places.append(node)
                continue
            place = self._children.get(node << SHIFT | context[-length])
            if place is None:
                break
            places.append(place)
            node = place
        return places

    def find(self, context: Sequence[int]) -> Place | None:
        """Of the whole context, or of its end if it is longer than the depth; None if it never had a follower."""
        places = self.match(context)
        return places[-1] if places and len(places) == min(len(context), self.depth) else None

    def total(self, place: Place) -> int:
        """How often the context occurred with a follower."""
        return 1 if place < 0 else self._total[place]

    def followers(self, node: int) -> list[tuple[int, int]]:
        """The two most frequent tokens after a context that occurred more than once, and how often each followed."""
        both = self._best[node], self._second[node]
        return [(token, self._counts[node << SHIFT | token]) for token in both if token != BREAK]

    def _split(self, follower_at: int, length: int) -> int:
        """Makes a node of a context of `length` tokens that had one follower so far."""
        node = len(self._total)
        follower = self.text[follower_at]
        self._total.append(1)
        self._best.append(follower)
        self._second.append(BREAK)
        self._counts[node << SHIFT | follower] = 1
        before = follower_at - length - 1
        if length < self.depth and before >= 0 and self.text[before] != BREAK:
            self._children[node << SHIFT | self.text[before]] = ~follower_at
        return node

    def _count(self, node: int, token: int) -> None:
        counts, key = self._counts, node << SHIFT
        count = counts[key | token] = counts.get(key | token, 0) + 1
        self._total[node] += 1
        best, second = self._best[node], self._second[node]
        if token == best:
            return
        if count > counts[key | best]:
            self._best[node], self._second[node] = token, best
        elif token != second and (second == BREAK or count > counts[key | second]):
            self._second[node] = token
