"""The experts of a layer: weights at places on the devices of a mesh, and what each device computes with them.

Without redundant experts place e is expert e. With them (EPLB, `sharding.expert_placement`) a table of each layer says
where an expert's replicas lie; a token takes one of them by its number in the step, so that they share the load. The
table is an input of the step, like weights: both may change between two steps, and nothing is compiled.

Axis letters: T tokens, D model dim, E experts, P places, F width of an expert, k experts of a token, R most replicas of
an expert, M rows, G data groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.batch import StepBatch
from model.config import Activation, ClampedSwiGLU, ModelConfig, MoESpec, Projection
from model.dispatch import Choices, Dispatch, WeightedInputs, count
from model.layers import gated, param
from pallas_kernels.grouped_matmul.api import Backend
from sharding.rules import Axes, AxisRules, MeshAxes


@dataclass(frozen=True, kw_only=True)
class ExpertsBackend:
    """What was chosen for a model's experts. matmuls: for the places of one device. max_replicas: of one expert, None
    where place e is always expert e."""

    matmuls: Backend
    dispatch: Dispatch
    num_places: int
    max_replicas: int | None


class Placement(nnx.Variable):
    """Where a layer's experts lie: not a weight of the model, but given beside them."""


def is_expert_matrix(path: tuple[Any, ...], value: Any) -> bool:
    """A filter: the parameters that a kernel reads in place, out of those of all layers of a stack."""
    return len(path) > 1 and path[-2] == "experts" and path[-1] in ("gate", "up", "down")


class Experts(nnx.Module):
    """The gated feed-forward blocks of all experts, stacked."""

    def __init__(self, config: ModelConfig, spec: MoESpec, rules: AxisRules, backend: ExpertsBackend, *,
                 rngs: nnx.Rngs, dtype: jnp.dtype):
        P, D, F = backend.num_places, config.hidden_size, spec.width
        self.rules, self.backend, self.num_experts = rules, backend, spec.routing.num_experts
        weigh_inputs = spec.routing.applied_to == "input"
        self.dispatch: Dispatch = WeightedInputs(way=backend.dispatch) if weigh_inputs else backend.dispatch
        self.activation: Activation | ClampedSwiGLU = config.activation
        self.gate = param((P, D, F), ("experts", "embed", "expert_mlp"), rngs=rngs, dtype=dtype)
        self.up = param((P, D, F), ("experts", "embed", "expert_mlp"), rngs=rngs, dtype=dtype)
        self.down = param((P, F, D), ("experts", "expert_mlp", "embed"), rngs=rngs, dtype=dtype)

        def bias(name: Projection, size: int, axis: str) -> nnx.Param | None:
            return param((P, size), ("experts", axis), rngs=rngs, dtype=dtype) if name in config.biases else None

        self.gate_bias, self.up_bias = bias("gate", F, "expert_mlp"), bias("up", F, "expert_mlp")
        self.down_bias = bias("down", D, "embed")
        E, most = self.num_experts, backend.max_replicas
        self.places = None if most is None else Placement(jnp.zeros((E, most), jnp.int32))
        self.replicas = None if most is None else Placement(jnp.ones(E, jnp.int32))

    def __call__(self, x: Float[Array, "T D"], chosen: Int[Array, "T k"], weights: Float[Array, "T k"],
                 batch: StepBatch, layer: Int[Array, ""] | None = None
                 ) -> tuple[Float[Array, "T D"], Int[Array, "G E"]]:  # fmt: skip
        """(the weighted sum for each token, how many tokens of each group chose each expert).

        layer: the matrices are those of a whole stack, [L, P, D, F], and this layer's are meant.
        """
        of_token, of_place, matrix = ("tokens", None), ("experts", None), ("experts", None, None)
        if layer is not None:
            matrix = ("layers", *matrix)
        biases = [p[...] for p in (self.gate_bias, self.up_bias, self.down_bias) if p is not None]
        table = None if self.places is None or self.replicas is None else (self.places[...], self.replicas[...])
        matrices = (self.gate[...], self.up[...], self.down[...])
        args = (x, chosen, weights, batch.cu_q_lens, batch.real, matrices, biases, table, layer)
        axes: list[Axes] = [of_token, of_token, of_token, ("groups",), ("tokens",), matrix, of_place, (), ()]
        compute = partial(self._compute, self.rules.over("tokens", len(x)))
        load_shape = (self.rules.shards("tokens", len(x)), self.num_experts)
        return self.rules.map_over_shards(compute, args, axes, (of_token, ("tokens", None)), (x.shape, load_shape))

    def _compute(self, token_axes: MeshAxes, x, chosen, weights, cu_q_lens, real, matrices, biases, table,
                 layer) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """On one device: for the tokens of its group, with the experts that it holds."""
        token = jnp.arange(len(x))[:, None]
        real = token < cu_q_lens[-1] if real is None else real[:, None]
        places = chosen
        if table is not None:
            where, replicas = table
            places = where[chosen, token % replicas[chosen]]
        places = jnp.where(real, places, self.backend.num_places)
        apply = partial(self._apply, matrices, biases, layer)
        out = self.dispatch(Choices(x, places, weights), token_axes, apply)
        return out, count(jnp.where(real, chosen, self.num_experts), self.num_experts)[None]

    def _apply(self, matrices: Sequence[jax.Array], biases: Sequence[jax.Array], layer: jax.Array | None,
               rows: Float[Array, "M D"], sizes: Int[Array, " A"], first: Int[Array, ""] | int, dtype: jnp.dtype
               ) -> Float[Array, "M D"]:  # fmt: skip
        """See `model.dispatch.ApplyExperts`."""
        matmuls, (gate, up, down) = self.backend.matmuls, matrices
        matmul = partial(matmuls.matmul, group_sizes=sizes, group_offset=first, layer=layer,
                         tiles=matmuls.tiles(sizes, len(rows), first))  # fmt: skip
        wide = partial(matmul, preferred_element_type=jnp.float32)
        if not biases:
            hidden = gated(self.activation, wide(rows, gate), wide(rows, up)).astype(rows.dtype)
            return matmul(hidden, down, preferred_element_type=dtype)
        place = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(rows)), side="right") - first
        held = (place >= 0) & (place < matmuls.spec.num_experts)
        of_gate, of_up, of_down = (
            jnp.where(held[:, None], bias[jnp.where(held, place, 0)], 0).astype(jnp.float32) for bias in biases
        )
        hidden = gated(self.activation, wide(rows, gate) + of_gate, wide(rows, up) + of_up).astype(rows.dtype)
        return (wide(hidden, down) + of_down).astype(dtype)
