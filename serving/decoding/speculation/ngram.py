"""Prompt lookup (Saxena 2023): where the last tokens stood before, what followed them then may follow again.

The longest run of last tokens that occurred earlier counts, and of its occurrences the newest. What is copied may run
into itself: after "ab ab" comes "ab ab ab", however few times it stood there yet.
"""

import numpy as np

from serving.engine.plan import Draft

MOST_READ = 8192  # tokens of a long prompt taken in at once: other sequences wait meanwhile, some 10 ms


class NgramDrafter:
    """See `serving.decoding.speculation.drafter.Drafter`. Reading a token takes the same short time after any number of
    others."""

    def __init__(self, least: int, most: int):
        """Fewest and most tokens that have to match."""
        self._sizes = range(least, most + 1)
        self._indices: dict[str, _Index] = {}

    def propose(self, request_id: str, tokens: np.ndarray, most: int) -> Draft | None:
        index = self._indices.get(request_id)
        if index is None:
            index = self._indices[request_id] = _Index(self._sizes)
        index.read(tokens[: index.num_read + MOST_READ])
        start = index.find(tokens) if index.num_read == len(tokens) else None
        return None if start is None else Draft(_copied(tokens, start, most))

    def forget(self, request_id: str, tokens: np.ndarray, prompt_len: int) -> None:
        self._indices.pop(request_id, None)


class _Index:
    """For each n-gram of a sequence that something follows: where the newest of what followed stands."""

    def __init__(self, sizes: range):
        self._followers: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        self.num_read = 0

    def read(self, tokens: np.ndarray) -> None:
        """Takes in the tokens that came since; each is the follower of those before it."""
        start, end = self.num_read, len(tokens)
        for size, followers in self._followers.items():
            first = max(start, size)
            if first >= end:
                continue
            known = tokens[first - size : end - 1].tolist()
            ngrams = zip(*(known[i:] for i in range(size)), strict=False)
            followers.update(zip(ngrams, range(first, end), strict=True))
        self.num_read = end

    def find(self, tokens: np.ndarray) -> int | None:
        """Where the follower of the longest last n-gram stands."""
        last = tuple(tokens[-max(self._followers) :].tolist())
        for size in reversed(self._followers):
            if size <= len(last) and (start := self._followers[size].get(last[-size:])) is not None:
                return start
        return None


def _copied(tokens: np.ndarray, start: int, count: int) -> np.ndarray:
    """`count` tokens from `start` on; after the last one come the copied ones, as if they had been appended."""
    assert 0 <= start < len(tokens)
    return np.resize(tokens[start : start + count], count)  # repeats what there is
