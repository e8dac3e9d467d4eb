"""What a decoder-only transformer is made of, as data. Families read it from a Hugging Face config."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

Activation = Literal["silu", "gelu_tanh"]
Projection = Literal["q", "k", "v", "o", "gate", "up", "down"]
ScoreFunction = Literal["softmax", "sigmoid"]

QKV: frozenset[Projection] = frozenset(("q", "k", "v"))
QKVO: frozenset[Projection] = frozenset(("q", "k", "v", "o"))
MLP: frozenset[Projection] = frozenset(("gate", "up", "down"))

_LONGEST_PATTERN = 16  # layers; published models repeat after 1 to 6


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, every scaling resolved into numbers by `model.families.rope`."""

    frequencies: tuple[float, ...]  # radians a position; twice as many numbers of a head are rotated, its first ones
    pairs: Literal["halves", "neighbours"] = "halves"  # what turns together: x[i], x[i + len]; or x[2i], x[2i + 1]
    magnitude: float = 1.0  # what is rotated grows by this (YaRN, LongRoPE)


@dataclass(frozen=True, kw_only=True)
class ClampedSwiGLU:
    """gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within +-limit."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a token chooses its experts, and what each one's output counts. Scores are float32."""

    num_experts: int  # E
    top_k: int
    scores: ScoreFunction = "softmax"  # of the router's logits, over all experts
    bias: Literal["logits", "choice"] | None = None  # added to logits; or to scores, for choosing only
    groups: int = 1  # neighbouring experts form this many groups
    top_groups: int = 1  # that a token may choose from
    group_best: int = 1  # a group's score is the sum of this many of its best
    weights: Literal["scores", "normalized"] = "normalized"  # of the chosen: as they are, or divided by their sum
    applied_to: Literal["input", "output"] = "output"  # what of an expert is multiplied by its weight
    scale: float = 1.0  # of the weights

    def __post_init__(self) -> None:
        if self.num_experts < 1 or not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{self.top_k=} of {self.num_experts=} cannot be chosen")
        if self.groups < 1 or self.num_experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"{self.num_experts=} in {self.groups=}, of which {self.top_groups=} count")
        of_group = self.num_experts // self.groups
        if not 1 <= self.group_best <= of_group or self.top_k > self.top_groups * of_group:
            raise ValueError(f"{self.top_k=}, {self.group_best=}: there are {of_group} experts in a group")


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A mixture of experts in the MLP's place."""

    routing: Routing
    width: int  # F of an expert
    shared_width: int | None = None  # F of what every token passes; None: nothing
    shared_gate: Literal["sigmoid"] | None = None  # the shared part is multiplied by this of a product with the token

    def __post_init__(self) -> None:
        if self.width < 1 or (self.shared_width is not None and self.shared_width < 1):
            raise ValueError(f"{self.width=}, {self.shared_width=} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Latent attention (MLA): keys and values of all heads come from one row a token, which is what is cached."""

    latent_dim: int  # R
    rope_dim: int  # rotated numbers, shared by all heads
    nope_dim: int  # of a head, not rotated
    value_dim: int  # of a head
    query_rank: int | None  # queries pass through this many numbers; None: they do not
    norm_eps: float = 1e-6  # of the latents, whatever other norms have

    def __post_init__(self) -> None:
        for name in ("latent_dim", "rope_dim", "nope_dim", "value_dim", "query_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class AttentionGrowth:
    """Queries grow with their position, so that attention to many tokens stays sharp (Nakanishi, arXiv 2501.19399):
    times 1 + strength * log(1 + (position + 1) // every)."""

    every: int  # tokens
    strength: float

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"{self.every=} tokens must be at least 1")


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rope: RopeConfig | None  # None: queries and keys are not rotated
    window: int | None = None  # sliding attention window in tokens, None: sees everything
    chunk: int | None = None  # tokens of a chunk, which is all that a token of it sees, None: sees everything
    growth: AttentionGrowth | None = None
    moe: MoESpec | None = None  # None: a dense MLP

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise ValueError(f"{name}={size} must be at least 1: a token sees itself")


@dataclass(frozen=True, kw_only=True)
class StackSpec:
    """`periods` repetitions of a pattern of layers, the first of which is the model's layer `first_layer`."""

    pattern: tuple[LayerSpec, ...]
    first_layer: int
    periods: int

    @property
    def num_layers(self) -> int:
        return len(self.pattern) * self.periods

    def layers_at(self, place: int) -> range:
        """The model's layers that stand at this place of the pattern."""
        start = self.first_layer + place
        return range(start, start + self.num_layers, len(self.pattern))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    family: str
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    layers: tuple[LayerSpec, ...]
    max_position: int
    norm_eps: float
    tie_embeddings: bool
    activation: Activation | ClampedSwiGLU = "silu"  # of the MLP's gate
    biases: frozenset[Projection] = frozenset()  # the projections that have one
    # Of queries and keys: over each head; over all of a token's; or over each head after RoPE where there is some,
    # without factors.
    qk_norm: Literal["head", "projection", "rotated"] | None = None
    norms: Literal["input", "output", "both"] = "input"  # what is normed of attention and of the MLP
    norm_offset: float = 0.0  # a norm multiplies by offset + scale
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    latent: LatentConfig | None = None  # None: every kv head has keys and values of its own
    attention_scale: float
    sinks: Literal["learned"] | None = None  # a logit of each head that takes attention and gives nothing (gpt-oss)
    attention_soft_cap: float | None = None  # scores are cap * tanh(score / cap)
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None  # after the scale
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
                     "max_position"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads=} must be a multiple of {self.num_kv_heads=}")
        if not self.layers:
            raise ValueError("a model needs at least one layer")
        for rope in {layer.rope for layer in self.layers if layer.rope is not None}:
            if 2 * len(rope.frequencies) > self.head_dim:
                raise ValueError(f"{self.head_dim=} is less than the {2 * len(rope.frequencies)} rotated numbers")
        if self.latent is not None and any(layer.rope is None or layer.chunk or layer.growth for layer in self.layers):
            raise ValueError("latent attention has RoPE in all layers, no chunks and no growth")
        if not isinstance(self.activation, ClampedSwiGLU) and self.activation not in get_args(Activation):
            raise ValueError(f"{self.activation=} is not one of {', '.join(get_args(Activation))}")
        for name in ("attention_soft_cap", "logit_soft_cap"):
            cap = getattr(self, name)
            if cap is not None and not cap > 0:
                raise ValueError(f"{name}={cap} must be above 0")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_experts(self) -> int | None:
        """Of each layer that has some. None: no layer has."""
        counts = {layer.moe.routing.num_experts for layer in self.layers if layer.moe is not None}
        if len(counts) > 1:
            raise ValueError(f"layers with {sorted(counts)} experts cannot be mixed")
        return counts.pop() if counts else None

    @cached_property
    def stacks(self) -> tuple[StackSpec, ...]:
        """The layers as repeated patterns: 62 layers of five local and a global one are two stacks, ten times six and
        twice one. From the front, each stack takes the pattern that leaves the fewest layers to compile."""
        numbers: dict[LayerSpec, int] = {}
        kinds = [numbers.setdefault(layer, len(numbers)) for layer in self.layers]
        stacks, at = [], 0
        while at < self.num_layers:
            length, periods = _pattern(kinds, at)
            stacks.append(StackSpec(pattern=self.layers[at : at + length], first_layer=at, periods=periods))
            at += length * periods
        return tuple(stacks)


def _pattern(kinds: Sequence[int], first: int) -> tuple[int, int]:
    """Length and repetitions of the pattern that saves the most layers, starting at `first`; the shortest of equals.
    Where none repeats, that layer alone."""
    best = (1, 1)
    for length in range(1, _LONGEST_PATTERN + 1):
        end = first + length
        while end < len(kinds) and kinds[end] == kinds[end - length]:
            end += 1
        periods = (end - first) // length
        if length * (periods - 1) > best[0] * (best[1] - 1):
            best = (length, periods)
    return best
