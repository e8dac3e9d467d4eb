"""What a step costs by formula: operations, bytes and collectives of one device, from the model's shapes alone.

The formulas rank meshes before anything is compiled. Of a compiled step, `scripts.planning.counting` replaces all but
attention and experts, whose cost depends on data: how long the sequences are, and which experts the tokens choose.
docs/planning.md derives the formulas and works examples by hand.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from model.config import LayerSpec
from model.dispatch import BySize, Dispatch, ExchangeRows, GatherTokens
from scripts.planning.counting import Collective
from scripts.planning.placement import Placement
from scripts.planning.topology import PlanError


@dataclass(frozen=True, kw_only=True)
class Work:
    """One data group's share of a step: `decode` rows of one token, each with `context` tokens in the cache, and a
    chunk of a prompt, `chunk` tokens after `past`."""

    decode: int
    context: int
    chunk: int = 0
    past: int = 0

    @property
    def tokens(self) -> int:
        return self.decode + self.chunk

    @property
    def rows(self) -> int:
        return self.decode + (self.chunk > 0)


@dataclass(frozen=True)
class Cost:
    flops: float = 0
    bytes: float = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Of one device. dense: everything but attention and experts."""

    dense: Cost
    attention: Cost
    experts: Cost
    collectives: Counter[Collective] = field(default_factory=Counter)


def step_cost(p: Placement, work: Work, shape_rows: int | None = None) -> StepCost:
    """shape_rows: rows of the compiled shape, whose logits are computed whether or not there is a sequence."""
    return StepCost(dense=dense_cost(p, work.tokens, shape_rows or work.rows), attention=attention_cost(p, work),
                    experts=experts_cost(p, work.tokens), collectives=collectives(p, work.tokens))  # fmt: skip


def dense_cost(p: Placement, tokens: int, rows: int) -> Cost:
    """Every matrix is read once and multiplied with every token; the embedding gives one row a token."""
    width, D = p.sizes.dtype.itemsize, p.config.hidden_size
    flops = 2 * (tokens * p.dense + rows * p.head)
    return Cost(flops, (p.dense + p.head + tokens * D) * width + p.vectors)


def attention_cost(p: Placement, work: Work) -> Cost:
    """Each row's KV is read once. A query meets every key that it may see, twice: for scores and for values."""
    config, flops, tokens_read = p.config, 0.0, 0.0
    if config.latent is not None:  # absorbed: scores over latent and rotated numbers, values are the latent
        pair = 2 * (2 * config.latent.latent_dim + config.latent.rope_dim)
    else:
        pair = 4 * config.head_dim
    for layer in config.layers:
        keys = _keys(work.context, layer)
        flops += p.heads * pair * (work.decode * keys + _pairs(work.chunk, work.past, layer))
        tokens_read += work.decode * keys
        if work.chunk:
            before = work.past % layer.chunk if layer.chunk else min(work.past, layer.window or work.past)
            tokens_read += before + work.chunk
    written = work.tokens * config.num_layers
    return Cost(flops, p.token_bytes() * (tokens_read + written))


def _keys(context: int, layer: LayerSpec) -> float:
    """What the last of so many tokens sees; where attention is in chunks, over many sequences half of one."""
    if layer.chunk is not None and context > layer.chunk:
        return (layer.chunk + 1) / 2
    return min(context, layer.window or context)


def _pairs(chunk: int, past: int, layer: LayerSpec) -> int:
    """(query, key) pairs of a causal chunk of a prompt after `past` tokens."""
    if layer.chunk is not None:
        return sum((past + i) % layer.chunk + 1 for i in range(chunk))
    if layer.window is not None:
        return sum(min(past + i + 1, layer.window) for i in range(chunk))
    return chunk * past + chunk * (chunk + 1) // 2


def experts_cost(p: Placement, tokens: int) -> Cost:
    """Tokens choose experts evenly and independently of each other: T tokens that choose k of E leave an expert without
    work with probability (1 - k/E)^T. The experts of a mesh get the tokens of all data groups that share them."""
    total = Cost()
    if not p.expert_layers:
        return total
    width, D, held = p.sizes.dtype.itemsize, p.config.hidden_size, p.experts_held
    together = tokens * p.rules.num_groups if p.layout.expert_parallel else tokens
    for layer in p.expert_layers:
        assert layer.moe is not None
        routing, numbers = layer.moe.routing, 3 * D * layer.moe.width
        chosen = routing.top_k / routing.num_experts
        rows = together * chosen * held
        touched = held * (1 - (1 - chosen) ** together)
        total += Cost(2 * rows * numbers, touched * numbers * width)
    return total


def collectives(p: Placement, tokens: int) -> Counter[Collective]:
    """A sum over `tensor` after attention, after each MLP and after the embedding, in the model's own type. XLA sums a
    shared expert's part together with the routed experts'."""
    found: Counter[Collective] = Counter()
    config, n = p.config, p.spec.tensor
    width = p.sizes.dtype.itemsize
    whole = Collective("all-reduce", tokens * config.hidden_size * width, n)
    if p.rules.shards("vocab", config.vocab_size) > 1:
        found[Collective("all-reduce", tokens * config.hidden_size * width, n)] += 1
    if p.rules.shards("heads", config.num_heads) > 1:
        found[whole] += config.num_layers
    num_moe = len(p.expert_layers)
    if p.rules.shards("mlp", config.intermediate_size) > 1:
        found[whole] += config.num_layers - num_moe
    if p.kernels.experts is not None:
        of_layer = Counter(_dispatch(p, p.kernels.experts.dispatch, tokens))
        shared = {layer.moe.shared_width or 1 for layer in p.expert_layers if layer.moe is not None}
        if any(p.rules.shards("mlp", width) > 1 for width in shared):
            routed = of_layer.pop(whole, 0)
            of_layer[replace(whole, bytes=whole.bytes * (routed + 1))] += 1
        for one, times in of_layer.items():
            found[one] += times * num_moe
    return found


def _dispatch(p: Placement, way: Dispatch, tokens: int) -> list[Collective]:
    """What brings a layer's tokens to their experts and back; `model.dispatch` has the ways and their formulas."""
    n, groups, D, width = p.spec.tensor, p.rules.num_groups, p.config.hidden_size, p.sizes.dtype.itemsize
    top = max(layer.moe.routing.top_k for layer in p.expert_layers if layer.moe is not None)
    match way:
        case BySize():
            return _dispatch(p, way.small if tokens < way.from_tokens else way.large, tokens)
        case ExchangeRows():
            rows = Collective("ragged-all-to-all", -(-tokens // n) * top * D * width, p.spec.num_devices)
            return [rows, rows, *([Collective("all-gather", tokens * D * width, n)] if n > 1 else [])]
        case GatherTokens():
            found = []
            if "data" in way.axes:
                found += [Collective("all-gather", groups * tokens * D * width, groups, n),
                          Collective("reduce-scatter", groups * tokens * D * width, groups, n)]  # fmt: skip
            if "tensor" in way.axes:
                found.append(Collective("all-reduce", tokens * D * width, n))
            return found
    raise PlanError(f"how rows travel with {type(way).__name__} is not known")
