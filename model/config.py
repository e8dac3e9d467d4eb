"""What a decoder-only transformer is made of, as data. Families read it from a Hugging Face config."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `kind` names the frequency scaling.

    linear: positions divided by `factor`. llama3: low frequencies divided by `factor`, high ones kept, a smooth blend
    between (Llama 3.1). The last three fields are only for llama3.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What may differ from layer to layer. Neighbouring layers with equal specs form one stack."""

    window: int | None = None  # sliding attention window in tokens, None: sees everything

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"{self.window=} must be at least 1: a token sees itself")


@dataclass(frozen=True, kw_only=True)
class StackSpec:
    """`num_layers` equal layers, the first of which is the model's layer `first_layer`."""

    layer: LayerSpec
    first_layer: int
    num_layers: int


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
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each query and key head (Qwen3)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
                     "max_position"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads=} must be a multiple of {self.num_kv_heads=}")
        if self.head_dim % 2:
            raise ValueError(f"{self.head_dim=} must be even: RoPE rotates pairs")
        if not self.layers:
            raise ValueError("a model needs at least one layer")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def stacks(self) -> tuple[StackSpec, ...]:
        """Maximal runs of equal layers."""
        starts = [i for i in range(self.num_layers) if i == 0 or self.layers[i] != self.layers[i - 1]]
        ends = [*starts[1:], self.num_layers]
        return tuple(
            StackSpec(layer=self.layers[start], first_layer=start, num_layers=end - start)
            for start, end in zip(starts, ends, strict=True)
        )
