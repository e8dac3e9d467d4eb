"""Block sizes of ring attention, and what they cost in on-chip memory, known before a launch.

Axis letters: T tokens, S rows, N query heads, K kv heads, G = N / K, H head dim, B page tokens; Q tokens of a query tile,
W tokens of a KV block, R blocks of a round.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.typing import DTypeLike

KiB, MiB = 1 << 10, 1 << 20
_LANES = 128


@dataclass(frozen=True, kw_only=True)
class RingConfig:
    """query_tokens: of a tile (Q). kv_tokens: of a block (W), whole pages. round_tokens: of KV that a device sends around
    at a time, whole blocks: two buffers of that size are all that the ring needs beside the cache, and accumulators
    are read and written once a round and step, so it should be thousands."""

    query_tokens: int = 256
    kv_tokens: int = 512
    round_tokens: int = 4096

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.round_tokens % self.kv_tokens:
            raise ValueError(f"round_tokens={self.round_tokens} must be a multiple of kv_tokens={self.kv_tokens}")

    def check_page_size(self, page_size: int) -> None:
        if self.kv_tokens % page_size:
            raise ValueError(f"kv_tokens={self.kv_tokens} must be a multiple of {page_size=}")

    def round_blocks(self, page_table_shape: tuple[int, int], page_size: int) -> int:
        """R: blocks of a round, never more than the page table can name."""
        rows, row_pages = page_table_shape
        return min(self.round_tokens // self.kv_tokens, rows * -(-row_pages * page_size // self.kv_tokens))


@dataclass(frozen=True, kw_only=True)
class RingShape:
    """What the memory of a launch depends on; sizes of one device. `packed`: pages [L, P, 1, K, B, 2 H], K beside V."""

    num_tokens: int
    num_rows: int
    row_pages: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    devices: int
    dtype: DTypeLike = jnp.bfloat16
    kv_dtype: DTypeLike = jnp.bfloat16
    packed: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")

    @property
    def lanes(self) -> int:
        """Width of a row of the cache."""
        return 2 * self.head_dim if self.packed else self.head_dim

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


def vmem_bytes(config: RingConfig, shape: RingShape) -> dict[str, int]:
    """Bytes of VMEM by purpose, `total` last. Everything that moves has two buffers."""
    item, kv_item = jnp.dtype(shape.dtype).itemsize, jnp.dtype(shape.kv_dtype).itemsize
    lanes = -(-shape.lanes // _LANES) * _LANES
    rows = config.query_tokens * shape.group
    tile = shape.num_kv_heads * rows
    sizes = {
        "queries": 2 * tile * lanes * item,
        "accumulators": 2 * tile * (lanes + _LANES) * 4,
        "output": tile * lanes * item,
        "kv": 2 * config.kv_tokens * shape.num_kv_heads * lanes * kv_item * (1 if shape.packed else 2),
        "positions": 2 * 8 * (rows + config.kv_tokens) * 4 + rows * _LANES * 4,
        "sinks": 8 * tile * 4,
        # Scores and weights of one head, in float32 and once in the dtype of the second product.
        "scores": rows * config.kv_tokens * (4 + 4 + item) + 2 * rows * lanes * 4,
    }
    return {**sizes, "total": sum(sizes.values())}


def smem_bytes(config: RingConfig, shape: RingShape) -> int:
    """Bytes of the plan's scalars."""
    blocks = shape.num_rows * -(-shape.row_pages * shape.page_size // config.kv_tokens)
    per_round = config.round_blocks((shape.num_rows, shape.row_pages), shape.page_size)
    blocks += -blocks % per_round
    rounds = blocks // per_round
    tiles = (shape.num_tokens + shape.num_rows * (config.query_tokens - 1)) // config.query_tokens
    writes = min((shape.num_tokens + shape.num_rows * (2 * shape.page_size - 2)) // shape.page_size, shape.num_tokens)
    numbers = (
        blocks * (config.kv_tokens // shape.page_size) + shape.devices * blocks + 3 * rounds * shape.devices
        + 7 * rounds * shape.devices * tiles + writes
    )
    return 4 * numbers + 16 * KiB  # each array is rounded up


def check_fit(config: RingConfig, shape: RingShape, vmem_limit: int, smem_limit: int) -> None:
    """ValueError, with the numbers and the nearest configuration that fits, if the launch would not."""
    vmem, smem = vmem_bytes(config, shape), smem_bytes(config, shape)
    if vmem["total"] <= vmem_limit and smem <= smem_limit:
        return
    nearest = _nearest(config, shape, vmem_limit, smem_limit)
    parts = ", ".join(f"{name} {size / MiB:.1f}" for name, size in vmem.items() if name != "total")
    raise ValueError(
        f"{config} needs {vmem['total'] / MiB:.1f} MiB of VMEM ({parts}) and {smem / KiB:.0f} KiB of SMEM; "
        f"there are {vmem_limit / MiB:.1f} MiB and {smem_limit / KiB:.0f} KiB for {shape}. "
        + (f"Nearest that fits: {nearest}" if nearest else "No configuration fits: use fewer rows or smaller chunks")
    )


def choose(shape: RingShape, vmem_limit: int, smem_limit: int, start: RingConfig | None = None) -> RingConfig:
    """The default sizes, cut to the shape and to the memory; ValueError if nothing fits.

    Larger tiles read the KV less often (intensity 2 Q G operations a byte in bfloat16), so memory is the only reason
    for small ones.
    """
    config = start or RingConfig()
    config = replace(config, query_tokens=min(config.query_tokens, _power_of_two(shape.num_tokens)))
    if config.kv_tokens % shape.page_size:
        config = replace(config, kv_tokens=shape.page_size, round_tokens=max(4096 // shape.page_size, 1) * shape.page_size)
    nearest = _nearest(config, shape, vmem_limit, smem_limit)
    if nearest is None:
        check_fit(config, shape, vmem_limit, smem_limit)
    assert nearest is not None
    return nearest


def _power_of_two(number: int) -> int:
    return max(16, 1 << (number - 1).bit_length())


def _nearest(config: RingConfig, shape: RingShape, vmem_limit: int, smem_limit: int) -> RingConfig | None:
    """The configuration of the largest area Q W that fits, none of its sizes above the given one's for VMEM's sake.

    Where SMEM is what lacks, rounds grow: fewer rounds mean fewer items.
    """
    queries = [config.query_tokens >> n for n in range(8) if config.query_tokens >> n >= 8]
    keys = [
        size for n in range(8) if (size := config.kv_tokens >> n) and size % shape.page_size == 0 and config.kv_tokens % size == 0
    ] or [shape.page_size]
    options = [
        RingConfig(query_tokens=q, kv_tokens=w, round_tokens=-(-(config.round_tokens << more) // w) * w)
        for q in queries or [config.query_tokens] for w in keys for more in (0, 2, 4)
    ]  # fmt: skip
    fitting = [
        option for option in options
        if vmem_bytes(option, shape)["total"] <= vmem_limit and smem_bytes(option, shape) <= smem_limit
    ]  # fmt: skip
    return max(fitting, key=lambda o: (o.query_tokens * o.kv_tokens, o.query_tokens, -o.round_tokens), default=None)
