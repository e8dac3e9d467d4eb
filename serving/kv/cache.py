"""The KV cache's books: every sequence's page table, the free pages and the prefix cache, kept consistent.

A page goes free -> a sequence's own -> the radix tree's (full and computed: shared) -> free again by eviction. The
device runs steps in the order of dispatch, so a page may be published, or freed and given to another sequence, as soon
as the last step that writes it has been dispatched: whatever reads or overwrites it is dispatched later.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from serving.kv.pages import PagePool
from serving.kv.radix_tree import Node, RadixTree


class PageTable:
    """A sequence's pages in order. The first `num_shared` are the tree's, locked through `node`, the rest its own."""

    __slots__ = ("node", "num_pages", "num_shared", "pages")

    def __init__(self, max_pages: int):
        self.pages = np.zeros(max_pages, np.int32)
        self.num_pages = 0
        self.num_shared = 0
        self.node: Node | None = None  # None: it neither reads nor fills the prefix cache, or is empty

    def append(self, pages: list[int]) -> None:
        self.pages[self.num_pages : self.num_pages + len(pages)] = pages
        self.num_pages += len(pages)


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix, valid until anything else is asked of the cache."""

    node: Node
    pages: list[int]


class KVCache:
    """Token arrays are int32. A sequence's whole life is `match`, `admit`, then `grow` and `publish`, and `release`."""

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size)

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free or evictable."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_held(self) -> int:
        """Pages that live sequences use."""
        return self.pool.num_usable - self.num_available

    @property
    def usage(self) -> float:
        """Share of the pages that live sequences use."""
        return self.num_held / self.pool.num_usable

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def match(self, namespace: Hashable, tokens: np.ndarray) -> Match:
        """The longest cached prefix that leaves at least one token to compute: its logits are needed."""
        num_pages = (len(tokens) - 1) // self.page_size
        return Match(*self.tree.match(namespace, tokens[: num_pages * self.page_size].tobytes()))

    def has_room(self, match: Match | None, num_tokens: int, headroom: int) -> bool:
        """Whether `headroom` pages stay available once a table has the matched pages and new ones for `num_tokens`
        tokens in all."""
        available, wanted = self.num_available, self.pages_for(num_tokens)
        if match is not None:
            available -= self.tree.num_evictable_on_path(match.node)
            wanted -= len(match.pages)
        return wanted + headroom <= available

    def admit(self, table: PageTable, match: Match | None, num_tokens: int) -> None:
        """Fills an empty table with the matched pages and new ones for `num_tokens` tokens in all, for which there must
        be room. Without a match the table has nothing to do with the prefix cache."""
        if match is not None:
            self.tree.lock(match.node)
            table.node, table.num_shared = match.node, len(match.pages)
            table.append(match.pages)
        grown = self.grow(table, num_tokens)
        assert grown, "a sequence is admitted without room for it"

    def grow(self, table: PageTable, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens, evicting cached pages if need be. False, and nothing changed, if that is
        not enough."""
        wanted = self.pages_for(num_tokens) - table.num_pages
        if wanted > self.num_available:
            return False
        if wanted > self.pool.num_free:
            self.pool.free(self.tree.evict(wanted - self.pool.num_free))
        if wanted > 0:
            table.append(self.pool.allocate(wanted))
        return True

    def publish(self, table: PageTable, tokens: np.ndarray, num_computed: int) -> None:
        """Shares the full pages of the first `num_computed` tokens: all known, and written by steps dispatched so far.

        Pages that the tree got from another sequence meanwhile replace the table's own."""
        shared, full = table.num_shared, num_computed // self.page_size
        if table.node is None or full <= shared:
            return
        pages = table.pages[shared:full].tolist()
        key = tokens[shared * self.page_size : full * self.page_size].tobytes()
        table.node, present = self.tree.insert(table.node, key, pages)
        table.num_shared = full
        if present:
            table.pages[shared : shared + len(present)] = present
            self.pool.free(pages[: len(present)])

    def release(self, table: PageTable) -> None:
        """Empties the table: its own pages are free, the shared ones stay cached."""
        self.pool.free(table.pages[table.num_shared : table.num_pages].tolist())
        if table.node is not None:
            self.tree.unlock(table.node)
        table.node, table.num_pages, table.num_shared = None, 0, 0

    def drop(self, namespace: Hashable) -> None:
        """Frees the cached pages of a namespace that no sequence uses any more."""
        self.pool.free(self.tree.drop(namespace))

    def flush(self) -> bool:
        """Frees every cached page that no sequence uses. True when nothing stays cached."""
        self.pool.free(self.tree.evict(self.tree.num_evictable))
        return self.tree.num_pages == 0

    def check_integrity(self, tables: Iterable[PageTable]) -> None:
        """Checks the books against the tables of all live sequences: free + cached + held = all, locks as used, no page
        in two places. Raises AssertionError."""
        tables = list(tables)
        owned = self.tree.check_integrity([table.node for table in tables if table.node is not None])
        for table in tables:
            assert 0 <= table.num_shared <= table.num_pages <= len(table.pages)
            assert (table.node is not None) or not table.num_shared
            path = self.tree.path_pages(table.node) if table.node else []
            assert path == table.pages[: table.num_shared].tolist(), "a table differs from the tree's path"
            owned += table.pages[table.num_shared : table.num_pages].tolist()
        self.pool.check_integrity(owned)
