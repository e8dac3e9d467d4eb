"""Block sizes of the kernels, and the memory they take.

Axis letters: N query heads (padded), R latent numbers, E rope numbers (padded), C numbers of a row of two tokens;
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


@dataclass(frozen=True, kw_only=True)
class TPUBlocks:
    """kv_tokens: fetched at once, whole pages. compute_tokens: of those, attended at once. buffers: KV blocks in flight
    or in use. query_tokens: of a query block of rows that have several new tokens."""

    kv_tokens: int
    compute_tokens: int
    query_tokens: int
    buffers: int = 3

    def __post_init__(self):
        if self.kv_tokens % self.compute_tokens:
            raise ValueError(f"{self.kv_tokens=} must be a multiple of {self.compute_tokens=}")
        if self.compute_tokens % (2 * LANES):
            raise ValueError(f"{self.compute_tokens=} must be a multiple of {2 * LANES}, two registers' lanes")
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
        """Of a decode row of 4,096 tokens, with the memory of the larger launch, that of longer rows."""
        queries = blocks.query_tokens * self.heads
        token = self.latent_dim + self.rope_dim
        pages = blocks.buffers * blocks.kv_tokens * token * self.kv_itemsize
        q_and_out = queries * (blocks.buffers * (self.latent_dim + LANES) + 2 * self.latent_dim + 2 * LANES) * self.itemsize
        running = 4 * queries * (self.latent_dim + 2 * LANES)
        spilled = 4 * queries * (3 * blocks.compute_tokens + self.latent_dim)  # scores, weights, a block's output
        fetched = round_up(4096, blocks.kv_tokens)
        return Estimate(
            hbm_bytes=fetched * token * self.kv_itemsize,
            flops=2 * fetched * self.heads * (token + self.latent_dim),
            block_bytes=pages + q_and_out + running + spilled + 2 * MiB,
            fixed_seconds=fetched / blocks.compute_tokens * 1e-7,
        )

    def candidates(self) -> Sequence[TPUBlocks]:
        """The first of equal cost is taken: some megabytes in flight, and enough queries to keep the MXU busy."""
        return [
            TPUBlocks(kv_tokens=kv_tokens, compute_tokens=compute, query_tokens=query, buffers=buffers)
            for query in (max(2, rows // self.heads) for rows in (1024, 512, 256, 128))
            for kv_tokens in (1024, 2048, 512)
            for compute in (512, 1024, 256)
            for buffers in (3, 2)
            if kv_tokens % compute == 0 and kv_tokens % self.page_size == 0
        ]

    def blocks(self, device: Device) -> TPUBlocks:
        shape = {"N": self.heads, "R": self.latent_dim, "B": self.page_size, "bytes": self.kv_itemsize}
        return choose("latent_attention/mosaic_tpu", shape, self.candidates(), self.estimate, device)

    def check(self, blocks: TPUBlocks, device: Device) -> None:
        if blocks.kv_tokens % self.page_size:
            raise ValueError(f"kv_tokens={blocks.kv_tokens} must be a multiple of page_size={self.page_size}")
        require_fit("latent_attention/mosaic_tpu", blocks, self.candidates(), self.estimate, device)
