import pytest

from serving.kv.pages import SCRATCH_PAGE, PagePool


def test_all_pages_but_the_scratch_page_are_handed_out_once():
    pool = PagePool(9)
    pages = pool.allocate(8)
    assert sorted(pages) == list(range(1, 9)) and pool.num_free == 0
    with pytest.raises(ValueError, match="1 pages asked for, 0 are free"):
        pool.allocate(1)
    pool.free(pages[:3])
    assert pool.num_free == 3
    pool.check_integrity(pages[3:])


@pytest.mark.parametrize("page", [SCRATCH_PAGE, 3])
def test_freeing_a_free_page_raises(page):
    pool = PagePool(9)
    pool.free(pool.allocate(8))
    with pytest.raises(ValueError, match=f"page {page} is freed but was not allocated"):
        pool.free([page])


@pytest.mark.parametrize(
    ("owned", "message"), [([1, 1], "two owners"), ([1, 5], "owned page is free"), ([1], "a page is lost")]
)
def test_integrity_check_finds(owned, message):
    pool = PagePool(6)
    pool.free(set(pool.allocate(5)) - {1, 2})
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(owned)


def test_a_pool_needs_a_page_beside_the_scratch_page():
    with pytest.raises(ValueError, match="num_pages=1"):
        PagePool(1)
