"""Block sizes of the kernels, the memory they take, and what a launch costs.

Axis letters: M rows, D contracted, F columns, E experts, G contracted elements a scale.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.devices import Device, KiB, MiB
from pallas_kernels.grouped_matmul.spec import Problem
from pallas_kernels.tuning import Estimate, choose, require_fit

LANES = 128  # numbers in a row of a TPU vector register
SUBLANES = 16  # rows of a TPU tile of 16-bit numbers: pieces of rows start at multiples of it
COMPUTE_WARPGROUPS = 2  # on a GPU; one more moves data
BLOCK_D = 64  # 128 bytes of bf16: the widest swizzle of shared memory

_STEP_SECONDS = 0.7e-6  # what a step of a TPU grid costs besides its work: 0.35 us is often measured, twice for margin
_GPU_ITEM_CYCLES = 1500  # to fill the accumulators' pipeline and to store, per work item


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _power_of_two(x: float) -> int:
    """The smallest that is not below x."""
    return 1 << max(0, int(x - 1e-9)).bit_length() if x > 1 else 1


def _require(value: int, name: str, multiple: int, why: str) -> None:
    if value < multiple or value % multiple:
        raise ValueError(f"{name}={value} must be a positive multiple of {multiple}, {why}")


@dataclass(frozen=True, kw_only=True)
class TpuBlocks:
    """tile_rows: rows fetched at once. piece_rows: of those, multiplied at once where an expert has only some.
    block_f: columns of weights fetched at once, over all of D. step_f: of those, multiplied at once."""

    tile_rows: int
    piece_rows: int
    block_f: int
    step_f: int

    def __post_init__(self):
        _require(self.tile_rows, "tile_rows", SUBLANES, "the rows of a tile of registers")
        _require(self.piece_rows, "piece_rows", SUBLANES, "the rows of a tile of registers")
        _require(self.step_f, "step_f", LANES, "the lanes of a register")
        _require(self.block_f, "block_f", self.step_f, f"step_f={self.step_f}")
        if self.piece_rows > self.tile_rows:
            raise ValueError(f"piece_rows={self.piece_rows} must not exceed tile_rows={self.tile_rows}")


@dataclass(frozen=True, kw_only=True)
class GpuBlocks:
    """tile_rows x block_f: results of a work item, half of the columns for each of two warpgroups. stages: blocks of
    rows and weights, BLOCK_D deep, in flight or in use."""

    tile_rows: int
    block_f: int
    stages: int

    def __post_init__(self):
        _require(self.tile_rows, "tile_rows", 64, "the rows of a wgmma")
        _require(self.block_f, "block_f", 128, "a swizzled tile for each of two warpgroups")
        if self.tile_rows * self.block_f > 128 * 256:
            raise ValueError(
                f"tile_rows={self.tile_rows} x block_f={self.block_f} results do not fit the registers of two "
                f"warpgroups: at most {128 * 256}, as 128 x 256"
            )
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2, to fetch one block while another is read")


def _itemsize(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


# ---- TPU


def tpu_tile_rows(num_rows: int) -> int:
    """All rows in one tile if they are few: fetched once. Else enough that weights are reused as often as the MXU
    needs, on every TPU since v5e, to be the limit."""
    return min(512, round_up(max(num_rows, 1), SUBLANES))


def tpu_piece_rows(tile_rows: int, problem: Problem) -> int:
    """Twice what an expert has on average, from 32 to 128: less does not fill the MXU, more multiplies others' rows."""
    average = problem.rows / problem.active
    return min(tile_rows, max(32, min(128, _power_of_two(2 * average))))


def tpu_estimate(blocks: TpuBlocks, problem: Problem, device: Device) -> Estimate:
    row, weight, out = _itemsize(problem.dtype), _itemsize(problem.weight_dtype), _itemsize(problem.out_dtype)
    tile, piece, block = blocks.tile_rows, blocks.piece_rows, blocks.block_f
    tiles, column_blocks = -(-problem.rows // tile), -(-problem.columns // block)
    columns = column_blocks * block
    groups = problem.depth // problem.group if problem.group else 0
    visits = tiles + problem.active - 1
    pieces = problem.active * -(-(problem.rows // problem.active + SUBLANES // 2) // piece)
    flops = 2 * pieces * piece * problem.depth * columns
    # Weights pass through registers into the MXU once a piece: half a bundle a register, read from schedules, and as
    # long for 128 columns as for the 256 that the MXU is wide.
    passes = problem.depth * columns * max(256 / blocks.step_f, 1) / 2048
    cycles = flops / device.bf16_flops * device.clock_hz + pieces * passes / 2
    cycles += visits * column_blocks * _STEP_SECONDS * device.clock_hz
    buffers = tile * problem.depth * row + problem.depth * block * weight + tile * block * out
    buffers += round_up(groups, 8) * block * 4
    chunk = depth_chunk(problem.depth, problem.group or problem.depth)
    # Beside the buffers: sums, and what the compiler keeps of a product's operands while it runs.
    beside = 2 * tile * blocks.step_f * 4 + tile * chunk * row + (chunk * blocks.step_f * row if problem.group else 0)
    if row == 4:  # float32 products are made of three bfloat16 parts of each operand
        beside += 6 * chunk * (tile + blocks.step_f)
    return Estimate(
        hbm_bytes=problem.active * problem.weight_bytes + problem.rows * problem.columns * out
        + problem.rows * problem.depth * row * (1 if tiles == 1 else column_blocks),
        flops=flops,
        cycles=cycles,
        fixed_seconds=device.dma_seconds(problem.depth * block * weight),  # the first block hides behind nothing
        block_bytes=2 * buffers + beside + MiB,
    )


def depth_chunk(depth: int, group: int) -> int:
    """How much of D one product takes: all of it, or at most 4096, in whole tiles of 8 groups of scales."""
    if depth <= 4096:
        return depth
    unit = LANES if group == depth else 8 * group
    return next((chunk for chunk in range(4096 // unit * unit, 0, -unit) if depth % chunk == 0), depth)


def _step_f(block_f: int, tile_rows: int, depth: int) -> int:
    """The widest step whose product, unrolled, stays about a thousand million multiplications: code has a limit."""
    fits = [step for step in (1024, 512, 256, 128) if block_f % step == 0]
    return next((step for step in fits if tile_rows * min(depth, 4096) * step <= 1 << 30), fits[-1])


def tpu_candidates(problem: Problem, tile_rows: int) -> list[TpuBlocks]:
    piece = tpu_piece_rows(tile_rows, problem)
    widths = sorted({min(width, round_up(problem.columns, LANES))
                     for width in (128, 256, 384, 512, 768, 1024, 1536, 2048)}, reverse=True)  # fmt: skip
    return [TpuBlocks(tile_rows=tile_rows, piece_rows=piece, block_f=width,
                      step_f=_step_f(width, tile_rows, problem.depth)) for width in widths]  # fmt: skip


def tpu_blocks(problem: Problem, tile_rows: int, device: Device) -> TpuBlocks:
    """ValueError when nothing fits VMEM."""
    return choose("grouped_matmul/mosaic_tpu", problem.shape, tpu_candidates(problem, tile_rows),
                  lambda blocks: tpu_estimate(blocks, problem, device), device)  # fmt: skip


def require_tpu_fit(blocks: TpuBlocks, problem: Problem, device: Device) -> None:
    """ValueError with the bytes, VMEM's size and the nearest blocks that fit."""
    smaller = {rows for rows in (512, 256, 128, 64, 32, 16) if rows < blocks.tile_rows} | {blocks.tile_rows}
    candidates = [candidate for rows in smaller for candidate in tpu_candidates(problem, rows)]
    require_fit("grouped_matmul/mosaic_tpu", blocks, candidates, lambda b: tpu_estimate(b, problem, device), device)


# ---- GPU


def gpu_tile_rows(num_rows: int, num_experts: int) -> int:
    return 128 if num_rows / max(1, min(num_experts, num_rows)) >= 96 else 64


def gpu_estimate(blocks: GpuBlocks, problem: Problem, device: Device) -> Estimate:
    row, weight, out = _itemsize(problem.dtype), _itemsize(problem.weight_dtype), _itemsize(problem.out_dtype)
    tile, block = blocks.tile_rows, blocks.block_f
    column_blocks, steps = -(-problem.columns // block), -(-problem.depth // BLOCK_D)
    visits = problem.active * -(-(problem.rows // problem.active + 4) // tile)
    rounds = -(-visits * column_blocks // device.cores)
    stage = BLOCK_D * (tile * row + block * weight)
    wide = 2 * BLOCK_D * block * row if problem.group else 0
    # A step takes as long as the slowest of: HBM's share (an expert's weights come from there once, then from the L2
    # cache), tensor cores, shared memory (weights are written, perhaps converted, and read).
    step = max(
        device.dma_cycles(BLOCK_D * block * weight) * device.cores * problem.active / visits,
        2 * tile * block * BLOCK_D / (device.bf16_flops / device.cores / device.clock_hz),
        BLOCK_D * (block * (weight + (weight + 2 * row if problem.group else row)) + 3 * tile * row) / 128,
    )
    return Estimate(
        hbm_bytes=problem.active * problem.weight_bytes + problem.rows * (problem.depth * row + problem.columns * out),
        flops=2 * visits * column_blocks * tile * block * problem.depth,
        cycles=rounds * (steps * step + _GPU_ITEM_CYCLES),
        block_bytes=blocks.stages * stage + wide + tile * block * out + KiB,
    )


def gpu_candidates(problem: Problem, tile_rows: int) -> list[GpuBlocks]:
    """More stages first: of equal cost, they hide more latency. ValueError when TMA cannot cut the weights in tiles."""
    depth, columns = problem.depth, problem.columns
    if depth % BLOCK_D or columns % 64:
        raise ValueError(f"D={depth} and F={columns} must be multiples of {BLOCK_D} and 64 on a GPU")
    return [GpuBlocks(tile_rows=tile_rows, block_f=block, stages=stages)
            for block in (256, 128) for stages in (6, 5, 4, 3, 2) if columns % column_tile(block, problem) == 0]


def column_tile(block_f: int, problem: Problem) -> int:
    """What F must be a multiple of: a swizzled tile of 128 bytes; with scales, which no TMA reads, half a block."""
    return block_f // COMPUTE_WARPGROUPS if problem.group else 64


def gpu_blocks(problem: Problem, tile_rows: int, device: Device) -> GpuBlocks:
    """ValueError when nothing fits shared memory, or D or F."""
    return choose("grouped_matmul/mosaic_gpu", problem.shape, gpu_candidates(problem, tile_rows),
                  lambda blocks: gpu_estimate(blocks, problem, device), device)  # fmt: skip


def require_gpu_fit(blocks: GpuBlocks, problem: Problem, device: Device) -> None:
    """ValueError with the bytes, shared memory's size and the nearest blocks that fit."""
    candidates = [c for rows in {64, blocks.tile_rows} for c in gpu_candidates(problem, rows)]
    if problem.columns % (tile := column_tile(blocks.block_f, problem)):
        raise ValueError(f"block_f={blocks.block_f} needs F={problem.columns} to be a multiple of {tile}")
    require_fit("grouped_matmul/mosaic_gpu", blocks, candidates, lambda b: gpu_estimate(b, problem, device), device)
