"""Puts the parts of items together that several workers attended to: the log-sum-exp merge of flash-decoding.

One block of the grid for each worker, warpgroup's rows and columns of the head; it does nothing unless an item begins
in that worker and goes on in the next. Parts are added in the order of their workers, so that a second run is equal in
bits.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interpret import gpu_params
from pallas_kernels.ragged_paged_attention.mosaic_gpu.config import QUERY_ROWS, out_columns
from pallas_kernels.ragged_paged_attention.mosaic_gpu.kernel import (
    LOWEST,
    ROW,
    SEMANTICS,
    TILE,
    Launch,
    finish,
    rows_of,
)  # fmt: skip
from pallas_kernels.ragged_paged_attention.mosaic_gpu.schedule import (
    MERGE_ITEM,
    MERGE_PARTS,
    OFFSET,
    QUERY,
    ROWS,
    Schedule,
)  # fmt: skip

_AT_ONCE = 4  # parts whose loads are under way together


def _merge(refs: dict, launch: Launch, worker, part, column) -> None:
    width = out_columns(launch.head_dim)
    item, count = refs["workers"][worker, MERGE_ITEM], refs["workers"][worker, MERGE_PARTS]

    def load(index):
        place = 2 * (worker + index) + jnp.where(index == 0, 1, 0)
        out = refs["part_out"].at[place, part, :, pl.ds(column * width, width)]
        return (
            plgpu.load(refs["part_max"].at[place, part], layout=ROW, optimized=False),
            plgpu.load(refs["part_sum"].at[place, part], layout=ROW, optimized=False),
            plgpu.load(out, layout=TILE, optimized=False),
        )

    def some(step, carry):
        first = step * _AT_ONCE
        loaded = [load(jnp.minimum(first + i, count - 1)) for i in range(_AT_ONCE)]
        acc, maximum, total = carry
        for i, (part_max, part_sum, part_out) in enumerate(loaded):
            part_max = jnp.where(first + i < count, part_max, LOWEST * 2)  # past the last: weighs nothing
            highest = jnp.maximum(maximum, part_max)
            keep, add = jnp.exp2(maximum - highest), jnp.exp2(part_max - highest)
            acc = acc * rows_of(keep, acc.shape) + part_out * rows_of(add, acc.shape)
            total = total * keep + part_sum * add
            maximum = highest
        return acc, maximum, total

    @pl.when(item >= 0)
    def _():
        acc = plgpu.layout_cast(jnp.zeros((QUERY_ROWS, width), jnp.float32), TILE)
        maximum = plgpu.layout_cast(jnp.full((QUERY_ROWS,), LOWEST, jnp.float32), ROW)
        total = plgpu.layout_cast(jnp.zeros((QUERY_ROWS,), jnp.float32), ROW)
        steps = lax.div(count + _AT_ONCE - 1, _AT_ONCE)
        acc, maximum, total = lax.fori_loop(0, steps, some, (acc, maximum, total))
        block, head = lax.div(item, launch.num_kv_heads), lax.rem(item, launch.num_kv_heads)
        row = part * QUERY_ROWS
        finish(refs, launch, acc, maximum, total, head=head, query=refs["items"][block, QUERY] + row,
               rows=jnp.clip(refs["items"][block, ROWS] - row, 0, QUERY_ROWS),
               offset=refs["items"][block, OFFSET] + row, lane=0, column=column * width)  # fmt: skip
        plgpu.wait_smem_to_gmem(0)


def merge(launch: Launch, schedule: Schedule, out, part_out, part_max, part_sum, sinks: jax.Array | None) -> jax.Array:
    """Completes `out` [K, rows, H] in place with the rows of cut items."""
    width = out_columns(launch.head_dim)
    operands = dict(workers=schedule.workers, items=schedule.items, part_out=part_out, part_max=part_max,
                    part_sum=part_sum)  # fmt: skip
    if sinks is not None:
        operands["sinks"] = sinks
    names = (*operands, "out")

    def body(*refs, out_smem):
        named = dict(zip(names, refs, strict=True)) | dict(out_smem=out_smem)
        _merge(named, launch, lax.axis_index("worker"), lax.axis_index("part"), lax.axis_index("column"))

    call = plgpu.kernel(
        body,
        out_type=(),
        scratch_types=dict(out_smem=plgpu.SMEM((1, QUERY_ROWS, width), launch.dtype)),
        grid=(launch.workers, launch.parts, launch.head_dim // width),
        grid_names=("worker", "part", "column"),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=SEMANTICS),
        interpret=gpu_params() if launch.interpret else None,
    )
    out = jax.new_ref(out)
    call(*operands.values(), out)
    return jax.freeze(out)
