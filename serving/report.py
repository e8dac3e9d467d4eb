"""What a service tells at start: what was chosen, where it lies, and what could not be divided."""

import math
from collections.abc import Iterator, Mapping

import jax

from model import pipeline
from model.build import Kernels
from model.transformer import Path, Transformer
from serving.request import EngineInfo
from serving.runner.memory import bytes_per_device
from serving.runner.runner import ModelRunner
from sharding.drawing import draw_mesh
from sharding.rules import AxisRules


def start_report(runner: ModelRunner, model: Transformer, params: Mapping[Path, jax.Array], kernels: Kernels,
                 info: EngineInfo) -> list[str]:  # fmt: skip
    config, rules, usage = model.config, model.rules, runner.memory_usage
    pages, tokens = info.num_pages - 1, (info.num_pages - 1) * info.page_size
    each = f" in each of {rules.num_groups} data groups" if rules.num_groups > 1 else ""
    lines = [
        f"Model {config.family}: {info.num_parameters / 1e6:.1f}M parameters, {config.num_layers} layers, {info.dtype}",
        f"Mesh {info.mesh} on {jax.default_backend()} ({rules.mesh.size} of {jax.device_count()} devices)",
        *(f"  {line}" for line in draw_mesh(rules.mesh) if rules.mesh.size > 1),
        *_pipeline_lines(runner, rules),
        *_kernel_lines(kernels),
        f"Bytes{' on each device' if rules.mesh.size > 1 else ''}: " +
        ", ".join(f"{kind} {_size(count)}" for kind, count in usage.items()) + f"; {_limit(runner, usage)}",
        *(f"Replicated: {axis}: {why}" for axis, why in rules.replicated.items()),
        *replicated_weights(rules, params),
        f"KV cache: {pages} pages of {info.page_size} tokens = {tokens} tokens{each}, "
        f"{tokens / info.max_model_len:.1f} sequences of {info.max_model_len} tokens",
    ]
    if info.max_model_len < config.max_position:
        lines.append(f"Context: {info.max_model_len} tokens, of the {config.max_position} that the model could use")
    lines.append(f"Steps: up to {info.max_num_seqs} sequences and {info.max_num_batched_tokens} tokens{each}, "
                 f"{len(runner.shapes)} compiled shapes")
    if info.acceptance == "typical":
        lines.append("Acceptance of drafts: typical. The output does NOT follow the model's distribution; leave "
                     "rejection_sample_method out of --speculative-config and it does")  # fmt: skip
    return lines


def replicated_weights(rules: AxisRules, params: Mapping[Path, jax.Array]) -> Iterator[str]:
    """For each axis of the mesh, the weights that all its devices hold whole."""
    reasons = {
        "tensor": "tensor divides none of their axes",
        "data": "each group computes its own tokens",
        "context": "each device computes its own tokens",
        "pipeline": "all stages need them, or none has a whole one",
    }
    for axis, size in rules.mesh.shape.items():
        if size == 1:
            continue
        whole = {path: x for path, x in params.items() if not _divided_over(axis, x)}
        if not whole:
            continue
        weights = bytes_per_device(list(whole.values()))
        names = list(dict.fromkeys(_name(path) for path in sorted(whole, key=lambda path: -params[path].size)))
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        if len(whole) == len(params):
            shown = "all weights"
        yield f"Replicated over {axis}: {shown} ({_size(weights)}): {reasons[axis]}"


def _divided_over(axis: str, x: jax.Array) -> bool:
    assert isinstance(x.sharding, jax.sharding.NamedSharding)
    return any(axis == part or (isinstance(part, tuple) and axis in part) for part in x.sharding.spec)


def _name(path: Path) -> str:
    """`stacks.0.layers.0.mlp.gate` to `mlp.gate`: the same in all layers."""
    parts = [part for part in path if not part.isdigit() and part not in ("stacks", "layers")]
    return ".".join(parts)


def _pipeline_lines(runner: ModelRunner, rules: AxisRules) -> Iterator[str]:
    stages, platform = pipeline.num_stages(rules), rules.mesh.devices.flat[0].platform
    if stages == 1:
        return
    decode = max(shape for shape in runner.shapes if shape.num_tokens == shape.num_rows)
    for what, shape in (("Decoding", decode), ("The largest step", runner.shapes[-1])):
        count = pipeline.num_micro_batches(shape.num_tokens, shape.num_rows, stages, platform)
        parts = "whole" if count == 1 else f"in {count} micro-batches"
        idle = pipeline.bubble(count, stages)
        yield f"{what} ({shape}) passes {stages} stages {parts}: {idle:.0%} of their time is idle"


def _kernel_lines(kernels: Kernels) -> Iterator[str]:
    chosen = {"Attention": kernels.attention.choice, "Experts": kernels.experts and kernels.experts.matmuls}
    for what, choice in chosen.items():
        if choice is not None:
            simulated = ", simulated on the CPU: exact and slow" if choice.simulated else ""
            because = "" if choice.fallback is None else f", because of {choice.fallback}"
            yield f"{what}: {choice.name}{simulated}{because}"
    if (experts := kernels.experts) is not None:
        held, places = experts.matmuls.spec.num_experts, experts.num_places
        redundant = f", {experts.max_replicas - 1} of them redundant; they move" if experts.max_replicas else ""
        yield f"  {places} in each layer{redundant}; {held} on a device; rows are {experts.dispatch}"


def _limit(runner: ModelRunner, usage: Mapping[str, int]) -> str:
    memory = runner.memory
    total = _size(sum(usage.values()))
    if memory is None:
        return f"{total} in all"
    return f"{total} of the {_size(int(memory.limit * memory.share))} ({memory.share:.1%}) that may be used"


def _size(count: int) -> str:
    """Decimal, three digits: 0.31 MB, 12.5 MB, 3.42 GB."""
    unit, scale = ("GB", 1e9) if count >= 1e9 else ("MB", 1e6)
    value = count / scale
    digits = 2 if value < 1 else max(0, 2 - int(math.log10(value)))
    return f"{value:.{digits}f} {unit}"
