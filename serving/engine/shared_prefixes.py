"""Of several requests that share a prefix nobody has computed yet, one computes it and the others wait for its pages.

In each data group, that is: a request may as well compute the prefix in another group (`placement.py` decides).

Waiting cannot deadlock: only a running sequence whose prompt is in progress is waited for, it needs nothing more than
its share of the budget to publish the pages, and the wait ends as well when it stops running.
"""

from serving.engine.sequence import Sequence
from serving.kv.cache import Match
from serving.kv.radix_tree import Node

WORTH_WAITING = 0.25  # share of a request's missing tokens that must be gained: a step's delay is not free


class Leaders:
    """Which pages are about to be published, by the node they will follow; for one step. A node belongs to the tree of
    one data group."""

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._by_next_page: dict[tuple[Node, bytes], Sequence] = {}

    def add(self, seq: Sequence) -> None:
        """`seq` has its prompt in progress."""
        node, shared = seq.table.node, seq.table.num_shared
        if node is not None and (shared + 1) * self._page_size <= seq.num_tokens:
            self._by_next_page.setdefault((node, self._page(seq, shared)), seq)

    def find(self, seq: Sequence, match: Match) -> tuple[Sequence | None, int]:
        """The leader that `seq`, of which `match` is cached, had better wait for, and how many more pages it will have
        published then."""
        cached = len(match.pages)
        leader = self._by_next_page.get((match.node, self._page(seq, cached)))
        if leader is None:
            return None, 0
        start, end = cached * self._page_size, min(seq.num_tokens - 1, leader.num_tokens)
        differs = seq.tokens[start:end] != leader.tokens[start:end]
        num_same = int(differs.argmax()) if differs.any() else end - start
        gained = num_same // self._page_size
        if gained * self._page_size < max(1, WORTH_WAITING * (seq.num_tokens - start)):
            return None, 0
        return leader, gained

    def _page(self, seq: Sequence, index: int) -> bytes:
        return seq.tokens[index * self._page_size : (index + 1) * self._page_size].tobytes()


def leader_of(seq: Sequence) -> Sequence | None:
    """The leader that has yet to publish what `seq` waits for."""
    leader = seq.leader
    if leader is None or leader.slot < 0 or leader.table.num_shared >= seq.leader_pages:
        seq.leader = None
    return seq.leader
