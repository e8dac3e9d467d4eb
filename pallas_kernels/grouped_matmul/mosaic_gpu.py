"""Grouped matmul on Hopper GPUs: one persistent block a multiprocessor, three warpgroups in it.

A work item is one visit (a tile of rows with one expert, `tiles.py`) and one block of columns. The items of a block of
the grid follow each other without a pause: the memory warpgroup runs ahead of the two that compute, also across items,
and keeps `stages` blocks of lhs and weights in flight by TMA.

    memory warpgroup     TMA: lhs[row .. +R, d .. +C], rhs[expert, d .. +C, f .. +F]   -> stage d % stages
    compute warpgroups   each takes half of the F columns: wgmma, accumulators in registers, over all of D
                         quantized: int8 or fp8 from shared memory -> registers -> bf16 in shared memory -> wgmma
    store                accumulators -> shared memory -> TMA, in pieces of a power of two rows (the size of a TMA box
                         is fixed, the row count of a visit is data)

Rows of the tile beyond the visit's last are multiplied and not stored; the rows of a product do not mix, so whatever is
in them, NaN included, stays out. TMA fills with zeros whatever lies beyond M or F, and does not store it.

Axis letters: M rows, D contracted, F columns, E experts, G contracted elements a scale; R tile_rows, C = BLOCK_D.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.config import BLOCK_D, COMPUTE_WARPGROUPS, GpuBlocks
from pallas_kernels.grouped_matmul.spec import ExpertsSpec
from pallas_kernels.grouped_matmul.tiles import GroupTiles
from pallas_kernels.interpret import gpu_params
from quant.experts import DTYPES, QuantizedExperts

ALIGN = 8  # rows: a tile in shared memory is made of groups of 8 rows, and TMA reads whole groups
_PANEL = 16  # visits that share a column block before the next: what is in flight stays in the L2 cache


def matrices(shape: tuple[int, ...], dtype):
    """Matrices in shared memory, tiled and swizzled as wgmma wants them."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tiling = plgpu.TilingTransform((8, swizzle * 8 // bits))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))  # pyright: ignore[reportAbstractUsage]


def _item(index, visits, column_blocks: int):
    """(visit, column block) of a work item: panels of _PANEL visits, column after column within one."""
    panel = index // (_PANEL * column_blocks)
    rest = index - panel * _PANEL * column_blocks
    height = jnp.minimum(_PANEL, visits - panel * _PANEL)
    return panel * _PANEL + lax.rem(rest, height), rest // height


def _powers(rows: int) -> list[int]:
    """The powers of two whose sums make every count from 1 to rows, largest first."""
    return [1 << bit for bit in reversed(range(rows.bit_length()))]


def _kernel(
    # GroupTiles, in global memory
    count_ref,  # [1]
    expert_ref,  # [V]
    weights_ref,  # [V]
    row_ref,  # [V]
    start_ref,  # [V]
    end_ref,  # [V]
    # inputs
    lhs_ref,  # [M, D]
    rhs_ref,  # [E, D, F]
    scales_ref,  # [E, D // G, F] float32, or None
    # output
    out_ref,  # [M, F]
    # shared memory
    lhs_smem,  # [stages, R, C]
    rhs_smem,  # [2, stages, C, F / 2]
    wide_smem,  # [2, 2, C, F / 2]: weights in lhs's dtype, or None
    out_smem,  # [2, R, F / 2]
    full,  # barriers [stages]: the stage's data is there
    empty,  # barriers [stages]: the stage may be filled
    *,
    blocks: GpuBlocks,
    group: int,
    sms: int,
):
    tile_rows, half = blocks.tile_rows, blocks.block_f // COMPUTE_WARPGROUPS
    stages = blocks.stages
    columns = pl.cdiv(rhs_ref.shape[2], blocks.block_f)
    steps = pl.cdiv(lhs_ref.shape[1], BLOCK_D)
    sm, warpgroup = lax.axis_index("sm"), lax.axis_index("warpgroup")
    visits = count_ref[0]
    items = pl.cdiv(jnp.maximum(visits * columns - sm, 0), sms)

    def place(item):
        visit, column = _item(sm + item * sms, visits, columns)
        return visit, column * blocks.block_f

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def _move():
        plgpu.set_max_registers(40, action="decrease")

        def one_item(item, done):
            visit, column = place(item)
            row, expert = pl.multiple_of(row_ref[visit], ALIGN), expert_ref[visit]

            def one_step(step, done):
                stage = lax.rem(done, stages)
                pl.when(done >= stages)(lambda: plgpu.barrier_wait(empty.at[stage]))
                depth = pl.ds(step * BLOCK_D, BLOCK_D)
                plgpu.copy_gmem_to_smem(lhs_ref.at[pl.ds(row, tile_rows), depth], lhs_smem.at[stage], full.at[stage])
                for side in range(COMPUTE_WARPGROUPS):
                    source = rhs_ref.at[expert, depth, pl.ds(column + side * half, half)]
                    plgpu.copy_gmem_to_smem(source, rhs_smem.at[side, stage], full.at[stage])
                return done + 1

            return lax.fori_loop(0, jnp.where(weights_ref[visit] > 0, steps, 0), one_step, done)

        lax.fori_loop(0, items, one_item, jnp.int32(0))

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(232, action="increase")

        def in_bounds(column):  # half a block may lie beyond F; its products are not stored
            return jnp.minimum(column, rhs_ref.shape[2] - half)

        def weights_of(step, stage, expert, column):
            """The stage's weights as an operand of wgmma."""
            if wide_smem is None:
                return rhs_smem.at[warpgroup, stage]
            wide = wide_smem.at[warpgroup, lax.rem(step, 2)]
            values = rhs_smem[warpgroup, stage]
            if values.dtype != jnp.int8:  # there is no way from fp8 to bf16 but through float32
                values = values.astype(jnp.float32)
            if group < lhs_ref.shape[1]:
                scale = scales_ref[expert, step * BLOCK_D // group, pl.ds(in_bounds(column), half)]
                values = values.astype(jnp.float32) * lax.broadcast_in_dim(scale, values.shape, [1])
            wide[...] = values.astype(lhs_ref.dtype)
            plgpu.commit_smem()
            return wide

        def one_item(item, done):
            visit, column = place(item)
            column = column + warpgroup * half
            expert = expert_ref[visit]
            used = jnp.where(weights_ref[visit] > 0, steps, 0)

            def product(acc):
                def one_step(step, done):
                    stage = lax.rem(done, stages)
                    plgpu.barrier_wait(full.at[stage])
                    plgpu.wgmma(acc, lhs_smem.at[stage], weights_of(step, stage, expert, column))
                    plgpu.wgmma_wait(1)  # the product of the step before is done: its stage is free
                    pl.when(step > 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(done + stages - 1, stages)]))
                    return done + 1

                lax.fori_loop(0, used, one_step, done)
                plgpu.wgmma_wait(0)
                pl.when(used > 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(done + used + stages - 1, stages)]))
                return acc[...]

            value = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((tile_rows, half), jnp.float32))
            if scales_ref is not None and group == lhs_ref.shape[1]:
                scale = scales_ref[expert, 0, pl.ds(in_bounds(column), half)]
                value = value * lax.broadcast_in_dim(scale, value.shape, [1])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem[warpgroup] = value.astype(out_ref.dtype)
            plgpu.commit_smem()
            start, at = start_ref[visit], start_ref[visit] - row_ref[visit]
            rows = end_ref[visit] - start
            for size in _powers(tile_rows):

                @pl.when(rows & size != 0)
                def _(size=size, start=start, at=at):
                    to = out_ref.at[pl.ds(start, size), pl.ds(column, half)]
                    plgpu.copy_smem_to_gmem(out_smem.at[warpgroup, pl.ds(at, size)], to)

                start, at = start + (rows & size), at + (rows & size)
            return done + used

        lax.fori_loop(0, items, one_item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def grouped_matmul(
    lhs: jax.Array, rhs, tiles: GroupTiles, *, out_dtype, blocks: GpuBlocks, sms: int, interpret: bool = False
) -> jax.Array:
    """See `api.GroupedMatmulFn`. tiles: of blocks.tile_rows, at multiples of ALIGN; sms: blocks of the grid."""
    quantized = isinstance(rhs, QuantizedExperts)
    values, scales = (rhs.values, [rhs.scales]) if quantized else (rhs, [])
    (num_rows, depth), columns = lhs.shape, values.shape[2]
    group = rhs.group_size if quantized else depth
    half, wide = blocks.block_f // COMPUTE_WARPGROUPS, lhs.dtype
    scratch = dict(
        lhs_smem=matrices((blocks.stages, blocks.tile_rows, BLOCK_D), wide),
        rhs_smem=matrices((COMPUTE_WARPGROUPS, blocks.stages, BLOCK_D, half), values.dtype),
        out_smem=plgpu.SMEM((COMPUTE_WARPGROUPS, blocks.tile_rows, half), out_dtype),
        full=plgpu.Barrier(num_arrivals=1 + COMPUTE_WARPGROUPS, num_barriers=blocks.stages),
        empty=plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=blocks.stages),
    )
    if quantized:
        scratch["wide_smem"] = matrices((COMPUTE_WARPGROUPS, 2, BLOCK_D, half), wide)
    body = partial(_kernel, blocks=blocks, group=group, sms=sms)

    def kernel(count, expert, weights, row, start, end, lhs, rhs, *rest, **smem):
        scales, out = rest if quantized else (None, *rest)
        smem.setdefault("wide_smem", None)
        body(count, expert, weights, row, start, end, lhs, rhs, scales, out, **smem)

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_rows, columns), out_dtype),
        scratch_types=scratch,
        grid=(sms,),
        grid_names=("sm",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=gpu_params() if interpret else None,
    )
    lhs = jnp.pad(lhs, ((0, -num_rows % ALIGN), (0, 0)))  # nothing where the rows are whole groups already
    operands = (tiles.count[None], tiles.expert, tiles.weights, tiles.row, tiles.start, tiles.end, lhs, values)
    return call(*operands, *scales)


def unsupported(spec: ExpertsSpec) -> str | None:
    """What the kernel lacks for the spec, or None."""
    dtype, weights = jnp.dtype(spec.dtype), jnp.dtype(spec.weight_dtype)
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"rows of {dtype} (tensor cores take bfloat16 and float16 without rounding them)"
    if weights not in (dtype, *DTYPES):
        return f"weights of {weights} with rows of {dtype} (it takes {dtype}, {', '.join(map(str, DTYPES))})"
    if spec.scale_group is not None and spec.scale_group % BLOCK_D:
        return f"scales of {spec.scale_group} elements (it takes multiples of {BLOCK_D}, or one a column)"
    if odd := [size for size in spec.sizes if size % BLOCK_D]:
        return f"D or F of {odd[0]} (it takes multiples of {BLOCK_D})"
    return None
