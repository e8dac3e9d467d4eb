"""Moves experts between devices while requests run (EPLB), from the load that was measured.

Every `step_interval` steps each layer gets a new placement, which takes effect one layer before each of the next steps:
its weights move to their places in a compiled exchange, and its tables change with them. What a step computes does
not depend on where experts lie, so a request that runs meanwhile gets the same tokens.

Axis letters: Lm layers with experts, E experts, P places, R most replicas of an expert.
"""

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from model.config import ModelConfig
from model.experts import ExpertsBackend
from model.transformer import Path
from sharding.exchange import exchange_for
from sharding.expert_placement import balancedness, first_placement, keep_in_place, places_of, rebalance
from sharding.moving import move_layer
from sharding.rules import AxisRules

_WORTH = 1.02  # a layer moves where its devices become more even by this factor

TABLES = ("places", "replicas")  # of a layer's experts, see `model.experts`


@dataclass(frozen=True)
class _Where:
    """A layer in the parameters: their indices in the runner's list, by name, and its place in the stack."""

    leaves: dict[str, int]
    period: int


class Rebalancer:
    """params: the runner's list of the model's arrays, in which moved ones are replaced; paths: of its entries."""

    def __init__(self, params: list[Any], paths: list[Path], config: ModelConfig, rules: AxisRules,
                 backend: ExpertsBackend, *, num_nodes: int):  # fmt: skip
        assert backend.max_replicas is not None
        self._params, self._rules, self._backend = params, rules, backend
        self._where = layers_with_experts(paths, config)
        routing = next(layer.moe.routing for layer in config.layers if layer.moe is not None)
        self._num_experts, self._groups, self._num_nodes = routing.num_experts, routing.groups, num_nodes
        self._devices = rules.shards("experts", backend.num_places)
        self.placement = first_placement(len(self._where), self._num_experts, backend.num_places)
        self.layers_moved = 0
        self._waiting: deque[tuple[int, np.ndarray]] = deque()  # layers, with the load that they are to be placed for
        self._compiled: dict[Any, Any] = {}
        for where in self._where:
            for name, index in where.leaves.items():
                self._program(name, params[index])

    @property
    def temporary(self) -> int:
        """Bytes that a move takes on a device, besides what stays."""
        return max(program.memory_analysis().temp_size_in_bytes for program in self._compiled.values())

    def plan(self, load: Float[np.ndarray, "Lm E"]) -> None:
        """From now on every call of `move` looks at one layer. A plan that is not finished goes on instead."""
        if not self._waiting:
            self._waiting = deque(enumerate(load))

    def move(self) -> None:
        """The next layer, if it is worth it. Between two steps."""
        if not self._waiting:
            return
        layer, load = self._waiting.popleft()
        old, new = self.placement[layer], self._placed_for(layer, load)
        even = partial(balancedness, load[None], num_devices=self._devices)
        if even(placement=new[None])[0] >= _WORTH * even(placement=old[None])[0]:
            self._move(layer, new)

    def _placed_for(self, layer: int, load: Float[np.ndarray, " E"]) -> Int[np.ndarray, " P"]:
        num_nodes = 1 if self._groups % self._num_nodes else self._num_nodes
        (new,) = rebalance(load[None], num_places=self._backend.num_places, num_groups=self._groups,
                           num_nodes=num_nodes, num_devices=self._devices)  # fmt: skip
        return keep_in_place(self.placement[layer], new, self._devices, num_nodes)

    def _move(self, layer: int, new: Int[np.ndarray, " P"]) -> None:
        old, where, most = self.placement[layer], self._where[layer], self._backend.max_replicas
        assert most is not None
        (places,), (replicas,) = places_of(new[None], self._num_experts, most)
        sources = sources_of(old, new, self._devices).astype(np.int32)
        for name, index in where.leaves.items():
            value = {"places": places, "replicas": replicas}.get(name, sources)
            program = self._program(name, self._params[index])
            self._params[index] = program(self._params[index], np.int32(where.period), value)
        self.placement[layer] = new
        self.layers_moved += 1

    def _program(self, name: str, array: jax.Array) -> jax.stages.Compiled:
        """Compiled once for arrays that look alike."""
        kind = (name in TABLES, array.shape, array.dtype, array.sharding)
        if kind not in self._compiled:
            whole = self._rules.whole
            if name in TABLES:
                change, size = _set_table, array.shape[1:]
            else:
                exchange = exchange_for(self._rules.mesh.devices.flat[0])
                change, size = partial(move_layer, self._rules, exchange), (self._backend.num_places,)
            jitted = jax.jit(change, donate_argnums=0, out_shardings=array.sharding)
            given = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole) for shape in ((), size))
            shape = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            self._compiled[kind] = jitted.lower(shape, *given).compile()
        return self._compiled[kind]


def _set_table(table: jax.Array, layer: jax.Array, row: jax.Array) -> jax.Array:
    return table.at[layer].set(row)


def layers_with_experts(paths: list[Path], config: ModelConfig) -> list[_Where]:
    """In the order of the model's layers."""
    found: dict[int, _Where] = {}
    for index, path in enumerate(paths):
        match path:
            case ("stacks", stack, "layers", place, "mlp", "experts", name):
                for period, layer in enumerate(config.stacks[int(stack)].layers_at(int(place))):
                    found.setdefault(layer, _Where({}, period)).leaves[name] = index
    return [found[layer] for layer in sorted(found)]


def sources_of(old: Int[np.ndarray, " P"], new: Int[np.ndarray, " P"], num_devices: int) -> Int[np.ndarray, " P"]:
    """For each place, one where its new expert lies already: itself, else one of the same device, else any, the
    replicas of an expert in turn, so that no device sends for all."""
    held = len(old) // num_devices
    places: dict[int, list[int]] = {}
    for place, expert in enumerate(old):
        places.setdefault(int(expert), []).append(place)
    sources, asked = np.arange(len(new)), dict.fromkeys(places, 0)
    for place, expert in enumerate(new.tolist()):
        if old[place] == expert:
            continue
        near = [p for p in places[expert] if p // held == place // held]
        candidates = near or places[expert]
        sources[place] = candidates[asked[expert] % len(candidates)]
        asked[expert] += 1
    return sources
