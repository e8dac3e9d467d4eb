"""Block sizes of the GPU kernel, and the shared memory that they take, known before launch."""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from pallas_kernels.devices import DEVICES
from quant.kv import LARGEST

QUERY_ROWS = 64  # rows of a warpgroup's matrix product (wgmma)
MAX_SMEM_BYTES = DEVICES["h200"].smem_bytes
_RESERVED_BYTES = 4096  # barriers, alignment, what the compiler takes for reductions across warps


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """kv_tokens: tokens of a KV block, what one step of a warpgroup attends to. stages: KV blocks of a ring buffer.

    warpgroups: that compute. shared: they take 64 query rows each against the same KV blocks (long chunks: a block is
    fetched once for all of them); otherwise each has a ring buffer and work of its own (rows of one token, which fill
    at most 16 of the 64 rows: there the bytes count).
    """

    kv_tokens: int = 64
    stages: int = 2
    warpgroups: int = 2
    shared: bool = False

    def __post_init__(self):
        if self.kv_tokens not in (16, 32, 64, 128):
            raise ValueError(f"kv_tokens={self.kv_tokens} must be 16, 32, 64 or 128")
        if self.stages < 1:
            raise ValueError(f"stages={self.stages} must be at least 1")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups={self.warpgroups} must be 1 or 2: registers do not suffice for more")

    @property
    def rings(self) -> int:
        return 1 if self.shared else self.warpgroups

    @property
    def rows(self) -> int:
        """Query rows of a work item."""
        return QUERY_ROWS * self.warpgroups if self.shared else QUERY_ROWS

    def smem_bytes(self, head_dim: int, dtype, kv_dtype, bias: bool = False) -> int:
        """Shared memory of one thread block."""
        size, kv_size = jnp.dtype(dtype).itemsize, jnp.dtype(kv_dtype).itemsize
        quantized = jnp.dtype(kv_dtype).name in LARGEST
        queries = self.warpgroups * QUERY_ROWS * (head_dim + out_columns(head_dim)) * size
        numbers = (2 if quantized else 0) + bias
        token = 2 * head_dim * kv_size + 8 * numbers  # with pages of 16; half as much for the numbers of others
        ring = self.rings * self.stages * self.kv_tokens * token
        wide = self.warpgroups * self.kv_tokens * head_dim * size if quantized else 0
        return queries + ring + wide + _RESERVED_BYTES

    def check(self, head_dim: int, dtype, kv_dtype, bias: bool = False, limit: int = MAX_SMEM_BYTES) -> None:
        """ValueError with the numbers, and the nearest setting that fits, if these blocks do not."""

        def bytes_of(blocks: "Blocks") -> int:
            return blocks.smem_bytes(head_dim, dtype, kv_dtype, bias)

        if bytes_of(self) <= limit:
            return
        smaller = [replace(self, stages=stages, kv_tokens=tokens)
                   for tokens in (128, 64, 32, 16) if tokens <= self.kv_tokens
                   for stages in range(self.stages, 0, -1)]
        fits = next((blocks for blocks in smaller if bytes_of(blocks) <= limit), None)
        nearest = f"{fits} takes {bytes_of(fits)}" if fits else "nothing with as many warpgroups fits"
        raise ValueError(
            f"{self} with {head_dim=}, {jnp.dtype(dtype).name} queries and {jnp.dtype(kv_dtype).name} pages takes "
            f"{bytes_of(self)} bytes of shared memory, more than {limit}; {nearest}"
        )


def out_columns(head_dim: int) -> int:
    """Columns of the output that are staged in shared memory at a time."""
    return min(64, head_dim)


def _largest(blocks: Blocks, max_stages: int, **kinds) -> Blocks:
    """As many stages as fit; fewer tokens a block, then one warpgroup, where not even two do."""
    for warpgroups in (blocks.warpgroups, 1):
        for tokens in (blocks.kv_tokens, 64):
            for stages in range(max_stages, 1, -1):
                candidate = replace(blocks, kv_tokens=tokens, stages=stages, warpgroups=warpgroups)
                if candidate.smem_bytes(**kinds) <= MAX_SMEM_BYTES:
                    return candidate
    return blocks


def decode_blocks(head_dim: int, dtype, kv_dtype, bias: bool = False) -> Blocks:
    """For rows of one token. 36 bytes/ns and multiprocessor at 4.8 TB/s need about 40 KiB on their way: two stages of
    two warpgroups have 64 KiB and more."""
    tokens = 128 if head_dim <= 64 else 64
    return _largest(Blocks(kv_tokens=tokens), 4, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, bias=bias)


def chunk_blocks(head_dim: int, dtype, kv_dtype, bias: bool = False) -> Blocks:
    """For longer rows: two warpgroups share KV blocks of 128 tokens, 64 where heads of 256 or 8-bit pages need room."""
    tokens = 128 if head_dim <= 128 and jnp.dtype(kv_dtype).itemsize > 1 else 64
    return _largest(Blocks(kv_tokens=tokens, shared=True), 4, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype,
                    bias=bias)  # fmt: skip
