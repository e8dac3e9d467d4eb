"""Copying from what a sequence has already, past its own end where the copy reaches it."""

import numpy as np


def copied(tokens: np.ndarray, start: int, count: int) -> np.ndarray:
    """`count` tokens from `start` on; after the last one come the copied ones, as if they had been appended."""
    assert 0 <= start < len(tokens)
    return np.resize(tokens[start : start + count], count)  # repeats what there is
