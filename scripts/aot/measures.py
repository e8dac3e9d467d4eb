"""What a kernel's hot loops cost: bundles for each KV token (decode) or each (query, key, head) pair (chunks).

Loops are told apart by what they do: a loop that computes has matrix instructions and no loop inside. Our kernels have
such loops in pairs, first over whole blocks without masks, then over those at an edge, for each group of heads that is
computed side by side; the cost counted is that of all groups, without masks. jax's kernel has one loop.
"""

from dataclasses import dataclass

from pallas_kernels.devices import Device
from pallas_kernels.ragged_paged_attention.mosaic_tpu import config
from pallas_kernels.ragged_paged_attention.mosaic_tpu.wrapper import _problem
from scripts.aot.bundles import Loop, Schedule
from scripts.aot.cases import attention_spec
from scripts.aot.models import AttentionShape


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Of one pass over `tokens` KV tokens, for `queries` (query, query head) rows: bundles of the loops, their
    instructions, and the bytes that come from HBM meanwhile. edge: bundles of the loops with masks, whose blocks may be
    smaller."""

    blocks: str
    tokens: int
    queries: int
    bundles: int
    edge: int | None
    spills: int
    slots: dict[str, int]
    capacity: dict[str, int]
    hbm_bytes: int

    def use(self, unit: str) -> float:
        return self.slots[unit] / (self.capacity[unit] * self.bundles)

    def per_token(self) -> float:
        return self.bundles / self.tokens

    def per_pair(self) -> float:
        return self.bundles / (self.tokens * self.queries)

    def bound(self, device: Device) -> str:
        """Which of DMA and instructions takes longer, and how many times the other."""
        dma = device.dma_cycles(self.hbm_bytes)
        if dma >= self.bundles:
            return f"memory, {dma / self.bundles:.1f}x"
        return f"instructions, {self.bundles / dma:.1f}x"


def matrix_loops(schedule: Schedule) -> list[Loop]:
    """Innermost loops with matrix products, in the order of the program."""
    return [loop for loop in schedule.loops if not loop.children and loop.slots["MATMUL"]]


def combine(loops: list[Loop]) -> tuple[int, int, dict[str, int]]:
    """(bundles, spills, slots) of all together."""
    slots = {unit: sum(loop.slots[unit] for loop in loops) for unit in loops[0].slots}
    return sum(loop.bundles for loop in loops), sum(loop.spills for loop in loops), slots


def named(schedules: list[Schedule], text: str) -> Schedule:
    return next(schedule for schedule in schedules if text in schedule.kernel)


def decode_measure(schedules: list[Schedule], shape: AttentionShape, page_size: int, rows: int, device: Device
                   ) -> Measure:
    """Ours, rows of one token."""
    problem = _problem(attention_spec(shape, page_size))
    blocks = config.decode_for(problem, rows, device)
    loops = matrix_loops(named(schedules, "decode"))
    groups = problem.num_kv_heads // blocks.heads
    if len(loops) != 2 * groups:
        raise ValueError(f"{len(loops)} loops with products for {groups} groups of heads: expected two each")
    bundles, spills, slots = combine(loops[0::2])
    return Measure(
        blocks=f"fetch {blocks.fetch_pages}, compute {blocks.compute_pages} pages, {blocks.heads} heads",
        tokens=blocks.compute_tokens, queries=shape.num_heads, bundles=bundles, edge=combine(loops[1::2])[0],
        spills=spills, slots=slots, capacity=loops[0].capacity, hbm_bytes=blocks.compute_tokens * problem.token_bytes,
    )


def chunk_measure(schedules: list[Schedule], shape: AttentionShape, page_size: int, device: Device) -> Measure:
    """Ours, a chunk that fills whole query blocks: the last pair of loops is that of the largest block."""
    problem = _problem(attention_spec(shape, page_size))
    blocks = config.mixed_for(problem, device)
    loops = matrix_loops(named(schedules, "mixed"))
    if len(loops) != 2 * len(blocks.query_rows):
        raise ValueError(f"{len(loops)} loops with products for query blocks of {blocks.query_rows}: expected two each")
    whole, edge = loops[-2:]
    bundles, spills, slots = combine([whole] * blocks.head_groups)
    rows = blocks.query_rows[-1]
    return Measure(
        blocks=f"{rows} query rows, compute {blocks.compute_pages} pages, {blocks.heads} heads",
        tokens=blocks.compute_tokens, queries=rows * problem.num_kv_heads, bundles=bundles,
        edge=edge.bundles * blocks.edge_groups, spills=spills, slots=slots, capacity=whole.capacity,
        hbm_bytes=blocks.compute_tokens * problem.token_bytes,
    )


def jax_measure(schedules: list[Schedule], shape: AttentionShape, pages: int, queries: int, page_size: int) -> Measure:
    """jax's kernel: one loop over blocks of KV with everything in it."""
    loop = named(schedules, "ragged_paged_attention").hot
    tokens = pages * page_size
    return Measure(
        blocks=f"{pages} pages, {queries} queries", tokens=tokens, queries=queries * shape.num_heads,
        bundles=loop.bundles, edge=None, spills=loop.spills, slots=loop.slots, capacity=loop.capacity,
        hbm_bytes=tokens * 2 * shape.num_kv_heads * shape.head_dim * 2,
    )
