"""Which checkpoint tensors make each parameter: a table from a layer's parameters to names within
`model.layers.<number>.`, mostly Llama's."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from checkpoints.tensors import ParamSource, Part, Rows
from model.config import ModelConfig

Path = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Where a parameter lies, if it is not a tensor of its own. rows, part: see `ParamSource`. turned: matrices are
    stored as [out, in], as Hugging Face mostly does."""

    name: str
    rows: Rows | None = None
    part: Part | None = None
    turned: bool = True


# A tensor's name. "{expert}" in it stands for each expert's number: the parameter has an axis of experts before others.
Names = Mapping[Path, str | Stored]

HEAD = "lm_head.weight"
_OUTSIDE: Mapping[Path, str] = {
    ("embedding",): "model.embed_tokens.weight", ("head",): HEAD, ("norm", "scale"): "model.norm.weight",
}  # fmt: skip

LLAMA: Names = {
    **{("attention", x): f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{("attention", f"{x}_bias"): f"self_attn.{x}_proj.bias" for x in "qkvo"},
    **{("attention", f"{x}_norm", "scale"): f"self_attn.{x}_norm.weight" for x in "qk"},
    **{("mlp", x): f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    **{("mlp", f"{x}_bias"): f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")},
    ("attention_norm", "scale"): "input_layernorm.weight",
    ("mlp_norm", "scale"): "post_attention_layernorm.weight",
}

# Of Qwen's mixtures of experts, and most others.
EXPERTS: Names = {
    ("mlp", "router"): "mlp.gate.weight",
    **{("mlp", "experts", x): f"mlp.experts.{{expert}}.{x}_proj.weight" for x in ("gate", "up", "down")},
}


def fused(name: str, parts: Mapping[Path, int]) -> Names:
    """One tensor that holds several parameters, one below the other, each with this many rows."""
    total, start, found = sum(parts.values()), 0, {}
    for path, rows in parts.items():
        found[path] = Stored(name=name, rows=Rows(start=start, stop=start + rows, total=total))
        start += rows
    return found


def fused_qkv(config: ModelConfig) -> Names:
    rows = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    return fused("self_attn.qkv_proj.weight", {("attention", x): n * config.head_dim for x, n in rows.items()})


def fused_gate_up(config: ModelConfig) -> Names:
    return fused("mlp.gate_up_proj.weight", {("mlp", x): config.intermediate_size for x in ("gate", "up")})


def sources(config: ModelConfig, names: Names, paths: Iterable[Path], prefix: str = "") -> dict[Path, ParamSource]:
    """Of every parameter that the model has. prefix: of all names."""
    return {path: _source(config, names, path, prefix) for path in paths}


def _source(config: ModelConfig, names: Names, path: Path, prefix: str) -> ParamSource:
    match path:
        case ("stacks", stack, "layers", place, *of_layer):
            spec = config.stacks[int(stack)]
            layers, moe = spec.layers_at(int(place)), spec.pattern[int(place)].moe
        case _ if path in _OUTSIDE:
            return ParamSource(names=(prefix + _OUTSIDE[path],), stacked=False)
        case _:
            raise KeyError(f"no tensor is known for the parameter {'.'.join(path)}")
    entry = names[tuple(of_layer)]
    stored = Stored(name=entry) if isinstance(entry, str) else entry
    experts = moe.routing.num_experts if moe is not None and "{expert}" in stored.name else None
    return ParamSource(
        names=tuple(
            f"{prefix}model.layers.{layer}.{stored.name.format(expert=expert)}"
            for layer in layers for expert in range(experts or 1)
        ),
        stacked=True,
        experts=experts,
        transpose=stored.turned and not path[-1].endswith(("bias", "scale")),
        rows=stored.rows,
        part=stored.part,
    )  # fmt: skip
