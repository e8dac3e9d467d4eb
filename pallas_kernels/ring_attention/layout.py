"""Which token goes to which device: the layouts of a sequence over the `context` axis, on the host.

Causal attention over contiguous pieces leaves the first devices idle: device 0 sees its own piece only. Two layouts
give every device the same work:
- striped: token t lives on device t mod D. Every step of the ring is a triangle (Brandon et al., arXiv 2311.09431).
- zigzag: 2 D pieces, device i holds pieces i and 2 D - 1 - i (Llama 3's context parallelism): one early, one late.

A device keeps its tokens of a row in ascending order, in consecutive slots of its own pages.

Axis letters: D devices of the axis, T tokens of a step on one device, S rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

Layout = Literal["zigzag", "striped", "contiguous"]
PADDING = -1  # the position of a token that is none


def owners(layout: Layout, devices: int, length: int, first: int = 0) -> np.ndarray:
    """[length]: the device of each of the tokens first .. first + length - 1 of a sequence.

    Striped counts from the start of the sequence, so that a token's device never depends on how a prompt was cut into
    chunks, and decoded tokens go on in the same way. The other two lay out each chunk by itself, which balances it.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"{layout=} is none of {', '.join(get_args(Layout))}")
    if devices < 1 or length < 0 or first < 0:
        raise ValueError(f"{devices=} must be at least 1, {length=} and {first=} at least 0")
    token = np.arange(length)
    if layout == "striped":
        return (first + token) % devices
    pieces = devices if layout == "contiguous" else 2 * devices
    ends = np.arange(1, pieces + 1) * length // pieces
    piece = np.searchsorted(ends, token, side="right")
    return piece if layout == "contiguous" else np.minimum(piece, pieces - 1 - piece)


def device_tokens(layout: Layout, devices: int, length: int, first: int = 0) -> np.ndarray:
    """[D, T]: the tokens (0 .. length - 1) of each device, ascending, filled up with PADDING to the longest."""
    owner = owners(layout, devices, length, first)
    out = np.full((devices, np.bincount(owner, minlength=devices).max(initial=0)), PADDING, np.int32)
    for device in range(devices):
        mine = np.flatnonzero(owner == device)
        out[device, : len(mine)] = mine
    return out


def inverse(tokens: np.ndarray) -> np.ndarray:
    """[length]: where in the flattened [D * T] each token of `device_tokens` is, so that flat[inverse] is in order."""
    flat = tokens.reshape(-1)
    at = np.flatnonzero(flat != PADDING)
    out = np.empty(len(at), np.int64)
    out[flat[at]] = at
    return out


def unmasked_pairs(layout: Layout, devices: int, length: int) -> np.ndarray:
    """[D, D]: pairs (query, key) that causal attention of a whole prompt needs on each device in each step of the ring.

    In step s a device holds the keys of the device s places to its left.
    """
    tokens = [row[row != PADDING] for row in device_tokens(layout, devices, length)]
    return np.array([
        [np.searchsorted(tokens[(device - step) % devices], tokens[device], side="right").sum()
         for step in range(devices)] for device in range(devices)
    ])  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RingBatch:
    """One step's new tokens of S rows, as each device gets them. All arrays are of the host, device axis first.

    positions[D, T]: true positions, PADDING behind the last token. cu_q_lens[D, S + 1]: each device's tokens of a row.
    source[D, T]: which of the step's tokens, counted over all rows in order, sits there; PADDING where none does.
    """

    positions: np.ndarray
    cu_q_lens: np.ndarray
    source: np.ndarray

    @property
    def restore(self) -> np.ndarray:
        """[all tokens]: index into the flattened [D * T], which brings the rows' tokens back in order."""
        return inverse(self.source)


def lay_out(rows: Sequence[tuple[int, int]], layout: Layout, devices: int, num_tokens: int | None = None) -> RingBatch:
    """rows: (position of the first new token, new tokens) of each. num_tokens: T; by default the least that fits."""
    counts = np.zeros((devices, len(rows)), np.int64)
    pieces: list[list[np.ndarray]] = [[] for _ in range(devices)]
    start = 0
    for row, (first, length) in enumerate(rows):
        tokens = device_tokens(layout, devices, length, first)
        for device in range(devices):
            mine = tokens[device][tokens[device] != PADDING]
            counts[device, row] = len(mine)
            pieces[device].append(np.stack([first + mine, start + mine]))
        start += length
    used = counts.sum(1).max(initial=0)
    size = max(used, 1) if num_tokens is None else num_tokens
    if used > size:
        raise ValueError(f"{num_tokens=} must be at least {used}, the tokens of the fullest device")
    both = np.full((devices, 2, size), PADDING, np.int32)
    for device, parts in enumerate(pieces):
        if parts:
            mine = np.concatenate(parts, axis=1)
            both[device, :, : mine.shape[1]] = mine
    cu_q_lens = np.concatenate([np.zeros((devices, 1), np.int64), counts.cumsum(1)], axis=1).astype(np.int32)
    return RingBatch(positions=both[:, 0], cu_q_lens=cu_q_lens, source=both[:, 1])
