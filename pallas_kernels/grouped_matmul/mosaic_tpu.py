"""Grouped matmul on TPU: weights stream through VMEM once, rows meet them there.

The grid is (column blocks, visits): for a block of columns, the visits of `tiles.py` in the order of their rows. Each
visit needs one block of rows [R, D] and one block of an expert's weights [D, C]; Pallas fetches the next visit's blocks
while this one computes, and fetches nothing when the block stays the same:

    visit      0            1            2            3
    rows       tile 0       tile 0 (=)   tile 1       tile 1 (=)      all of them once, if they fit one tile (decode)
    weights    expert 0     expert 1     expert 1 (=) expert 3        expert 2 has no rows: never fetched
    out        first: zeros, then rows of 0 and of 1   ...            written to HBM when the tile is done

D is not cut, so that weights are fetched once a column block however many tiles an expert's rows span. Within a tile, a
visit that needs all of it multiplies it at once, which suits the MXU best; another only pieces of `piece_rows` rows,
from the expert's first row on: a tile can be large while an expert with four rows costs one piece.

A product mixes no rows, so whatever is in rows of nobody, NaN included, stays in them and is masked when stored.

Axis letters: M rows, D contracted, F columns, E experts, G contracted elements a scale; R tile_rows, C block_f.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.config import LANES, SUBLANES, TpuBlocks, depth_chunk
from pallas_kernels.grouped_matmul.spec import ExpertsSpec
from pallas_kernels.grouped_matmul.tiles import GroupTiles
from pallas_kernels.interpret import tpu_params
from quant.experts import DTYPES, QuantizedExperts


def _dot(x, rhs_ref, scales_ref, depth, columns, group: int):
    """x[r, d] times the weights [depth, columns], float32; depth: a slice of D in whole groups.

    Without the scales where there is one a column (group is D).
    """
    dot = partial(jnp.dot, preferred_element_type=jnp.float32)
    if x.dtype == jnp.float32:  # else the MXU rounds it to bfloat16
        dot = partial(dot, precision=lax.Precision.HIGHEST)
    weights = rhs_ref[0, depth, columns]
    if group == rhs_ref.shape[1]:
        return dot(x, weights.astype(x.dtype))
    groups = x.shape[1] // group
    scales = scales_ref[0, pl.ds(pl.multiple_of(depth.start // group, groups), groups), columns]
    total = jnp.zeros((), jnp.float32)
    for i in range(groups):  # a scale multiplies the product of its group, never the weights
        part = slice(i * group, (i + 1) * group)
        total += dot(x[:, part], weights[part].astype(x.dtype)) * scales[i : i + 1]
    return total


def _kernel(
    # GroupTiles, prefetched to SMEM
    expert_ref,  # [V]
    weights_ref,  # [V]
    row_ref,  # [V]
    start_ref,  # [V]
    end_ref,  # [V]
    # inputs
    lhs_ref,  # [R, D]
    rhs_ref,  # [1, D, C]
    scales_ref,  # [1, D // G, C] float32, or None
    # output
    out_ref,  # [R, C]
    # scratch
    sum_ref,  # [R, step_f] float32, or None where D is one chunk
    *,
    blocks: TpuBlocks,
    chunk: int,
    group: int,
):
    visit = pl.program_id(1)
    row = row_ref[visit]
    start, end = start_ref[visit] - row, end_ref[visit] - row
    tile, piece, step = blocks.tile_rows, blocks.piece_rows, blocks.step_f

    @pl.when((visit == 0) | (row != row_ref[jnp.maximum(visit - 1, 0)]))
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    def product(rows, columns):
        """Over all of D. In chunks where it is long: one product of everything is code and registers without end."""
        if sum_ref is None:
            return _dot(lhs_ref[rows, :], rhs_ref, scales_ref, pl.ds(0, chunk), columns, group)
        sums = sum_ref.at[: rows.size]
        sums[...] = jnp.zeros_like(sums)

        def one_chunk(index, _):
            depth = pl.ds(pl.multiple_of(index * chunk, chunk), chunk)
            sums[...] += _dot(lhs_ref[rows, depth], rhs_ref, scales_ref, depth, columns, group)
            return 0

        lax.fori_loop(0, lhs_ref.shape[1] // chunk, one_chunk, 0)
        return sums[...]

    def multiply(first, size: int):
        """The rows first .. first + size - 1 of the tile, all columns of the block."""
        rows = pl.ds(first, size)

        def one_step(at, _):
            columns = pl.ds(pl.multiple_of(at * step, step), step)
            value = product(rows, columns)
            if scales_ref is not None and group == rhs_ref.shape[1]:
                value *= scales_ref[0, :, columns]
            value = value.astype(out_ref.dtype)
            at_row = first + lax.broadcasted_iota(jnp.int32, value.shape, 0)
            out_ref[rows, columns] = jnp.where((at_row >= start) & (at_row < end), value, out_ref[rows, columns])
            return 0

        lax.fori_loop(0, blocks.block_f // step, one_step, 0)

    def one_piece(index, _):
        # The last piece moves back into the tile: some rows are computed twice, to the same bits.
        first = jnp.minimum(begin + index * piece, tile - piece)
        multiply(pl.multiple_of(first, SUBLANES), piece)
        return 0

    begin = lax.div(start, SUBLANES) * SUBLANES
    pieces = pl.cdiv(end - begin, piece)
    whole = pieces * piece >= tile
    used = weights_ref[visit] > 0
    if piece < tile:

        @pl.when(used & ~whole)
        def _():
            lax.fori_loop(0, pieces, one_piece, 0)

    @pl.when(used & whole)
    def _():
        multiply(0, tile)


def grouped_matmul(
    lhs: jax.Array, rhs, tiles: GroupTiles, *, out_dtype, blocks: TpuBlocks, vmem_bytes: int, interpret: bool = False
) -> jax.Array:
    """See `api.GroupedMatmulFn`. tiles start at multiples of blocks.tile_rows; vmem_bytes: what the blocks need."""
    quantized = isinstance(rhs, QuantizedExperts)
    values, scales = (rhs.values, [rhs.scales]) if quantized else (rhs, [])
    (num_rows, depth), columns = lhs.shape, values.shape[2]
    tile, block = blocks.tile_rows, blocks.block_f

    def rows_of(f, visit, expert, weights, row, start, end):
        return lax.div(row[visit], tile), 0

    def weights_of(f, visit, expert, weights, row, start, end):
        return expert[visit], 0, f

    def out_of(f, visit, expert, weights, row, start, end):
        return lax.div(row[visit], tile), f

    in_specs = [pl.BlockSpec((tile, depth), rows_of), pl.BlockSpec((1, depth, block), weights_of)]
    group = rhs.group_size if quantized else depth
    chunk = depth_chunk(depth, group)
    in_specs += [pl.BlockSpec((1, a.shape[1], block), weights_of) for a in scales]

    def kernel(*refs):
        refs = list(refs)
        if not quantized:
            refs.insert(7, None)
        if chunk == depth:
            refs.append(None)
        _kernel(*refs, blocks=blocks, chunk=chunk, group=group)

    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(pl.cdiv(columns, block), tiles.count),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((tile, block), out_of),
            scratch_shapes=[] if chunk == depth else [pltpu.VMEM((tile, blocks.step_f), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, columns), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_bytes
        ),
        interpret=tpu_params() if interpret else False,
        name="grouped_matmul",
    )
    operands = (tiles.expert, tiles.weights, tiles.row, tiles.start, tiles.end, lhs, values)
    return call(*operands, *scales)


def unsupported(spec: ExpertsSpec) -> str | None:
    """What the kernel lacks for the spec, or None."""
    dtype, weights = jnp.dtype(spec.dtype), jnp.dtype(spec.weight_dtype)
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"rows of {dtype} (it takes bfloat16 and float32)"
    if weights not in (dtype, *DTYPES):
        return f"weights of {weights} with rows of {dtype} (it takes {dtype}, {', '.join(map(str, DTYPES))})"
    if spec.scale_group is not None and spec.scale_group % LANES:
        return f"scales of {spec.scale_group} elements (it takes multiples of {LANES}, or one a column)"
    return None
