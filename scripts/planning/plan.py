"""One mesh's plan: what fits on its devices and how fast it would be."""

from collections import Counter
from dataclasses import dataclass, field

from scripts.planning.counting import Collective, Counts
from scripts.planning.placement import Placement
from scripts.planning.roofline import CompiledCosts, Seconds, step_seconds
from scripts.planning.topology import hbm_limit
from scripts.planning.workload import StepCost, Work, step_cost
from serving.errors import ConfigError
from serving.runner.memory import MemoryPlan


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to evaluate. context: tokens that each sequence holds while it decodes; prompt: of one that arrives.
    batches: sequences in flight on the whole mesh; contexts: at which to say how many sequences fit."""

    context: int
    prompt: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device. kv: of the page pool. missing: what a step would need beyond the limit; 0 where it fits."""

    limit: int
    usable: int
    weights: int
    state: int
    temporaries: int
    page: int
    num_pages: int
    missing: int

    @property
    def kv(self) -> int:
        return self.page * self.num_pages

    @property
    def fits(self) -> bool:
        return self.missing == 0


@dataclass(frozen=True, kw_only=True)
class Point:
    """At `sequences` in flight: a decode step, and the first token of a new prompt among the others."""

    sequences: int
    step: Seconds
    tokens_per_second: float
    ttft: float


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler said of the decode step and the prefill step. seconds: to compile both."""

    decode: Counts
    prefill: Counts
    decode_tokens: int
    prefill_tokens: int
    temporaries: int
    seconds: float

    @property
    def costs(self) -> CompiledCosts:
        return CompiledCosts.of((self.decode_tokens, self.decode), (self.prefill_tokens, self.prefill))


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """capacity: tokens in all page pools. sequences: by context. decode: collectives of the largest decode step."""

    placement: Placement
    compiled: Compiled | None
    memory: Memory
    capacity: int
    sequences: dict[int, int]
    points: tuple[Point, ...]
    decode: Counter[Collective] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        return f"{self.placement.spec}" + (" + EP" if self.placement.layout.expert_parallel else "")

    @property
    def best(self) -> Point | None:
        return max(self.points, key=lambda point: point.tokens_per_second, default=None)

    @property
    def throughput(self) -> float:
        return self.best.tokens_per_second if self.best else 0.0

    @property
    def latency(self) -> float:
        """Seconds of a step at the smallest batch."""
        return self.points[0].step.total if self.points else float("inf")


def plan_mesh(placement: Placement, question: Question, compiled: Compiled | None = None) -> MeshPlan:
    memory = memory_of(placement, compiled.temporaries if compiled else estimated_temporaries(placement))
    groups, page = placement.rules.num_groups, placement.sizes.page_size
    per_group = max(memory.num_pages - 1, 0)
    sequences = {context: groups * (per_group // -(-context // page)) for context in question.contexts}
    room = groups * min(per_group // -(-question.context // page), placement.sizes.max_num_seqs)
    batches = [batch for batch in question.batches if batch <= room]
    if memory.fits and room and room not in batches:
        batches.append(room)
    costs = compiled.costs if compiled else None
    points = tuple(_point(placement, batch, question, costs) for batch in batches) if memory.fits else ()
    largest = max(1, min(room, placement.sizes.max_num_seqs * groups) // groups)
    step = _cost(placement, Work(decode=largest, context=question.context), costs)
    return MeshPlan(
        placement=placement, compiled=compiled, memory=memory, sequences=sequences, points=points,
        capacity=groups * per_group * page,
        decode=compiled.decode.collectives if compiled else step.collectives,
    )  # fmt: skip


def memory_of(p: Placement, temporaries: int) -> Memory:
    """As the engine plans it (`serving.runner.memory`)."""
    limit = hbm_limit(p.topology)
    plan = MemoryPlan(limit=limit, share=p.sizes.memory_share, fixed=p.weight_bytes + p.state_bytes,
                      temporary=temporaries, page=p.page_bytes)  # fmt: skip
    usable = int(limit * p.sizes.memory_share)
    try:
        pages, missing = min(plan.num_pages, p.sizes.max_num_seqs * p.row_pages + 1), 0
    except ConfigError:
        pages, missing = 0, plan.fixed + temporaries + 2 * plan.page - usable
    return Memory(limit=limit, usable=usable, weights=p.weight_bytes, state=p.state_bytes, temporaries=temporaries,
                  page=plan.page, num_pages=pages, missing=missing)  # fmt: skip


def estimated_temporaries(p: Placement) -> int:
    """Until the compiler says: logits twice in float32, and some rows as wide as the model and its MLP a token."""
    tokens, rows = p.sizes.max_num_batched_tokens, p.sizes.max_num_seqs
    logits = 2 * 4 * rows * p.config.vocab_size // p.rules.shards("vocab", p.config.vocab_size)
    mlp = p.config.intermediate_size // p.rules.shards("mlp", p.config.intermediate_size)
    return logits + 4 * tokens * (4 * p.config.hidden_size + 2 * mlp)


def _cost(p: Placement, work: Work, costs: CompiledCosts | None) -> StepCost:
    formula = step_cost(p, work, p.sizes.max_num_seqs if work.chunk else None)
    return formula if costs is None else costs.replace_in(formula, work.tokens)


def _point(p: Placement, batch: int, question: Question, costs: CompiledCosts | None) -> Point:
    rows = -(-batch // p.rules.num_groups)
    step = step_seconds(p.topology, _cost(p, Work(decode=rows, context=question.context), costs))
    return Point(sequences=batch, step=step, tokens_per_second=batch / step.total,
                 ttft=_ttft(p, rows - 1, question, costs))  # fmt: skip


def _ttft(p: Placement, others: int, question: Question, costs: CompiledCosts | None) -> float:
    """Seconds until a prompt's first token, while `others` decode in its group: chunks that fill the step's budget."""
    budget = max(p.sizes.max_num_batched_tokens - others, 1)
    done, seconds = 0, 0.0
    while done < question.prompt:
        chunk = min(budget, question.prompt - done)
        work = Work(decode=others, context=question.context, chunk=chunk, past=done)
        seconds += step_seconds(p.topology, _cost(p, work, costs)).total
        done += chunk
    return seconds
