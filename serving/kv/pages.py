"""Which KV pages are free.

A page that is not free has exactly one owner: a sequence that is still filling it, or the radix tree once it is full
and can be shared. How many sequences use a page of the tree is counted by its node's locks, not here page by page.
"""

from collections.abc import Iterable

SCRATCH_PAGE = 0  # the runner writes the K/V of padding tokens here; it is never handed out


class PagePool:
    """Free list over pages 1 .. num_pages - 1."""

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"{num_pages=} must be at least 2: page {SCRATCH_PAGE} is reserved for padding")
        self.num_usable = num_pages - 1
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))
        self._is_free = bytearray([0] + [1] * self.num_usable)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages; there must be that many (`num_free`)."""
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page == SCRATCH_PAGE or self._is_free[page]:
                raise ValueError(f"page {page} is freed but was not allocated")
            self._is_free[page] = 1
            self._free.append(page)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Every page is either free or in `owned`, and none is there twice."""
        owned = list(owned)
        assert len(set(owned)) == len(owned), "a page has two owners"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert not set(owned) & set(self._free), "an owned page is free"
        assert len(owned) + len(self._free) == self.num_usable, "a page is lost"
        assert sum(self._is_free) == len(self._free) and all(self._is_free[page] for page in self._free)
