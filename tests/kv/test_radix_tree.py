"""Pages of two tokens; prompts are written as strings, one letter a token."""

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.kv.radix_tree import RadixTree

PAGE = 2


def key(text: str) -> bytes:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32).tobytes()


class Tree(RadixTree):
    def __init__(self):
        super().__init__(PAGE)
        self.fresh = count(1)

    def add(self, text: str, namespace="") -> list[int]:
        """Inserts a prompt as a sequence would that then ends; returns its pages."""
        node, present = self.match(namespace, key(text))
        self.lock(node)
        new = [next(self.fresh) for _ in range(len(text) // PAGE - len(present))]
        end, duplicates = self.insert(node, key(text)[len(present) * self.page_bytes :], new)
        assert not duplicates
        assert self.path_pages(end) == present + new
        self.check_integrity([end])
        self.unlock(end)
        self.check_integrity([])
        return present + new

    def find(self, text: str, namespace="") -> list[int]:
        node, pages = self.match(namespace, key(text))
        self.lock(node)
        self.unlock(node)
        return pages


def test_longest_prefix_of_whole_pages():
    tree = Tree()
    pages = tree.add("abcdef")
    assert tree.find("abcdef") == pages
    assert tree.find("abcdXX") == pages[:2]
    assert tree.find("abcd") == pages[:2]
    assert tree.find("abXdef") == pages[:1]
    assert tree.find("Xbcdef") == []
    tree.check_integrity([])


def test_an_edge_splits_where_prompts_differ():
    tree = Tree()
    one = tree.add("abcdef")
    two = tree.add("abcdXY")
    assert two[:2] == one[:2] and two[2] != one[2]
    assert tree.num_pages == 4
    assert tree.find("abcdef") == one and tree.find("abcdXY") == two


def test_namespaces_share_nothing_and_vanish_when_empty():
    tree = Tree()
    one, two = tree.add("abcd", "one"), tree.add("abcd", "two")
    assert not set(one) & set(two)
    assert tree.drop("one") == one and tree.find("abcd", "one") == [] and tree.find("abcd", "two") == two
    assert sorted(tree.evict(2)) == two
    assert not tree._roots


def test_least_recently_used_leaf_goes_first_and_from_its_end():
    tree = Tree()
    one, two = tree.add("abcdef"), tree.add("uvwxyz")
    tree.find("abcdef")
    assert tree.evict(2) == two[1:]
    assert tree.find("uvwxyz") == two[:1]  # and with that it is the newest
    assert tree.evict(3) == one
    tree.check_integrity([])


def test_a_parent_is_evicted_after_its_last_child():
    tree = Tree()
    one, two = tree.add("abcd"), tree.add("abXY")
    assert [tree.evict(1)[0] for _ in range(3)] == [one[1], two[1], one[0]]
    assert tree.num_pages == 0


def test_locks_reach_the_root():
    tree = Tree()
    tree.add("abcdef")
    two = tree.add("abcdXY")
    node, _ = tree.match("", key("abcdef"))
    tree.lock(node)
    assert tree.num_evictable == 1 and tree.evict(1) == two[2:]
    tree.check_integrity([node])
    with pytest.raises(AssertionError):
        tree.drop("")
    tree = Tree()
    tree.add("ab")
    node, _ = tree.match("", key("ab"))
    with pytest.raises(AssertionError, match="unlocked more often"):
        tree.unlock(node)


def test_a_split_keeps_the_locks_of_both_halves():
    tree = Tree()
    pages = tree.add("abcdef")
    low, _ = tree.match("", key("abcdef"))
    tree.lock(low)
    high, found = tree.match("", key("abcd"))
    assert found == pages[:2] and high is not low
    tree.lock(high)
    tree.check_integrity([low, high])
    tree.unlock(low)
    assert tree.num_evictable == 1
    tree.check_integrity([high])
    tree.unlock(high)
    assert tree.num_evictable == 3


def test_growing_alone_extends_the_edge_in_place():
    tree = Tree()
    node, _ = tree.match("", b"")
    tree.lock(node)
    for i, text in enumerate(["ab", "cd", "ef"]):
        node, _ = tree.insert(node, key(text), [i])
    assert node.pages == [0, 1, 2] and tree._num_nodes == 1
    other, _ = tree.match("", key("abcdef"))
    assert other is node
    tree.lock(other)  # shared from here on: growing must not carry the other along
    node, _ = tree.insert(node, key("gh"), [3])
    assert node is not other and tree.path_pages(other) == [0, 1, 2] and tree.path_pages(node) == [0, 1, 2, 3]
    tree.check_integrity([node, other])


def test_inserting_what_is_there_returns_it():
    tree = Tree()
    first, _ = tree.match("", b"")
    tree.lock(first)
    second = first
    tree.lock(second)
    first, _ = tree.insert(first, key("abcdef"), [1, 2, 3])
    second, present = tree.insert(second, key("abcdXY"), [4, 5, 6])
    assert present == [1, 2] and tree.path_pages(second) == [1, 2, 6]
    tree.check_integrity([first, second])


def test_the_heap_does_not_grow_with_use():
    tree = Tree()
    tree.add("abcdef")
    for _ in range(1000):
        tree.find("abcdef")
    assert len(tree._leaves) < 100


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("add find evict lock unlock".split()), st.text("ab", max_size=12)), max_size=60)
)
def test_against_a_dictionary(operations):
    """The model: every cached prefix of whole pages, by its text."""
    tree, model, locked = Tree(), {}, []
    for operation, text in operations:
        text = text[: len(text) // PAGE * PAGE]
        prefixes = [text[: i + PAGE] for i in range(0, len(text), PAGE)]
        known = [model[prefix] for prefix in prefixes if prefix in model]
        if operation == "add":
            node, present = tree.match("", key(text))
            assert present == known
            tree.lock(node)
            new = [next(tree.fresh) for _ in prefixes[len(known) :]]
            end, _ = tree.insert(node, key(text)[len(known) * tree.page_bytes :], new)
            tree.unlock(end)
            model |= zip(prefixes, known + new, strict=True)
        elif operation == "find":
            assert tree.find(text) == known
        elif operation == "lock":
            node, present = tree.match("", key(text))
            assert present == known
            tree.lock(node)
            locked.append((node, prefixes[: len(known)]))
        elif operation == "unlock" and locked:
            tree.unlock(locked.pop()[0])
        elif operation == "evict":
            freed = set(tree.evict(min(len(text), tree.num_evictable)))
            gone = {prefix for prefix, page in model.items() if page in freed}
            assert len(gone) == len(freed)
            assert not gone & {prefix for _, prefixes in locked for prefix in prefixes}
            model = {prefix: page for prefix, page in model.items() if prefix not in gone}
            assert all(prefix[:-PAGE] in model for prefix in model if len(prefix) > PAGE), "a parent went first"
        assert sorted(tree.check_integrity([node for node, _ in locked])) == sorted(model.values())
