"""The prefix cache: a radix tree whose edges are whole pages of tokens, one tree for each namespace.

Keys are the raw bytes of int32 token ids, so that comparing an edge is one memcmp and finding a child is one lookup of
its first page. The tree owns its pages. A sequence that uses a prefix locks its last node and so the path to the root;
nodes without locks can be evicted, least recently used leaf first and from its end, down to single pages. A node's
parent becomes a leaf, and with that a candidate, once its last child is gone.
"""

import heapq
from collections.abc import Hashable, Iterator
from itertools import count

TOKEN_BYTES = 4


class Node:
    """The pages on the edge that leads here from the parent. `key` holds their tokens; a root has neither."""

    __slots__ = ("children", "key", "last_used", "locks", "namespace", "pages", "parent")

    def __init__(self, parent: "Node | None", key: bytes, pages: list[int], locks: int, namespace: Hashable):
        self.parent = parent
        self.key = key
        self.pages = pages
        self.locks = locks
        self.namespace = namespace
        self.last_used = 0
        self.children: dict[bytes, Node] = {}  # by the bytes of the child's first page


class RadixTree:
    def __init__(self, page_size: int):
        self.page_bytes = page_size * TOKEN_BYTES
        self.num_pages = 0
        self.num_evictable = 0  # pages of nodes without locks
        self._roots: dict[Hashable, Node] = {}
        self._num_nodes = 0
        self._clock = 0
        self._ticket = count()  # breaks ties in the heap, which cannot compare nodes
        self._leaves: list[tuple[int, int, Node]] = []  # heap by last use; entries that no longer hold are skipped

    def match(self, namespace: Hashable, key: bytes) -> tuple[Node, list[int]]:
        """The longest cached prefix of `key` (whole pages): its last node, which ends exactly there, and its pages.

        The node is not locked yet: lock it before anything else can evict it. A namespace begins when a node of it is
        locked, and lasts until its last page and lock are gone."""
        root = self._roots.get(namespace)
        return self._descend(Node(None, b"", [], 0, namespace) if root is None else root, key)

    def insert(self, node: Node, key: bytes, pages: list[int]) -> tuple[Node, list[int]]:
        """Adds `pages`, which hold the tokens of `key`, below `node`, which the caller has locked.

        Returns the caller's new last node, locked in place of `node`, and the pages that the tree already had for the
        beginning of `key`: the caller keeps its own as many (duplicates) and must use the tree's instead. The rest of
        `pages` is the tree's from now on."""
        end, present = self._descend(node, key)
        self._lock_path(end, until=node)
        new_key, new_pages = key[len(present) * self.page_bytes :], pages[len(present) :]
        if new_pages:
            self.num_pages += len(new_pages)
            if end.locks == 1 and not end.children and end.parent is not None:  # ours alone: its edge grows
                end.key += new_key
                end.pages += new_pages
            else:
                end = self._add_child(end, Node(end, new_key, new_pages, 1, node.namespace))
        return end, present

    def lock(self, node: Node) -> None:
        """Keeps the node and its path to the root from eviction."""
        self._lock_path(node, until=None)
        if node.parent is None:
            assert self._roots.setdefault(node.namespace, node) is node, "the match is no longer valid"

    def unlock(self, node: Node) -> None:
        """Undoes one `lock`, and marks the path as just used."""
        self._clock += 1
        at: Node | None = node
        while at is not None:
            assert at.locks > 0, "a node is unlocked more often than locked"
            at.locks -= 1
            at.last_used = self._clock
            if not at.locks:
                self.num_evictable += len(at.pages)
                self._drop_if_empty(at)
            at = at.parent
        if not node.locks and not node.children:
            self._became_leaf(node)

    def num_evictable_on_path(self, node: Node) -> int:
        """Pages from the root to the node's end that could be evicted now, but not once the node is locked."""
        count = 0
        at: Node | None = node
        while at is not None and not at.locks:  # a locked node's parents are locked too
            count += len(at.pages)
            at = at.parent
        return count

    def evict(self, num_pages: int) -> list[int]:
        """Gives up `num_pages` pages (at most `num_evictable`), which are the caller's now."""
        assert num_pages <= self.num_evictable
        freed: list[int] = []
        while len(freed) < num_pages:
            entry = heapq.heappop(self._leaves)
            if not self._holds(entry):
                continue
            node = entry[2]
            taken = min(num_pages - len(freed), len(node.pages))
            freed += node.pages[-taken:]
            if taken < len(node.pages):
                del node.pages[-taken:]
                node.key = node.key[: -taken * self.page_bytes]
                heapq.heappush(self._leaves, entry)
            else:
                self._remove_leaf(node)
        self.num_pages -= num_pages
        self.num_evictable -= num_pages
        return freed

    def drop(self, namespace: Hashable) -> list[int]:
        """Gives up all pages of a namespace that no sequence uses any more."""
        root = self._roots.pop(namespace, None)
        freed: list[int] = []
        for node in self._subtree(root) if root else ():
            assert not node.locks, "a namespace in use is dropped"
            freed += node.pages
            node.pages = []
            self._num_nodes -= node is not root
        self.num_pages -= len(freed)
        self.num_evictable -= len(freed)
        return freed

    def path_pages(self, node: Node) -> list[int]:
        """The pages from the root to the node's end."""
        edges = []
        at: Node | None = node
        while at is not None:
            edges.append(at.pages)
            at = at.parent
        return [page for pages in reversed(edges) for page in pages]

    def check_integrity(self, locked: list[Node]) -> list[int]:
        """Checks the books, where each sequence has locked one node of `locked`; returns all pages of the tree."""
        locks: dict[Node, int] = {}
        for node in locked:
            at: Node | None = node
            while at is not None:
                locks[at] = locks.get(at, 0) + 1
                at = at.parent
        nodes = [node for root in self._roots.values() for node in self._subtree(root)]
        assert set(locks) <= set(nodes), "a locked node is not in the tree"
        candidates = {entry[2] for entry in self._leaves if self._holds(entry)}
        for node in nodes:
            assert node.locks == locks.get(node, 0), "locks differ from the sequences that use a node"
            assert len(node.key) == len(node.pages) * self.page_bytes
            assert all(child.parent is node and child.key.startswith(key) for key, child in node.children.items())
            if node.parent is not None:
                assert node.pages, "a node without pages"
                assert node.locks or node.children or node in candidates, "a leaf that eviction cannot find"
            else:
                assert node.locks or node.children, "an empty namespace"
        assert self.num_evictable == sum(len(node.pages) for node in nodes if not node.locks)
        pages = [page for node in nodes for page in node.pages]
        assert self.num_pages == len(pages) and self._num_nodes == len(nodes) - len(self._roots)
        return pages

    def _descend(self, node: Node, key: bytes) -> tuple[Node, list[int]]:
        """Follows `key` below `node`; an edge that agrees only in part is split there."""
        pages: list[int] = []
        step, at = self.page_bytes, 0
        while at < len(key) and (child := node.children.get(key[at : at + step])):
            shared = len(child.key)
            if not key.startswith(child.key, at):
                shared = step
                while child.key[shared : shared + step] == key[at + shared : at + shared + step]:
                    shared += step
                child = self._split(child, shared)
            pages += child.pages
            node, at = child, at + shared
        return node, pages

    def _split(self, node: Node, at: int) -> Node:
        """Cuts the edge after `at` bytes; returns the new upper node. `node` stays the lower one, with its locks."""
        parent, num_pages = node.parent, at // self.page_bytes
        assert parent is not None
        upper = Node(parent, node.key[:at], node.pages[:num_pages], node.locks, node.namespace)
        upper.last_used = node.last_used
        self._add_child(parent, upper)
        node.key, node.pages, node.parent = node.key[at:], node.pages[num_pages:], upper
        upper.children[node.key[: self.page_bytes]] = node
        return upper

    def _add_child(self, parent: Node, child: Node) -> Node:
        parent.children[child.key[: self.page_bytes]] = child
        self._num_nodes += 1
        return child

    def _lock_path(self, node: Node, until: Node | None) -> None:
        at: Node | None = node
        while at is not until:
            assert at is not None
            if not at.locks:
                self.num_evictable -= len(at.pages)
            at.locks += 1
            at = at.parent

    def _remove_leaf(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[: self.page_bytes]]
        node.pages, node.parent = [], None
        self._num_nodes -= 1
        if not parent.locks and not parent.children:
            self._became_leaf(parent)
            self._drop_if_empty(parent)

    def _became_leaf(self, node: Node) -> None:
        if node.parent is None:
            return
        if len(self._leaves) > 2 * self._num_nodes + 64:  # mostly entries that no longer hold
            self._leaves = [entry for entry in self._leaves if self._holds(entry)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (node.last_used, next(self._ticket), node))

    @staticmethod
    def _holds(entry: tuple[int, int, Node]) -> bool:
        """Whether a heap entry still names a leaf that can be evicted, last used then."""
        last_used, _, node = entry
        return not node.locks and not node.children and node.last_used == last_used and bool(node.pages)

    def _drop_if_empty(self, node: Node) -> None:
        if node.parent is None and not node.locks and not node.children:
            self._roots.pop(node.namespace, None)

    @staticmethod
    def _subtree(root: Node) -> Iterator[Node]:
        pending = [root]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())
