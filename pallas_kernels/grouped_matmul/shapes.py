"""The expert matmuls of real models: what is compiled for absent chips, scheduled, tuned and timed."""

from collections.abc import Iterator
from dataclasses import dataclass

from pallas_kernels.grouped_matmul.spec import Problem

DECODE, PREFILL = 32, 4096  # tokens of a step


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A model's experts on one device: `held` of them, top_k for each token; hidden size D, width F."""

    name: str
    held: int
    top_k: int
    hidden: int
    width: int


MODELS = (
    Experts(name="Mixtral-8x7B", held=8, top_k=2, hidden=4096, width=14336),
    Experts(name="Qwen3-30B-A3B", held=128, top_k=8, hidden=2048, width=768),
    # Of 256, over 8 devices: rows of a device's own experts only.
    Experts(name="DeepSeek-V3 over 8", held=32, top_k=1, hidden=7168, width=2048),
)
WEIGHTS = (("bfloat16", None), ("int8", 0), ("int8", 128), ("float8_e4m3fn", 0))  # dtype, group (0: a column's)


def named_problems() -> Iterator[tuple[str, Problem]]:
    """(name, problem): up (hidden to width) and down projections, decode and prefill, each kind of weights."""
    for model in MODELS:
        for step, tokens in (("decode", DECODE), ("prefill", PREFILL)):
            for side, (depth, columns) in (("up", (model.hidden, model.width)), ("down", (model.width, model.hidden))):
                for dtype, group in WEIGHTS:
                    kind = dtype if not group else f"{dtype} by {group}"
                    yield f"{model.name} {step} {side} {kind}", Problem(
                        rows=tokens * model.top_k, depth=depth, columns=columns, experts=model.held,
                        weight_dtype=dtype, group=0 if group is None else group or depth,
                    )  # fmt: skip
