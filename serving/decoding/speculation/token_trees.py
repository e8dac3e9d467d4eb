"""Fixed trees of drafts, as data: the published ones of Medusa, and the best one for heads of measured accuracy.

A path names a token by ranks: (0, 2) is the first head's best token, followed by the second head's third best.
Cai et al., arXiv 2401.10774, 3.1.1 and 4.3.3; the published trees are in FasterDecoding/Medusa,
`medusa/model/medusa_choices.py`.
"""

import heapq
from collections.abc import Mapping, Sequence

Path = tuple[int, ...]

_PUBLISHED: Mapping[str, str] = {  # a digit a rank
    "mc_sim_7b_63": """
        0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004
        005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
    """,
    "vicuna_7b_stage2": """
        0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020 30 011 06 6 07 004 40 12 08 7
        030 0001 005 21 006 101 0010 200 50 09 012 8 040 021 13 007 0002 008 110 0100 60 9 013 0003 102 050 31
        0020 70 14
    """,
    "vicuna_13b_stage2": """
        0 00 1 000 01 10 2 02 001 010 3 03 20 002 0000 04 100 11 4 003 05 020 5 30 011 06 004 0001 07 005 12
        0010 030 101 40 006 08 200 09 6 7 21 50 012 0002 8 040 0100 021 007 110 13 0020 9 008 050 0003 009 013
        102 0011 300 1000
    """,
    "zephyr_stage2": """
        0 00 1 01 2 000 10 02 3 03 4 20 001 04 5 05 010 11 6 002 30 06 7 07 08 003 100 09 020 12 40 8 9 21 011
        004 0000 50 030 13 005 006 60 200 101 012 040 14 31 22 007 70 021 008 013 050 15 009 110 0001 0010 41 23
    """,
}

PUBLISHED: Mapping[str, tuple[Path, ...]] = {
    name: tuple(tuple(map(int, path)) for path in paths.split()) for name, paths in _PUBLISHED.items()
}


def from_accuracies(accuracies: Sequence[Sequence[float]], num_nodes: int) -> tuple[Path, ...]:
    """The tree of so many nodes that adds the most tokens on average: accuracies[head][rank] says how often this token
    was the right one. A path is right as often as the product of its ranks says (the paper's assumption)."""
    if not accuracies or not all(accuracies):
        raise ValueError(f"{accuracies=}: every head needs at least one accuracy")
    if any(not 0 <= chance <= 1 for of_head in accuracies for chance in of_head):
        raise ValueError(f"{accuracies=} must be in 0 to 1")
    waiting: list[tuple[float, Path]] = [(-chance, (rank,)) for rank, chance in enumerate(accuracies[0])]
    heapq.heapify(waiting)
    chosen: list[Path] = []
    while waiting and len(chosen) < num_nodes:
        negative, path = heapq.heappop(waiting)
        chosen.append(path)
        if len(path) < len(accuracies):  # no child is worth more than its parent: parents always come first
            for rank, chance in enumerate(accuracies[len(path)]):
                heapq.heappush(waiting, (negative * chance, (*path, rank)))
    return tuple(chosen)
