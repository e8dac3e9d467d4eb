"""The one table from logical axes to mesh axes. Layers name logical axes; nothing else writes a PartitionSpec.

A dimension that its mesh axes do not divide is replicated instead, and the table remembers why, so that the service
can say at start what is replicated.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

Axes = tuple[str | None, ...]
MeshAxes = tuple[str, ...]  # a dimension is divided over all of them, the first one outermost

DEFAULT_RULES: Mapping[str, MeshAxes] = {
    # Of a step, group after group.
    "tokens": ("data",),
    "rows": ("data",),
    "packed_tokens": ("data",),  # as the host packs them, in the order of their rows
    "plans": ("data", "context"),  # what each device has once
    "groups": ("data",),  # what each group of sequences has once, or a fixed number of times
    # Of weights and activations.
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("tensor",),
    "expert_mlp": (),  # whole: an expert is on one device
    "embed": (),
    "head_dim": (),
    "layers": ("pipeline",),
    "latent": (),
    # Of what stays on the devices.
    "slots": ("data",),
    "pages": ("data",),
    "k_or_v": (),
    "page_tokens": ("context",),
    "page_rows": (),
}

_STEP_AXES = ("tokens", "packed_tokens", "rows", "groups")  # what they cannot divide simply stays whole


@dataclass(frozen=True, kw_only=True)
class AxisRules:
    """A mesh and its rules. `replicated` collects, as axis -> reason, what could not be sharded as the rules say.

    copies: axes of which the devices hold more than a checkpoint does, each so many times (see `sharding.copies`).
    around: mesh axes of a `shard_map` around whatever uses these rules: its arrays are shards of those already."""

    mesh: jax.sharding.Mesh
    rules: Mapping[str, MeshAxes]
    copies: Mapping[str, int] = field(default_factory=dict)
    replicated: dict[str, str] = field(default_factory=dict, compare=False)
    around: MeshAxes = ()

    def __hash__(self) -> int:
        return hash((self.mesh, tuple(sorted(self.rules.items())), tuple(sorted(self.copies.items())), self.around))

    def within(self, *mesh_axes: str) -> "AxisRules":
        """The same rules inside a `shard_map` over these mesh axes only."""
        return replace(self, around=mesh_axes)

    @property
    def num_groups(self) -> int:
        """Groups of sequences, each with rows, slots and pages of its own."""
        return self.mesh.shape["data"]

    def spec(self, axes: Axes, shape: Sequence[int]) -> PartitionSpec:
        """The partition of an array whose dimensions have these logical axes (None: never sharded)."""
        if len(axes) != len(shape):
            raise ValueError(f"{axes=} name {len(axes)} dimensions, the array has shape {tuple(shape)}")
        used: dict[str, str] = {}
        parts: list[str | MeshAxes | None] = []
        for axis, size in zip(axes, shape, strict=True):
            over = self.over(axis, size)
            for mesh_axis in over:
                if mesh_axis in used:
                    raise ValueError(f"{axis!r} and {used[mesh_axis]!r} both map to mesh axis {mesh_axis!r} in {axes}")
                used[mesh_axis] = str(axis)
            parts.append(None if not over else over[0] if len(over) == 1 else over)
        return PartitionSpec(*parts)

    def held(self, axis: str, size: int) -> int:
        """How long the dimension is with its copies."""
        return size * self.copies.get(axis, 1)

    def sharding(self, axes: Axes, shape: Sequence[int]) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def shards(self, axis: str, size: int) -> int:
        """Over how many devices a dimension of this size is divided."""
        return math.prod(self.mesh.shape[mesh_axis] for mesh_axis in self.over(axis, size))

    def place(self, axis: str, size: int) -> jax.Array | int:
        """Within `map_over_shards`: which of those devices this is."""
        over = self.over(axis, size)
        return jax.lax.axis_index(over) if over else 0

    def sum_over(self, axis: str, size: int, x: jax.Array) -> jax.Array:
        """Within `map_over_shards`: the sum over those devices."""
        over = self.over(axis, size)
        return jax.lax.psum(x, over) if over else x

    def over(self, axis: str | None, size: int) -> MeshAxes:
        """The mesh axes, of more than one device, that a dimension of this size is divided over."""
        if axis is None:
            return ()
        if axis not in self.rules:
            raise KeyError(f"unknown logical axis {axis!r}; known: {', '.join(sorted(self.rules))}")
        divided = (mesh_axis for mesh_axis in self.rules[axis] if mesh_axis not in self.around)
        over = tuple(mesh_axis for mesh_axis in divided if self.mesh.shape[mesh_axis] > 1)
        if size % math.prod(self.mesh.shape[mesh_axis] for mesh_axis in over):
            if axis not in _STEP_AXES:
                sizes = " x ".join(f"{mesh_axis}={self.mesh.shape[mesh_axis]}" for mesh_axis in over)
                self.replicated[axis] = f"{size} {axis} do not divide over {sizes}"
            return ()
        return over

    @property
    def whole(self) -> NamedSharding:
        """Replicated on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Tells the compiler how `x` is laid out here."""
        if self.mesh.size == 1:
            return x
        spec = self.spec(axes, x.shape)  # inside a shard_map: of the mesh that it surrounds everything with
        return jax.lax.with_sharding_constraint(x, spec if self.around else NamedSharding(self.mesh, spec))

    def map_over_shards(self, f: Callable, args: Sequence[Any], in_axes: Sequence[Axes], out_axes: Sequence[Axes],
                        out_shapes: Sequence[Sequence[int]]) -> tuple[Any, ...]:
        """Runs `f`, which returns a tuple, on each device's shard of `args`; what is not sharded arrives whole.

        An argument or result may be a tree of arrays. Axes and shapes may name the first dimensions only, those that
        all arrays of a tree share."""
        if self.mesh.size == 1:
            return f(*args)
        in_specs = tuple(self._spec_of_tree(axes, arg) for axes, arg in zip(in_axes, args, strict=True))
        out_specs = tuple(self.spec(axes, shape) for axes, shape in zip(out_axes, out_shapes, strict=True))
        mesh, over = None if self.around else self.mesh, set(self.mesh.axis_names) - set(self.around)
        return jax.shard_map(f, mesh=mesh, axis_names=over, in_specs=in_specs, out_specs=out_specs,
                             check_vma=False)(*args)  # fmt: skip

    def _spec_of_tree(self, axes: Axes, tree: Any) -> PartitionSpec:
        leaves = jax.tree.leaves(tree)
        return self.spec(axes, leaves[0].shape[: len(axes)]) if leaves else PartitionSpec()


def axis_rules(mesh: jax.sharding.Mesh, *, num_heads: int, num_kv_heads: int) -> AxisRules:
    """The default rules for a model on a mesh.

    Query heads follow their kv heads. Where there are fewer kv heads than devices along `tensor`, each device holds a
    copy of the one that its query heads use; where that does not come out even, attention is replicated whole.
    """
    rules = dict(DEFAULT_RULES)
    replicated: dict[str, str] = {}
    copies: dict[str, int] = {}
    tensor = mesh.shape["tensor"]
    if num_kv_heads % tensor and tensor % num_kv_heads == 0 and num_heads % tensor == 0:
        copies["kv_heads"] = tensor // num_kv_heads
        replicated["kv heads"] = (
            f"{num_kv_heads} kv heads are fewer than tensor={tensor}: each device holds the one that its query heads "
            f"use, so every kv head is on {copies['kv_heads']} devices"
        )
    elif num_kv_heads % tensor:
        rules["heads"] = rules["kv_heads"] = ()
        replicated["attention"] = (
            f"{num_kv_heads} kv heads ({num_heads} query heads) do not divide over tensor={tensor}: "
            "attention weights and KV pages are on every device"
        )
    return AxisRules(mesh=mesh, rules=rules, copies=copies, replicated=replicated)
