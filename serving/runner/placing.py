"""Experts in places, for a checkpoint that has each of them once.

With redundant experts the model's arrays have more places than there are experts, and tables that say where each lies
(see `model.experts`). A checkpoint is loaded as it is, and then spread, one parameter after the other.
"""

from collections.abc import Mapping
from functools import partial

import jax
import numpy as np

from model.experts import Placement
from model.transformer import Path, Transformer, variables_of
from sharding.exchange import exchange_for
from sharding.expert_placement import first_placement, places_of
from sharding.moving import spread_experts
from sharding.rules import Axes


def stored_shape(model: Transformer, axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a parameter with these axes and this shape, what a checkpoint has: as many experts as the model."""
    experts = model.config.num_experts
    return tuple(experts if axis == "experts" and experts else size for axis, size in zip(axes, shape, strict=True))


def place_experts(model: Transformer, axes: Mapping[Path, tuple[tuple[int, ...], Axes]],
                  params: Mapping[Path, jax.Array]) -> dict[Path, jax.Array]:  # fmt: skip
    """The parameters with their shapes in `axes`, from stored ones; and the model's tables."""
    tables = _tables(model)
    if not tables:
        return dict(params)
    rules, num_experts = model.rules, model.config.num_experts
    assert num_experts is not None
    spread = partial(spread_experts, rules, exchange_for(rules.mesh.devices.flat[0]))
    placed: dict[Path, jax.Array] = {}
    for path, (shape, names) in axes.items():
        placed[path] = params[path]
        if "experts" in names and shape != params[path].shape:
            sources = first_placement(shape[0], num_experts, shape[1]).astype(np.int32)
            out = rules.sharding(names, shape)
            placed[path] = jax.block_until_ready(jax.jit(spread, out_shardings=out)(params[path], sources))
    rules.replicated.pop("experts", None)  # a checkpoint's may not divide over the devices; the places do
    return placed | tables


def _tables(model: Transformer) -> dict[Path, jax.Array]:
    """Of every layer, with its first placement."""
    found = {}
    for path, variable in variables_of(model, Placement):
        shape = variable.get_value().shape
        if path[-1] == "places":
            num_layers, num_experts, most = shape
            first = first_placement(num_layers, num_experts, num_experts + most - 1)
            places, replicas = places_of(first, num_experts, most)
            found[path] = jax.device_put(places, model.rules.whole)
            found[(*path[:-1], "replicas")] = jax.device_put(replicas, model.rules.whole)
    return found
