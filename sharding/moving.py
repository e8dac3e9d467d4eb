"""Moves experts from place to place on the devices that hold them: before serving, and between two steps of it.

Axis letters: L layers of a stack, A places before, P places after.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Num

from sharding.exchange import Exchange, place_slices
from sharding.rules import AxisRules, MeshAxes


def spread_experts(rules: AxisRules, exchange: Exchange, weights: Num[Array, "L A ..."], sources: Int[Array, "L P"]
                   ) -> Num[Array, "L P ..."]:  # fmt: skip
    """All layers anew: place p gets what lies in place sources[l, p]. For one layer after the other, so that no device
    holds more than its own of all layers and one layer twice. To be jitted."""
    shape = (*sources.shape, *weights.shape[2:])
    sizes = weights.shape[1], shape[1]

    def on_device(weights, sources):
        before, after = (rules.over("experts", size) for size in sizes)
        move = partial(_moved, exchange, before, after)
        return (lax.map(lambda layer: move(layer[0], len(layer[0]), layer[1]), (weights, sources)),)

    axes = ("layers", "experts")
    (out,) = rules.map_over_shards(on_device, (weights, sources), (axes, ("layers", None)), (axes,), (shape[:2],))
    return out


def move_layer(rules: AxisRules, exchange: Exchange, weights: Num[Array, "L P ..."], layer: Int[Array, ""],
               sources: Int[Array, " P"]) -> Num[Array, "L P ..."]:  # fmt: skip
    """The same for one layer, in place: to be jitted with `weights` donated. Takes room for one layer's part."""
    over = rules.over("experts", len(sources))

    def on_device(weights, layer, sources):
        held = weights.shape[1]
        rows = weights.reshape(-1, *weights.shape[2:])  # of all layers: a layer cut out of them would be a copy
        moved = _moved(exchange, over, over, rows, held, sources, layer * held)
        return (lax.dynamic_update_index_in_dim(weights, moved, layer, 0),)

    axes, shape = ("layers", "experts"), weights.shape[:2]
    (out,) = rules.map_over_shards(on_device, (weights, layer, sources), (axes, (), (None,)), (axes,), (shape,))
    return out


def _moved(exchange: Exchange, before: MeshAxes, after: MeshAxes, rows: Num[Array, "R ..."], held: int,
           sources: Int[Array, " P"], first: Int[Array, ""] | int = 0) -> Num[Array, "P/n ..."]:  # fmt: skip
    """On one device, whose places are the `held` rows from `first` on. before, after: the mesh axes that places are
    divided over."""
    if not after:
        return rows[first + sources]
    n, me = lax.axis_size(after), lax.axis_index(after)
    if not before:  # everything is here
        return rows[first + lax.dynamic_slice_in_dim(sources, me * (len(sources) // n), len(sources) // n)]
    assert before == after
    slices = place_slices(sources, me, n, held)
    slices = slices._replace(input_offsets=first + slices.input_offsets)
    return exchange(rows, jnp.zeros((len(sources) // n, *rows.shape[1:]), rows.dtype), slices, after)
