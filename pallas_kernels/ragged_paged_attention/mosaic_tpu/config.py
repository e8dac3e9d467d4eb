"""Block sizes of the two kernels, and the VMEM they need. Computed before a launch; what does not fit raises."""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TypeVar

import jax.numpy as jnp

from pallas_kernels.devices import Device, MiB
from pallas_kernels.ragged_paged_attention.mosaic_tpu.problem import LANES, Problem, cdiv
from pallas_kernels.tuning import Estimate, choose

KERNEL = "ragged_paged_attention/mosaic_tpu"
# Values that the compiler itself keeps in VMEM: spilled registers, windows of inputs and outputs.
_RESERVED = 8 * MiB
_SLOT_BYTES = 4 * MiB  # of one fetch: about 2.5 us of a v6e's bandwidth
_LATENCY = 2e-6  # of a copy; so much must be in flight to fill it


@dataclass(frozen=True, kw_only=True)
class DecodeBlocks:
    """rows: of a program. slots: in the ring of pages. heads: computed side by side, their softmax in registers."""

    rows: int
    slots: int
    fetch_pages: int
    compute_pages: int
    edge_pages: int
    heads: int
    page_size: int
    query_rows: int  # D: G rounded up to 8

    def __post_init__(self):
        _check(self)

    @property
    def compute_tokens(self) -> int:
        return self.compute_pages * self.page_size

    @property
    def edge_tokens(self) -> int:
        return self.edge_pages * self.page_size

    def vmem_bytes(self, problem: Problem) -> int:
        ring = self.slots * self.fetch_pages * problem.page_size * problem.token_bytes
        stage = 2 * problem.tile * problem.token_bytes
        per_head = self.query_rows * 4 * (2 * LANES + problem.row_lanes)
        windows = 2 * self.rows * problem.num_kv_heads * problem.row_lanes * (
            2 * max(self.query_rows, 16) * jnp.dtype(problem.compute_dtype).itemsize + 4 * problem.planes
        )
        return ring + stage + problem.num_kv_heads * per_head + windows


@dataclass(frozen=True, kw_only=True)
class MixedBlocks:
    """slots: in the rings of pages and of query blocks. query_rows: sizes of a query block in tokens times G, the
    smallest that holds a block is taken. heads: in one straight line of code, so that one's products overlap another's
    softmax; edge_heads: of that for a block at an edge. split_rows: rows that go through that line at once."""

    slots: int
    fetch_pages: int
    compute_pages: int
    edge_pages: int
    heads: int
    edge_heads: int
    split_rows: int
    query_rows: tuple[int, ...]
    segment_tokens: int
    segment_slots: int
    page_size: int
    group: int
    num_kv_heads: int

    def __post_init__(self):
        object.__setattr__(self, "query_rows", tuple(self.query_rows))  # a list in the tuned tables
        _check(self)
        if list(self.query_rows) != sorted(set(self.query_rows)) or any(n % 16 for n in self.query_rows):
            raise ValueError(f"query_rows={self.query_rows} must be multiples of 16 in rising order")

    @property
    def compute_tokens(self) -> int:
        return self.compute_pages * self.page_size

    @property
    def edge_tokens(self) -> int:
        return self.edge_pages * self.page_size

    @property
    def query_tokens(self) -> int:
        """Of a whole query block; its rows start on whole tiles."""
        step = aligned_tokens(self.group)
        return max(self.query_rows[-1] // self.group // step, 1) * step

    def items(self, size: int, edge: bool = False) -> list[tuple[int, int, int]]:
        """(head, first row, rows) of the parts of one straight line."""
        heads = self.edge_heads if edge else self.heads
        # Blocks at an edge have fewer tokens: more heads and rows make up for it.
        split = min(512 if edge and heads > 2 else self.split_rows, size)
        rows = [(first, min(split, size - first)) for first in range(0, size, split)]
        return [(head, *part) for head in range(heads) for part in rows]

    @property
    def head_groups(self) -> int:
        """How many straight lines all heads take."""
        return self.num_kv_heads // self.heads

    @property
    def edge_groups(self) -> int:
        return self.num_kv_heads // self.edge_heads

    def vmem_bytes(self, problem: Problem) -> int:
        heads, most = problem.num_kv_heads, self.query_rows[-1]
        size = jnp.dtype(problem.compute_dtype).itemsize
        ring = self.slots * self.fetch_pages * problem.page_size * problem.token_bytes
        queries = (self.slots + 1) * heads * most * problem.row_lanes * size
        words = self.slots * most * LANES * 4 * bool(problem.tree_words)
        softmax = heads * most * 4 * (2 * LANES + problem.row_lanes) + 2 * most * LANES * 4
        new = problem.planes * heads * problem.row_lanes
        segments = self.segment_slots * new * (
            self.segment_tokens * jnp.dtype(problem.kv_dtype).itemsize + (self.segment_tokens + 8) * 4
        )
        spilled = 4 * self.split_rows * self.compute_tokens * 4
        return ring + queries + words + softmax + segments + spilled


Blocks = TypeVar("Blocks", DecodeBlocks, MixedBlocks)


def _check(blocks: DecodeBlocks | MixedBlocks) -> None:
    for field in fields(blocks):
        value = getattr(blocks, field.name)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{field.name}={value} must be positive")
    if blocks.fetch_pages % blocks.compute_pages:
        raise ValueError(f"{blocks.fetch_pages=} must be a multiple of {blocks.compute_pages=}")
    if blocks.compute_pages % blocks.edge_pages:
        raise ValueError(f"{blocks.compute_pages=} must be a multiple of {blocks.edge_pages=}")
    if blocks.edge_tokens % LANES:
        raise ValueError(f"{blocks.edge_pages=} of {blocks.page_size} tokens must fill whole lanes of {LANES}")


def aligned_tokens(group: int) -> int:
    """A row's queries start at a multiple of so many tokens: its rows then start on a whole tile of 16."""
    step = 1
    while step * group % 16:
        step *= 2
    return step


def _divisor(number: int, most: int) -> int:
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)


def _fetch_pages(problem: Problem, compute_tokens: int) -> int:
    tokens = compute_tokens
    while tokens < 4096 and 2 * tokens * problem.token_bytes <= _SLOT_BYTES:
        tokens *= 2
    return tokens // problem.page_size


def decode_blocks(problem: Problem, num_rows: int) -> DecodeBlocks:
    query_rows = cdiv(problem.group, 8) * 8
    registers = query_rows // 8 * (2 + problem.row_lanes // LANES)  # of one head's softmax
    heads = _divisor(problem.num_kv_heads, max(16 // registers, 1))
    # Few heads: more tokens at a time, so that there is enough to overlap.
    tokens = max(1024 if heads > 1 else 2048, problem.page_size)
    return DecodeBlocks(
        rows=min(num_rows, 8), slots=3, fetch_pages=_fetch_pages(problem, tokens),
        compute_pages=tokens // problem.page_size, edge_pages=max(256, problem.page_size) // problem.page_size,
        heads=heads, page_size=problem.page_size, query_rows=query_rows,
    )  # fmt: skip


def mixed_blocks(problem: Problem) -> MixedBlocks:
    heads = _divisor(problem.num_kv_heads, 3)
    # A straight line of about a million scores, in four parts: enough to overlap, few turns to fill and drain.
    tokens = max(1024, problem.page_size)
    step = aligned_tokens(problem.group) * problem.group
    most, least = cdiv(1024 if heads == 1 else 512, step) * step, cdiv(64, step) * step
    new_bytes = 4 * problem.planes * problem.num_kv_heads * problem.row_lanes
    segment = min(problem.page_size, 128)
    while segment > problem.tile and segment * new_bytes > MiB:
        segment //= 2
    if problem.quantized:  # scales are written by the page
        segment = problem.page_size
    return MixedBlocks(
        slots=2, fetch_pages=_fetch_pages(problem, tokens), compute_pages=tokens // problem.page_size,
        edge_pages=max(256, problem.page_size) // problem.page_size, heads=heads,
        edge_heads=_divisor(problem.num_kv_heads, 4), split_rows=256,
        query_rows=(least, most) if least < most else (most,),
        segment_tokens=segment,
        segment_slots=4 if segment * new_bytes <= 2 * MiB else 2, page_size=problem.page_size, group=problem.group,
        num_kv_heads=problem.num_kv_heads,
    )  # fmt: skip


def small(blocks: Blocks, problem: Problem) -> Blocks:
    """Blocks for interpret mode: short rows then cross every boundary, and the simulated memory is small."""
    compute = max(LANES // problem.page_size, 1)
    blocks = replace(blocks, edge_pages=compute, compute_pages=2 * compute, fetch_pages=4 * compute)
    if isinstance(blocks, MixedBlocks):
        step = aligned_tokens(problem.group) * problem.group
        segment = problem.page_size if problem.quantized else min(problem.page_size, 32)
        blocks = replace(blocks, query_rows=(step, 2 * step), heads=1, edge_heads=1, split_rows=16,
                         segment_tokens=segment, segment_slots=2)  # fmt: skip
    return blocks


def decode_for(problem: Problem, num_rows: int, device: Device) -> DecodeBlocks:
    """Measured on the device, or the default with the fetch that suits its memory. ValueError when none fits."""
    default = decode_blocks(problem, num_rows)
    blocks = _choose("decode", problem, device, [default, *_smaller(default)], (3, 2, 4))
    return replace(blocks, rows=default.rows)  # a table's may be of a step with more rows


def mixed_for(problem: Problem, device: Device) -> MixedBlocks:
    """As decode_for; query blocks get smaller where many kv heads ask for much."""
    default = mixed_blocks(problem)
    most, step = default.query_rows[-1], aligned_tokens(problem.group) * problem.group
    fewer = [max(most // n // step, 1) * step for n in (2, 4)]
    blocks = [default, *(replace(default, query_rows=tuple(sorted({min(default.query_rows[0], n), n}))) for n in fewer)]
    return _choose("mixed", problem, device, [*blocks, *_smaller(blocks[-1])], (2, 3))


def _choose(step: str, problem: Problem, device: Device, defaults: list[Blocks], slots: tuple[int, ...]
            ) -> Blocks:
    """Among the candidates of the first default of which one fits."""
    estimate = partial(_estimate, problem, device)
    candidates: list[Blocks] = []
    for default in defaults:
        candidates = [replace(blocks, slots=n) for blocks in _fetches(default) for n in slots]
        if any(estimate(blocks).block_bytes <= device.vmem_bytes for blocks in candidates):
            break
    return choose(f"{KERNEL}/{step}", _shape(problem), candidates, estimate, device)


def _smaller(blocks: Blocks) -> list[Blocks]:
    """With half and a quarter of the tokens at a time, as far as there are whole edges in them."""
    pages = [blocks.compute_pages // n for n in (2, 4)]
    return [replace(blocks, compute_pages=n, fetch_pages=n) for n in pages if n and n % blocks.edge_pages == 0]


def _fetches(blocks: Blocks) -> list[Blocks]:
    """The default, and half and twice its fetch."""
    pages = (blocks.fetch_pages, blocks.fetch_pages // 2, 2 * blocks.fetch_pages, blocks.compute_pages)
    return [replace(blocks, fetch_pages=n) for n in dict.fromkeys(pages) if n and n % blocks.compute_pages == 0]


def _shape(problem: Problem) -> dict[str, int | str]:
    return {
        "N": problem.num_kv_heads * problem.group, "K": problem.num_kv_heads, "R": problem.row_lanes,
        "X": problem.planes, "B": problem.page_size, "dtype": jnp.dtype(problem.kv_dtype).name,
        "bias": int(problem.biased), "tree": problem.tree_words,
    }  # fmt: skip


def _estimate(problem: Problem, device: Device, blocks: DecodeBlocks | MixedBlocks) -> Estimate:
    """Of 64 rows of 4096 tokens: what differs is how well copies fill their latency, and the time of the first one."""
    fetch = blocks.fetch_pages * problem.page_size * problem.token_bytes
    in_flight = (blocks.slots - 1) * fetch
    waits = max(1.0, device.hbm_bandwidth * _LATENCY / in_flight)
    return Estimate(
        hbm_bytes=64 * 4096 * problem.token_bytes * waits, flops=0.0, fixed_seconds=device.dma_seconds(fetch),
        block_bytes=blocks.vmem_bytes(problem) + _RESERVED,
    )
