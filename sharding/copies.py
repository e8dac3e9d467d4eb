"""Copies of kv heads, for a mesh with more devices along `tensor` than a model has kv heads.

Each device then holds the one head that its query heads use (vLLM's way), so the axis "kv_heads" of parameters and KV
pages counts copies, those of a head side by side. A checkpoint has every head once. Nothing is moved to go from one
view to the other: a device's shard is the same array, and only what the whole is called changes.
"""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding

from sharding.rules import Axes, AxisRules


def stored_layout(rules: AxisRules, axes: Axes, shape: Sequence[int]) -> tuple[tuple[int, ...], NamedSharding]:
    """Of an array with these axes and, counting copies, this shape: the shape that a checkpoint has, and the sharding
    that gives each device of it what it holds."""
    shape, sharding = tuple(shape), rules.sharding(axes, shape)
    for place, axis in enumerate(axes):
        copies = rules.copies.get(axis, 1) if axis is not None else 1
        if copies > 1:
            split = sharding.spec[place]
            assert isinstance(split, str), f"{axis} has copies: it must be divided over one mesh axis, not {split}"
            mesh = _split_axis(rules.mesh, split, copies)
            shape = (*shape[:place], shape[place] // copies, *shape[place + 1 :])
            sharding = NamedSharding(mesh, sharding.spec)
    return shape, sharding


def with_copies(rules: AxisRules, axes: Axes, shape: Sequence[int], stored: jax.Array) -> jax.Array:
    """The array that the model takes, from one with `stored_layout`."""
    return _renamed(stored, tuple(shape), rules.sharding(axes, shape))


def without_copies(rules: AxisRules, axes: Axes, held: jax.Array) -> jax.Array:
    """The array as a checkpoint has it: the reverse."""
    return _renamed(held, *stored_layout(rules, axes, held.shape))


def _renamed(x: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    if x.shape == shape:
        return x
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _split_axis(mesh: Mesh, axis: str, copies: int) -> Mesh:
    """The same devices with `axis` as two axes, of which the inner one, of this size, is called "copies"."""
    at, sizes = mesh.axis_names.index(axis), mesh.devices.shape
    devices = mesh.devices.reshape(*sizes[:at], sizes[at] // copies, copies, *sizes[at + 1 :])
    return Mesh(devices, (*mesh.axis_names[: at + 1], "copies", *mesh.axis_names[at + 1 :]))
