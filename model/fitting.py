"""Whether the mesh axis `tensor` divides a model, and which sizes of it would."""

from model.config import ModelConfig
from sharding.mesh import MeshError


def heads_divide(config: ModelConfig, tensor: int) -> bool:
    """Each device may hold a copy of one kv head, see `sharding.rules.axis_rules`."""
    N, K = config.num_heads, config.num_kv_heads
    return N % tensor == 0 and (K % tensor == 0 or tensor % K == 0)


def parts_divide(config: ModelConfig, tensor: int) -> dict[str, bool]:
    """For each part of the model, in words, whether so many devices can share it out."""
    widths = {layer.moe.shared_width if layer.moe else config.intermediate_size for layer in config.layers} - {None}
    counts = {"a vocabulary of": {config.vocab_size}, "a feed-forward of": widths, "experts:": {config.num_experts}}
    return {
        f"{config.num_heads} heads with {config.num_kv_heads} kv heads": heads_divide(config, tensor),
        **{f"{what} {size}": size % tensor == 0 for what, sizes in counts.items() for size in sizes if size},
    }


def check_tensor(config: ModelConfig, tensor: int) -> str | None:
    """What to say beside attention that is whole on every device: the sizes that would divide it. MeshError where
    `tensor` divides nothing."""
    parts, smaller = parts_divide(config, tensor), range(2, tensor)
    if not any(parts.values()):
        divided = {size: parts_divide(config, size).values() for size in smaller}
        would = [size for size in smaller if all(divided[size])] or [size for size in smaller if any(divided[size])]
        raise MeshError(
            f"--mesh tensor={tensor} divides nothing of this model ({', '.join(parts)}); tensor={_or(would)} does"
        )
    if heads_divide(config, tensor):
        return None
    return f"tensor={_or([size for size in smaller if heads_divide(config, size)])} would divide it"


def _or(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes[-4:])) if sizes else "1"
