"""The one table from logical axes to mesh axes. Layers name logical axes; nothing else writes a PartitionSpec.

A dimension that its mesh axis does not divide is replicated instead, and the table remembers why, so that the service
can say at start what is replicated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
from jax.sharding import NamedSharding, PartitionSpec

Axes = tuple[str | None, ...]

DEFAULT_RULES: Mapping[str, str | None] = {
    "tokens": "data",
    "rows": None,
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "tensor",
    "expert_mlp": None,  # whole: an expert is on one device
    "embed": None,
    "head_dim": None,
    "layers": None,
    "slots": None,
    "pages": None,
    "k_or_v": None,
    "page_tokens": None,
    "page_rows": None,
    "latent": None,
}


@dataclass(frozen=True, kw_only=True)
class AxisRules:
    """A mesh and its rules. `replicated` collects, as axis -> reason, what could not be sharded as the rules say."""

    mesh: jax.sharding.Mesh
    rules: Mapping[str, str | None]
    replicated: dict[str, str] = field(default_factory=dict, compare=False)

    def __hash__(self) -> int:
        return hash((self.mesh, tuple(sorted(self.rules.items(), key=str))))

    def spec(self, axes: Axes, shape: Sequence[int]) -> PartitionSpec:
        """The partition of an array whose dimensions have these logical axes (None: never sharded)."""
        if len(axes) != len(shape):
            raise ValueError(f"{axes=} name {len(axes)} dimensions, the array has shape {tuple(shape)}")
        used: dict[str, str] = {}
        parts: list[str | None] = []
        for axis, size in zip(axes, shape, strict=True):
            if axis is not None and axis not in self.rules:
                raise KeyError(f"unknown logical axis {axis!r}; known: {', '.join(sorted(self.rules))}")
            mesh_axis = self.rules[axis] if axis is not None else None
            devices = self.mesh.shape[mesh_axis] if mesh_axis else 1
            if mesh_axis is None or devices == 1:
                parts.append(None)
                continue
            if size % devices:
                if axis not in ("tokens", "rows"):  # step shapes: small steps simply stay whole
                    self.replicated[str(axis)] = f"{size} {axis} do not divide over {mesh_axis}={devices}"
                parts.append(None)
                continue
            if mesh_axis in used:
                raise ValueError(f"{axis!r} and {used[mesh_axis]!r} both map to mesh axis {mesh_axis!r} in {axes}")
            used[mesh_axis] = str(axis)
            parts.append(mesh_axis)
        return PartitionSpec(*parts)

    def sharding(self, axes: Axes, shape: Sequence[int]) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def shards(self, axis: str, size: int) -> int:
        """Over how many devices a dimension of this size is divided."""
        spec = self.spec((axis,), (size,))
        return self.mesh.shape[spec[0]] if spec[0] else 1

    def place(self, axis: str, size: int) -> jax.Array | int:
        """Within `map_over_shards`: which of those devices this is."""
        return jax.lax.axis_index(self.rules[axis]) if self.shards(axis, size) > 1 else 0

    def sum_over(self, axis: str, size: int, x: jax.Array) -> jax.Array:
        """Within `map_over_shards`: the sum over those devices."""
        return jax.lax.psum(x, self.rules[axis]) if self.shards(axis, size) > 1 else x

    @property
    def whole(self) -> NamedSharding:
        """Replicated on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Tells the compiler how `x` is laid out here."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape))

    def map_over_shards(self, f: Callable, args: Sequence[jax.Array], in_axes: Sequence[Axes], out_axes: Sequence[Axes],
                        out_shapes: Sequence[Sequence[int]]):
        """Runs `f` on each device's shard of `args`. Axes that are not sharded arrive whole."""
        if self.mesh.size == 1:
            return f(*args)
        in_specs = tuple(self.spec(axes, arg.shape) for axes, arg in zip(in_axes, args, strict=True))
        out_specs = tuple(self.spec(axes, shape) for axes, shape in zip(out_axes, out_shapes, strict=True))
        return jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*args)


def axis_rules(mesh: jax.sharding.Mesh, *, num_heads: int, num_kv_heads: int) -> AxisRules:
    """The default rules for a model on a mesh.

    Query heads follow their kv heads: when the kv heads do not divide over `tensor`, attention is replicated whole.
    """
    rules = dict(DEFAULT_RULES)
    replicated = {}
    tensor = mesh.shape["tensor"]
    if num_kv_heads % tensor:
        rules["heads"] = rules["kv_heads"] = None
        replicated["attention"] = (
            f"{num_kv_heads} kv heads ({num_heads} query heads) do not divide over tensor={tensor}: "
            "attention weights and KV pages are on every device"
        )
    if mesh.shape["data"] > 1:
        replicated["KV pages"] = f"every one of the data={mesh.shape['data']} groups holds all sequences' pages"
    return AxisRules(mesh=mesh, rules=rules, replicated=replicated)
