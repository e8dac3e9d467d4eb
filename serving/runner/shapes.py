"""The closed set of step shapes: everything the engine can run is compiled before it serves.

A shape is T tokens x S rows of each data group, padded up. T == S: decode rows only, one token each. T > S: anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class StepShape:
    num_tokens: int  # T
    num_rows: int  # S

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens x {self.num_rows} rows"


def step_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[StepShape, ...]:
    """Powers of two: decode shapes from 2 rows (one-row products are slow on CPU); a small mixed shape, so that a short
    prompt on an idle server is quick; mixed shapes with all rows. The largest shape comes last.
    """
    rows = _powers(2, max_num_seqs)
    most = rows[-1]
    tokens = _powers(max(2 * most, 64), max(max_num_batched_tokens, 2 * most))
    return (*(StepShape(r, r) for r in rows), StepShape(32, min(most, 8)), *(StepShape(t, most) for t in tokens))


def pick_shape(shapes: Sequence[StepShape], groups: Sequence[tuple[int, int]]) -> StepShape:
    """The smallest shape that holds (tokens, rows) of every data group. Raises ValueError if none does: the scheduler
    broke its limits."""
    num_tokens, num_rows = (max(sizes) for sizes in zip(*groups, strict=True))
    decode_only = all(tokens == rows for tokens, rows in groups)
    for shape in shapes:
        fits = num_tokens <= shape.num_tokens and num_rows <= shape.num_rows
        if fits and (decode_only or shape.num_tokens > shape.num_rows):
            return shape
    raise ValueError(f"no compiled shape holds {num_tokens} tokens of {num_rows} rows; the largest is {shapes[-1]}")


def _powers(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... until `last` is covered."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(sizes[-1] * 2)
    return sizes
