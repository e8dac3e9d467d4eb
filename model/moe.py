"""A mixture of experts: a router chooses a few experts for each token, and only those compute.

Rows are sorted by expert and meet the experts' weights in grouped matmuls. On a mesh each device holds some of the
experts and computes their rows; the parts are summed over the devices.

Axis letters: T tokens, D model dim, E experts, F width of an expert, k experts of a token, M = T * k rows.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.config import Activation, ClampedSwiGLU, ModelConfig, MoESpec, Projection, Routing
from model.layers import MLP, gated, param
from pallas_kernels.grouped_matmul.api import Backend
from sharding.rules import Axes, AxisRules


def route(routing: Routing, logits: Float[Array, "T E"], bias: Float[Array, " E"] | None = None
          ) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:  # fmt: skip
    """The experts of each token and their weights, both in float32; of equal scores the lower expert's number counts.

    Group limit and bias: DeepSeek-V3 (arXiv 2412.19437).
    """
    if routing.bias == "logits":
        assert bias is not None
        logits = logits + bias
    scores = jax.nn.softmax(logits) if routing.scores == "softmax" else jax.nn.sigmoid(logits)
    for_choice = scores
    if routing.bias == "choice":
        assert bias is not None
        for_choice = scores + bias
    if routing.top_groups < routing.groups:
        grouped = for_choice.reshape(len(logits), routing.groups, -1)
        of_groups = jax.lax.top_k(grouped, routing.group_best)[0].sum(-1)
        _, best = jax.lax.top_k(of_groups, routing.top_groups)
        may = (best[:, :, None] == jnp.arange(routing.groups)).any(1)  # [T, groups]
        for_choice = jnp.where(may[:, :, None], grouped, -jnp.inf).reshape(logits.shape)
    _, chosen = jax.lax.top_k(for_choice, routing.top_k)
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if routing.weights == "normalized":
        weights = weights / weights.sum(-1, keepdims=True)
    return chosen, weights * routing.scale


def is_expert_matrix(path: tuple[Any, ...], value: Any) -> bool:
    """A filter: the parameters that a kernel reads in place, out of those of all layers of a stack."""
    return len(path) > 1 and path[-2] == "experts" and path[-1] in ("gate", "up", "down")


class Experts(nnx.Module):
    """The gated feed-forward blocks of all experts, stacked."""

    def __init__(self, config: ModelConfig, spec: MoESpec, rules: AxisRules, matmuls: Backend, *, rngs: nnx.Rngs,
                 dtype: jnp.dtype):
        E, D, F = spec.routing.num_experts, config.hidden_size, spec.width
        self.rules, self.matmuls, self.num_experts = rules, matmuls, E
        self.activation: Activation | ClampedSwiGLU = config.activation
        self.gate = param((E, D, F), ("experts", "embed", "expert_mlp"), rngs=rngs, dtype=dtype)
        self.up = param((E, D, F), ("experts", "embed", "expert_mlp"), rngs=rngs, dtype=dtype)
        self.down = param((E, F, D), ("experts", "expert_mlp", "embed"), rngs=rngs, dtype=dtype)

        def bias(name: Projection, size: int, axis: str) -> nnx.Param | None:
            return param((E, size), ("experts", axis), rngs=rngs, dtype=dtype) if name in config.biases else None

        self.gate_bias, self.up_bias = bias("gate", F, "expert_mlp"), bias("up", F, "expert_mlp")
        self.down_bias = bias("down", D, "embed")

    def __call__(self, x: Float[Array, "T D"], chosen: Int[Array, "T k"], weights: Float[Array, "T k"],
                 layer: Int[Array, ""] | None = None) -> Float[Array, "T D"]:  # fmt: skip
        """layer: the matrices are those of a whole stack, [L, E, D, F], and this layer's are meant."""
        of_token, matrix, vector = ("tokens", None), ("experts", None, None), ("experts", None)
        index = [] if layer is None else [layer]
        if layer is not None:
            matrix = ("layers", *matrix)
        biases = [p[...] for p in (self.gate_bias, self.up_bias, self.down_bias) if p is not None]
        in_axes: list[Axes] = [of_token] * 3 + [matrix] * 3 + [vector] * len(biases) + [()] * len(index)
        args = [x, chosen, weights, self.gate[...], self.up[...], self.down[...], *biases, *index]
        compute = partial(self._compute, self.matmuls.spec.num_experts, len(biases))
        (out,) = self.rules.map_over_shards(compute, args, in_axes, (of_token,), (x.shape,))
        return out

    def _compute(self, held: int, num_biases: int, x, chosen, weights, gate, up, down, *rest: jax.Array
                 ) -> tuple[jax.Array]:  # fmt: skip
        """On one device: the part of the experts that it holds, summed over the devices. rest: biases [E, F], [E, F],
        [E, D], if there are any, and the layer, where the matrices are those of all layers."""
        biases, layer = rest[:num_biases], rest[num_biases] if len(rest) > num_biases else None
        num_experts, k = self.num_experts, chosen.shape[1]
        expert = chosen.reshape(-1)  # [M]
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.bincount(expert, length=num_experts).astype(jnp.int32)
        first = self.rules.place("experts", num_experts) * held
        tiles = self.matmuls.tiles(sizes, len(expert), first)
        matmul = partial(self.matmuls.matmul, group_sizes=sizes, group_offset=first, layer=layer, tiles=tiles,
                         preferred_element_type=jnp.float32)  # fmt: skip
        local = expert[order] - first
        mine = (local >= 0) & (local < held)

        def add(rows: jax.Array, which: int) -> jax.Array:
            if not biases:
                return rows
            return rows + jnp.where(mine[:, None], biases[which][jnp.where(mine, local, 0)], 0)

        rows = x[order // k]
        hidden = gated(self.activation, add(matmul(rows, gate), 0), add(matmul(rows, up), 1)).astype(x.dtype)
        out = add(matmul(hidden, down), 2) * weights.reshape(-1)[order, None]
        of_tokens = out[jnp.argsort(order)].reshape(*chosen.shape, -1).sum(1)
        return (self.rules.sum_over("experts", num_experts, of_tokens).astype(x.dtype),)


class MoE(nnx.Module):
    """Routed experts and, where the spec has it, a shared one that every token passes."""

    def __init__(self, config: ModelConfig, spec: MoESpec, rules: AxisRules, matmuls: Backend, *, rngs: nnx.Rngs,
                 dtype: jnp.dtype):
        D, E = config.hidden_size, spec.routing.num_experts
        self.routing = spec.routing
        # The router decides between close numbers: in float32, whatever the rest is in.
        self.router = param((D, E), ("embed", None), rngs=rngs, dtype=jnp.dtype(jnp.float32))
        bias = param((E,), (None,), rngs=rngs, dtype=jnp.dtype(jnp.float32)) if spec.routing.bias is not None else None
        self.router_bias = bias
        self.experts = Experts(config, spec, rules, matmuls, rngs=rngs, dtype=dtype)
        has_shared, width = spec.shared_width is not None, spec.shared_width or 0
        self.shared = MLP(config, width, rngs=rngs, dtype=dtype) if has_shared else None
        has_gate = has_shared and spec.shared_gate is not None
        self.shared_gate = param((D, 1), ("embed", None), rngs=rngs, dtype=dtype) if has_gate else None

    def __call__(self, x: Float[Array, "T D"], layer: Int[Array, ""] | None = None) -> Float[Array, "T D"]:
        """layer: see `Experts`."""
        wide = x.astype(jnp.float32)
        logits = jnp.einsum("td,de->te", wide, self.router[...], precision=jax.lax.Precision.HIGHEST)
        chosen, weights = route(self.routing, logits, None if self.router_bias is None else self.router_bias[...])
        out = self.experts(x, chosen, weights, layer)
        if self.shared is None:
            return out
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * jax.nn.sigmoid(wide @ self.shared_gate[...].astype(jnp.float32)).astype(x.dtype)
        return out + shared
