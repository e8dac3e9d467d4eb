import numpy as np
import pytest

from serving.kv.cache import KVCache, PageTable


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


PROMPT = tokens(*range(10, 22))  # three pages of four


def admitted(kv: KVCache, prompt: np.ndarray, headroom=0, namespace: str | None = "") -> PageTable | None:
    table = PageTable(8)
    match = None if namespace is None else kv.match(namespace, prompt)
    if not kv.has_room(match, len(prompt), headroom):
        return None
    kv.admit(table, match, len(prompt))
    return table


def test_a_full_hit_leaves_the_last_token_to_compute():
    kv = KVCache(20, 4)
    first = admitted(kv, PROMPT)
    kv.publish(first, PROMPT, 12)
    second = admitted(kv, PROMPT)
    assert second.num_shared == 2 and second.num_pages == 3
    assert second.pages[:2].tolist() == first.pages[:2].tolist() and second.pages[2] != first.pages[2]
    kv.check_integrity([first, second])


def test_only_full_computed_pages_are_published():
    kv = KVCache(20, 4)
    table = admitted(kv, PROMPT)
    kv.publish(table, PROMPT, 7)
    assert table.num_shared == 1 and kv.tree.num_pages == 1
    kv.release(table)
    assert kv.pool.num_free == 18 and kv.num_held == 0
    kv.check_integrity([])


def test_duplicates_are_replaced_and_freed():
    kv = KVCache(20, 4)
    first, second = admitted(kv, PROMPT), admitted(kv, PROMPT)
    assert not set(first.pages[:3]) & set(second.pages[:3])
    kv.publish(first, PROMPT, 8)
    kv.publish(second, PROMPT, 12)
    assert second.pages[:2].tolist() == first.pages[:2].tolist()
    assert kv.num_held == 4  # two shared, a last page each
    kv.check_integrity([first, second])


def test_growing_evicts_what_nobody_uses_and_fails_without_a_trace():
    kv = KVCache(7, 4)
    old = admitted(kv, PROMPT)
    kv.publish(old, PROMPT, 12)
    kv.release(old)
    table = admitted(kv, tokens(1, 2, 3, 4, 5), namespace=None)
    assert kv.grow(table, 20) and table.num_pages == 5 and kv.tree.num_pages == 1
    assert kv.grow(table, 24) and not kv.grow(table, 25)
    assert table.num_pages == 6 and kv.num_available == 0
    kv.check_integrity([table])


def test_headroom_counts_what_the_match_takes_out_of_the_evictable():
    kv = KVCache(6, 4)
    old = admitted(kv, PROMPT)
    kv.publish(old, PROMPT, 12)
    kv.release(old)  # 3 evictable, 2 free: a hit locks 2 and needs 1 more
    assert admitted(kv, PROMPT, headroom=3) is None
    kv.check_integrity([])
    table = admitted(kv, PROMPT, headroom=2)
    assert table is not None and table.num_shared == 2
    kv.check_integrity([table])


def test_flush_keeps_what_is_in_use():
    kv = KVCache(20, 4)
    one, other = admitted(kv, PROMPT), admitted(kv, PROMPT + 50)
    kv.publish(one, PROMPT, 12)
    kv.publish(other, PROMPT + 50, 12)
    kv.release(other)
    assert not kv.flush() and kv.tree.num_pages == 3
    kv.release(one)
    assert kv.flush() and kv.pool.num_free == 19


def test_integrity_check_sees_a_table_that_lost_its_lock():
    kv = KVCache(20, 4)
    table = admitted(kv, PROMPT)
    kv.publish(table, PROMPT, 12)
    kv.tree.unlock(table.node)
    with pytest.raises(AssertionError, match="locks differ"):
        kv.check_integrity([table])
