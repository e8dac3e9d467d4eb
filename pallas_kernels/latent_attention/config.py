"""Block sizes of the kernels, and the memory they take.

Axis letters: N query heads (padded), R latent numbers, E rope numbers, C numbers of a row of two tokens;
W tokens of a KV block, Q tokens of a query block, M = Q * N rows of a query block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.devices import Device, MiB
from pallas_kernels.tuning import Estimate, choose, require_fit

LANES = 128  # numbers in a row of a TPU vector register
SUBLANES = 16  # rows are written in multiples of this: a tile of 16-bit numbers


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


SMALL = 256  # tokens attended at once where fewer than a config says are left: the width of an MXU


@dataclass(frozen=True, kw_only=True)
class TPUBlocks:
    """kv_tokens: fetched at once, whole pages. decode_tokens: of those, attended at once by a decode row. chunk_tokens:
    by a query block of a longer row, which has query_tokens tokens. buffers: KV blocks in flight or in use."""

    kv_tokens: int
    decode_tokens: int
    chunk_tokens: int
    query_tokens: int
    buffers: int = 3

    def __post_init__(self):
        for name in ("decode_tokens", "chunk_tokens"):
            size = getattr(self, name)
            if self.kv_tokens % size or size % SMALL:
                raise ValueError(f"{name}={size} must divide {self.kv_tokens=} and be a multiple of {SMALL}")
        if self.buffers < 2:
            raise ValueError(f"{self.buffers=} must be at least 2, to fetch one block while another is read")
        if self.query_tokens < 2:
            raise ValueError(f"{self.query_tokens=} must be at least 2")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What block sizes depend on. heads: padded."""

    heads: int
    latent_dim: int
    rope_dim: int
    page_size: int
    itemsize: int
    kv_itemsize: int

    def estimate(self, blocks: TPUBlocks) -> Estimate:
        """Of a decode row and a chunk's token against 4,096 tokens, with the memory of the larger launch.

        The instructions between steps are as the compiler's schedule for v6e has them (scripts.tpu_schedule).
        """
        length, token = 4096, self.latent_dim + self.rope_dim
        queries = blocks.query_tokens * self.heads

        def working(rows: int, tokens: int) -> int:  # scores, weights, weighted values: what does not fit in registers
            return 4 * rows * (3 * tokens + self.latent_dim)

        pages = blocks.buffers * blocks.kv_tokens * token * self.kv_itemsize
        q_and_out = queries * ((blocks.buffers + 2) * (self.latent_dim + LANES) + 2 * LANES) * self.itemsize
        running = 4 * queries * (self.latent_dim + 2 * LANES)
        spilled = max(working(self.heads, blocks.decode_tokens), working(queries, blocks.chunk_tokens))
        between = 300 * length / blocks.kv_tokens + 150 * length / blocks.decode_tokens
        between += (300 * length / blocks.kv_tokens + 150 * length / blocks.chunk_tokens) / blocks.query_tokens
        return Estimate(
            hbm_bytes=length * token * self.kv_itemsize,
            flops=2 * 2 * length * self.heads * (token + self.latent_dim),
            block_bytes=pages + q_and_out + running + spilled + 2 * MiB,
            fixed_seconds=between / 1.75e9,
        )

    def candidates(self) -> Sequence[TPUBlocks]:
        return [
            TPUBlocks(
                kv_tokens=kv_tokens, decode_tokens=min(kv_tokens, decode), chunk_tokens=min(kv_tokens, chunk),
                query_tokens=query, buffers=buffers,
            )
            for query in sorted({max(2, rows // self.heads) for rows in (512, 256, 128)}, reverse=True)
            for kv_tokens in (2048, 1024, 512)
            for decode in (2048, 1024, 512)
            for chunk in (1024, 512, 256)
            for buffers in (3, 2)
            if kv_tokens % self.page_size == 0
        ]  # fmt: skip

    def blocks(self, device: Device) -> TPUBlocks:
        return choose("latent_attention/mosaic_tpu", self.shape, self.candidates(), self.estimate, device)

    @property
    def shape(self) -> dict[str, int | str]:
        """The key of the tuned tables."""
        return {"N": self.heads, "R": self.latent_dim, "B": self.page_size, "bytes": self.kv_itemsize}

    def check(self, blocks: TPUBlocks, device: Device) -> None:
        if blocks.kv_tokens % self.page_size:
            raise ValueError(f"kv_tokens={blocks.kv_tokens} must be a multiple of page_size={self.page_size}")
        require_fit("latent_attention/mosaic_tpu", blocks, self.candidates(), self.estimate, device)
