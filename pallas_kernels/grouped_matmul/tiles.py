"""Which rows meet which expert: one short list for a step, shared by every matmul of a MoE layer.

The rows of a step, sorted by expert, are cut into tiles of `tile_rows` rows. A visit is one tile with one expert's
weights; it writes the rows start .. end - 1 of the tile. An expert without rows is never visited, so that its weights
are never read. Rows of no local expert (past the sum of the sizes, or of another device's experts) form visits without
weights, which write zeros.

    rows        0       8       16      24      32        tile_rows = 16, aligned
    experts     0 0 0 0 0 1 1 1 1 1 1 1 1 1 3 3 . .
    visits      (tile 0, expert 0) (tile 0, expert 1) (tile 16, expert 1) (tile 16, expert 3)

Tiles start at multiples of `align`. On a TPU that is tile_rows: a block of rows is fetched and written once, however
many experts meet in it. On a GPU it is 8: an expert's tiles start close to its first row, so that fewer are needed, and
every row is written by one visit.

Axis letters: M rows, E experts held here, V visits at most.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["expert", "row", "weights", "start", "end", "count"],
    meta_fields=["tile_rows", "align", "num_rows", "num_experts"],
)
@dataclass(frozen=True, kw_only=True)
class GroupTiles:
    """The visits of a step, in the order of their rows. Entries from `count` on mean nothing."""

    expert: Int[Array, " V"]  # which of the experts held here
    row: Int[Array, " V"]  # first row of the tile
    weights: Int[Array, " V"]  # 0: the rows belong to no expert held here and come out as zeros
    start: Int[Array, " V"]  # the rows written
    end: Int[Array, " V"]
    count: Int[Array, ""]
    tile_rows: int
    align: int
    num_rows: int  # M
    num_experts: int  # E


def group_tiles(
    group_sizes: Int[Array, " Eall"],
    *,
    num_rows: int,
    tile_rows: int,
    align: int,
    num_experts: int | None = None,
    group_offset: Int[Array, ""] | int = 0,
) -> GroupTiles:
    """The visits of the experts group_offset .. group_offset + num_experts - 1 (all of them by default).

    group_sizes counts the rows of every expert, also of those that other devices hold.
    """
    num_experts = group_sizes.shape[0] if num_experts is None else num_experts
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), num_rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    start, end = (jax.lax.dynamic_slice_in_dim(a, group_offset, num_experts) for a in (starts, ends))
    low, high = start[0], end[-1]
    held, used = high > low, end > start

    # Two groups without weights around the experts: the rows before them and the rows after them.
    block = tile_rows if align == tile_rows else 1  # a block that an expert's visit writes needs no visit for zeros
    before = jnp.where(held, low // block * block, num_rows)
    after = jnp.where(held, -(-high // block) * block, num_rows)
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), start, after[None]])
    end = jnp.concatenate([before[None], end, jnp.full(1, num_rows, jnp.int32)])
    first = start // align * align  # the first row of the first tile
    visits = jnp.where(end > start, -(-(end - first) // tile_rows), 0)

    until = jnp.cumsum(visits)
    visit = jnp.arange(max_visits(num_rows, tile_rows, num_experts, align), dtype=jnp.int32)
    group = jnp.searchsorted(until, visit, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, num_experts + 1)
    row = first[group] + (visit - until[group] + visits[group]) * tile_rows
    # A visit without weights names the expert whose weights come next or were there before.
    last = num_experts - 1 - jnp.argmax(used[::-1])
    neighbour = jnp.where(held, jnp.where(group == 0, jnp.argmax(used), last), 0)
    weights = (group > 0) & (group <= num_experts)
    return GroupTiles(
        expert=jnp.where(weights, group - 1, neighbour).astype(jnp.int32),
        weights=weights.astype(jnp.int32),
        row=row,
        start=jnp.maximum(start[group], row),
        end=jnp.minimum(end[group], row + tile_rows),
        count=until[-1],
        tile_rows=tile_rows,
        align=align,
        num_rows=num_rows,
        num_experts=num_experts,
    )


def max_visits(num_rows: int, tile_rows: int, num_experts: int, align: int) -> int:
    """No sizes need more visits than this."""
    if align == tile_rows:  # every tile once, and once more for each expert but one
        return -(-num_rows // tile_rows) + num_experts - 1
    groups = num_experts + 2  # each may lose align - 1 rows of its first tile, and have a last tile that is not full
    return (num_rows + groups * (align - 1)) // tile_rows + groups
