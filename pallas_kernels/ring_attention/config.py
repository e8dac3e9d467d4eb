"""Block sizes of ring attention, what they cost in on-chip memory, and which are chosen.

Axis letters: N query heads, K kv heads, G = N / K, H head dim, B page tokens; D devices; Q tokens of a query tile,
W tokens of a KV block, R blocks of a round.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.devices import Device, KiB, MiB
from pallas_kernels.tuning import Estimate, choose, require_fit

LANES = 128
KERNEL = "ring_attention/mosaic_tpu"  # in the tuned tables
_STEP_SECONDS = 1e-6  # of a ring step besides its work: a round trip to the neighbour and the loops around it
# Bundles a (query, key, head) for blocks of W keys, read from the compiler's schedules for v6e at head size 128, tiles
# of 1024 rows: 3.7e-3 at 256, 3.4e-3 at 512, 3.1e-3 at 1024. What is per query (maxima, accumulators) is shared by the
# keys of a block; what is per block and head (transposing values, filling the matrix unit) by the queries of a tile.
_PAIR_BUNDLES, _QUERY_BUNDLES, _HEAD_BUNDLES = 2.75e-3, 0.21, 100


@dataclass(frozen=True, kw_only=True)
class RingConfig:
    """query_tokens: of a tile (Q). kv_tokens: of a block (W), whole pages. round_tokens: of the KV that a device sends
    around at a time, whole blocks. Two buffers of that size are all that the ring needs beside the cache; accumulators
    are read and written once a round and step, so it should be thousands."""

    query_tokens: int
    kv_tokens: int
    round_tokens: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.round_tokens % self.kv_tokens:
            raise ValueError(f"round_tokens={self.round_tokens} must be a multiple of kv_tokens={self.kv_tokens}")

    def check_page_size(self, page_size: int) -> None:
        if self.kv_tokens % page_size:
            raise ValueError(f"kv_tokens={self.kv_tokens} must be a multiple of {page_size=}")

    def blocks_of_round(self, num_rows: int, row_pages: int, page_size: int) -> int:
        """R: never more than the page table can name."""
        return min(self.round_tokens // self.kv_tokens, num_rows * -(-row_pages * page_size // self.kv_tokens))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One launch; sizes of one device. row_dim: numbers of K (and of V) in a stored row. side_by_side: both in one row.
    The dtypes are names."""

    num_tokens: int
    num_rows: int
    row_pages: int
    num_heads: int
    num_kv_heads: int
    row_dim: int
    page_size: int
    devices: int
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    side_by_side: bool = False

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def lanes(self) -> int:
        """Width of a row of the cache in memory."""
        width = 2 * self.row_dim if self.side_by_side else self.row_dim
        return -(-width // LANES) * LANES

    @property
    def kv_token_bytes(self) -> int:
        parts = 1 if self.side_by_side else 2
        return parts * self.num_kv_heads * self.lanes * jnp.dtype(self.kv_dtype).itemsize

    @property
    def shape(self) -> dict[str, int | str]:
        """The key of the tuned table."""
        return {
            "N": self.num_heads, "K": self.num_kv_heads, "H": self.row_dim, "B": self.page_size,
            "T": self.num_tokens, "D": self.devices, "dtype": self.dtype, "kv_dtype": self.kv_dtype,
        }  # fmt: skip


def vmem_bytes(config: RingConfig, problem: Problem) -> dict[str, int]:
    """Bytes of VMEM by purpose. Whatever is moved has two buffers."""
    item = jnp.dtype(problem.dtype).itemsize
    rows = config.query_tokens * problem.group
    tile = problem.num_kv_heads * rows
    return {
        "queries": 2 * tile * problem.lanes * item,
        "accumulators": 2 * tile * (problem.lanes + 2 * 8) * 4,
        "output": tile * problem.lanes * item,
        "kv": 2 * config.kv_tokens * problem.kv_token_bytes,
        "positions": 2 * 8 * (rows + config.kv_tokens) * 4 + config.kv_tokens * LANES * 4,
        "sinks": 8 * tile * 4,
        # Of one head: two pieces' scores and weights, the transposed values.
        "scores": 3 * config.kv_tokens * min(rows, 256) * 4 + config.kv_tokens * problem.lanes * (item + 4),
        "compiler": 2 * MiB,
    }


def smem_bytes(config: RingConfig, problem: Problem) -> int:
    """Bytes of the plan's scalars."""
    per_round = config.blocks_of_round(problem.num_rows, problem.row_pages, problem.page_size)
    blocks = problem.num_rows * -(-problem.row_pages * problem.page_size // config.kv_tokens)
    rounds = -(-blocks // per_round)
    blocks = rounds * per_round
    tiles = num_tiles(problem.num_tokens, problem.num_rows, config.query_tokens)
    pages, steps = config.kv_tokens // problem.page_size, rounds * problem.devices
    numbers = blocks * (pages + problem.devices) + 3 * steps + 7 * steps * tiles
    return 4 * numbers + 16 * KiB  # each array is rounded up


def num_tiles(num_tokens: int, num_rows: int, size: int) -> int:
    """The most tiles of `size` that T tokens of S rows make."""
    return (num_tokens + num_rows * (size - 1)) // size


def estimate(config: RingConfig, problem: Problem) -> Estimate:
    """Of a launch that is as full as its shape allows: causal, so half of the KV of all devices is seen."""
    tiles = num_tiles(problem.num_tokens, problem.num_rows, config.query_tokens)
    rows = tiles * config.query_tokens * problem.group
    held = problem.row_pages * problem.page_size
    rounds = -(-problem.num_rows * held // config.round_tokens)
    steps = rounds * problem.devices
    # What a tile sees of a device's KV: half, and on average half a block and half a tile's breadth more.
    seen = min(held, held / 2 + config.kv_tokens / 2 + config.query_tokens / 2)
    pairs = problem.num_kv_heads * rows * problem.devices * seen
    accumulators = problem.num_kv_heads * rows * (problem.lanes + 2) * 4
    buffers = vmem_bytes(config, problem)
    return Estimate(
        hbm_bytes=tiles * problem.devices * seen * problem.kv_token_bytes + 2 * steps * accumulators,
        flops=4 * pairs * problem.lanes,
        cycles=pairs * (_PAIR_BUNDLES + _QUERY_BUNDLES / config.kv_tokens)
        + problem.num_kv_heads * tiles * problem.devices * seen / config.kv_tokens * _HEAD_BUNDLES,
        fixed_seconds=steps * _STEP_SECONDS,
        block_bytes=sum(buffers.values()),
    )


def candidates(problem: Problem) -> list[RingConfig]:
    """Whole pages, whole registers, and scalars that fit."""
    configs = []
    for query_tokens in (512, 256, 128, 64, 32, 16):
        if query_tokens * problem.group % LANES or query_tokens >= 2 * max(problem.num_tokens, LANES):
            continue
        for kv_tokens in (512, 1024, 256, 128, problem.page_size):
            if kv_tokens % problem.page_size == 0 and kv_tokens % LANES == 0:
                rounds = (4096, 16384) if kv_tokens <= 4096 else (kv_tokens,)
                if problem.devices == 1:  # nothing travels: all in one round
                    rounds = (problem.num_rows * -(-problem.row_pages * problem.page_size // kv_tokens) * kv_tokens,)
                configs += [RingConfig(query_tokens=query_tokens, kv_tokens=kv_tokens, round_tokens=tokens)
                            for tokens in rounds if tokens % kv_tokens == 0]  # fmt: skip
    return list(dict.fromkeys(configs))


def choose_config(problem: Problem, device: Device) -> RingConfig:
    """The measured sizes for the chip where there are any, else the cheapest that fit; ValueError if none do."""
    options = candidates(problem)
    if not options:
        raise ValueError(f"no tile of {problem.group} heads a group over pages of {problem.page_size} tokens is a "
                         f"multiple of {LANES}")  # fmt: skip
    fitting = [config for config in options if smem_bytes(config, problem) <= device.smem_bytes]
    if not fitting:
        check_smem(min(options, key=lambda config: smem_bytes(config, problem)), problem, device)
    return choose(KERNEL, problem.shape, fitting, lambda config: estimate(config, problem), device)


def check_smem(config: RingConfig, problem: Problem, device: Device) -> None:
    needed = smem_bytes(config, problem)
    if needed > device.smem_bytes:
        fitting = [c for c in candidates(problem) if smem_bytes(c, problem) <= device.smem_bytes]
        nearest = min(fitting, key=lambda c: smem_bytes(c, problem), default=None)
        raise ValueError(
            f"{KERNEL}: {config} needs {needed:,} bytes of SMEM for its plan and {device.name} has "
            f"{device.smem_bytes:,}; "
            + (f"{nearest} fits" if nearest else "no block size fits: take fewer rows or shorter chunks")
        )


def check_fit(config: RingConfig, problem: Problem, device: Device) -> None:
    """ValueError, with the numbers and the nearest configuration that fits, if the launch would not."""
    check_smem(config, problem, device)
    require_fit(KERNEL, config, candidates(problem), lambda c: estimate(c, problem), device)


def xla_config(page_size: int) -> RingConfig:
    """For the loop of plain XLA, whose blocks live in a CPU's cache: small; and for simulated kernels."""
    kv_tokens = page_size * max(128 // page_size, 1)
    return RingConfig(query_tokens=64, kv_tokens=kv_tokens, round_tokens=kv_tokens * max(2048 // kv_tokens, 1))
