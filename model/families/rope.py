"""RoPE scalings as Hugging Face configs write them, resolved into numbers.

Two of them, `dynamic` and `longrope`, are defined by the length of a sequence. Keys are cached and shared between
sequences, so here they follow from the longest sequence that will be served, the same for all. Transformers looks at
each sequence anew; the two agree for a sequence of that length (longrope: for those on the same side of the original
context).

Sources: transformers `modeling_rope_utils.py`; YaRN: Peng et al. 2023; LongRoPE: Ding et al. 2024.
Axis letters: R rotated pairs of a head.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from model.config import RopeConfig

_MOST_ROTATED = 1 << 16  # more is a damaged file


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """What a scaling starts from. context: the longest sequence that will be served."""

    theta: float
    dim: int  # rotated numbers of a head, 2R
    max_position: int
    context: int

    def frequencies(self, theta: float | None = None) -> np.ndarray:
        """[R], radians a position, unscaled."""
        # In f32 as models are trained: another last bit is another angle at position 100 000.
        return 1 / (theta or self.theta) ** (np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim))


class Parameters:
    """One scaling's parameters; each is taken once, and none may be left. Raises ValueError with its name."""

    def __init__(self, values: Mapping[str, Any]):
        self._left = {key: value for key, value in values.items() if value is not None}
        kinds = [self._left.pop(key) for key in ("rope_type", "type") if key in self._left]
        self.kind = str(kinds[0]) if kinds else "default"

    def number(self, name: str, default: float | None = None) -> float:
        value = self._left.pop(name, default)
        if value is None:
            raise ValueError(f"rope scaling {self.kind!r} needs {name!r}")
        if not isinstance(value, int | float):
            raise ValueError(f"{name}={value!r} of rope scaling {self.kind!r} must be a number")
        return value

    def optional(self, name: str) -> float | None:
        return self.number(name) if name in self._left else None

    def numbers(self, name: str, count: int) -> np.ndarray:
        value = self._left.pop(name, None)
        if not isinstance(value, list) or len(value) != count or not all(isinstance(x, int | float) for x in value):
            raise ValueError(f"{name} of rope scaling {self.kind!r} must be a list of {count} numbers")
        return np.array(value)

    def finish(self) -> None:
        if self._left:
            raise ValueError(f"unknown rope scaling keys {sorted(self._left)} for kind {self.kind!r}")


def resolve(rotary: Rotary, parameters: Parameters, **fields: Any) -> RopeConfig:
    """`fields` are passed on to RopeConfig. Raises ValueError."""
    if rotary.dim % 2 or not 2 <= rotary.dim <= _MOST_ROTATED:
        raise ValueError(f"{rotary.dim} numbers of a head cannot be rotated: RoPE needs pairs, {_MOST_ROTATED} at most")
    if parameters.kind not in _KINDS:
        raise ValueError(f"rope scaling {parameters.kind!r} is not supported, only {', '.join(_KINDS)}")
    with np.errstate(all="ignore"):
        frequencies, magnitude = _KINDS[parameters.kind](rotary, parameters)
    parameters.finish()
    if not np.isfinite([*frequencies, magnitude]).all():
        raise ValueError(f"rope scaling {parameters.kind!r} with rope_theta={rotary.theta} gives no finite frequencies")
    return RopeConfig(frequencies=tuple(map(float, frequencies)), magnitude=magnitude, **fields)


def reach(parameters: Mapping[str, Any], max_position: int) -> int:
    """The longest sequence, where the scaling extends the config's `max_position_embeddings`."""
    taken = Parameters(parameters)
    if taken.kind == "dynamic":
        return int(max_position * taken.number("factor"))
    if taken.kind == "yarn":
        original = taken.number("original_max_position_embeddings", max_position)
        return max(max_position, int(original * (taken.optional("factor") or 1)))
    return max_position


Scaled = tuple[np.ndarray, float]  # frequencies [R], magnitude


def _default(rotary: Rotary, parameters: Parameters) -> Scaled:
    return rotary.frequencies(), 1.0


def _linear(rotary: Rotary, parameters: Parameters) -> Scaled:
    """Positions divided by the factor."""
    return rotary.frequencies() / parameters.number("factor"), 1.0


def _llama3(rotary: Rotary, parameters: Parameters) -> Scaled:
    """Low frequencies divided by the factor, high ones kept, a blend between (Llama 3.1)."""
    factor = parameters.number("factor")
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    original = parameters.number("original_max_position_embeddings")
    turns = original * rotary.frequencies() / (2 * math.pi)  # in the original context
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return rotary.frequencies() * (keep + (1 - keep) / factor), 1.0


def _dynamic(rotary: Rotary, parameters: Parameters) -> Scaled:
    """A larger base the further the context goes beyond the trained one ("NTK-aware")."""
    factor, dim = parameters.number("factor"), rotary.dim
    parameters.optional("original_max_position_embeddings")  # transformers does not read it either
    growth = factor * max(rotary.context, rotary.max_position) / rotary.max_position - (factor - 1)
    return rotary.frequencies(rotary.theta * growth ** (dim / (dim - 2))), 1.0


def _yarn(rotary: Rotary, parameters: Parameters) -> Scaled:
    """Frequencies that turn rarely in the original context are divided by the factor, frequent ones kept, a ramp over
    their index between; and scores grow a little."""
    original = parameters.number("original_max_position_embeddings", rotary.max_position)
    factor = parameters.number("factor", rotary.max_position / original)
    fast, slow = parameters.number("beta_fast", 32), parameters.number("beta_slow", 1)
    truncate = parameters.number("truncate", True)
    magnitude, more = parameters.optional("attention_factor"), parameters.number("attn_factor", 1.0)
    scales = parameters.optional("mscale"), parameters.optional("mscale_all_dim")

    def index_of(turns: float) -> float:
        """The pair that turns this often in the original context."""
        return rotary.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))

    low, high = index_of(fast), index_of(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    ramp = np.clip((np.arange(rotary.dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)

    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if magnitude is None:
        magnitude = growth(scales[0]) / growth(scales[1]) if scales[0] and scales[1] else growth(1.0)
    # vLLM's `attn_factor` is a factor of the growth; of DeepSeek-R1-0528-Qwen3-8B one that takes it back.
    return rotary.frequencies() * (1 - ramp + ramp / factor), magnitude * more


def _longrope(rotary: Rotary, parameters: Parameters) -> Scaled:
    """Each frequency has its own divisor, one for contexts within the original and one for longer ones."""
    short = parameters.numbers("short_factor", rotary.dim // 2)
    long = parameters.numbers("long_factor", rotary.dim // 2)
    original = parameters.number("original_max_position_embeddings", rotary.max_position)
    factor = parameters.number("factor", rotary.max_position / original)
    magnitude = parameters.optional("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return rotary.frequencies() / (long if rotary.context > original else short), magnitude


_KINDS: Mapping[str, Callable[[Rotary, Parameters], Scaled]] = {
    "default": _default, "linear": _linear, "llama3": _llama3, "dynamic": _dynamic, "yarn": _yarn,
    "longrope": _longrope,
}  # fmt: skip
