"""A mixture of experts: a router chooses a few experts for each token, and only those compute.

Axis letters: T tokens, D model dim, E experts, k experts of a token, G data groups.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.batch import StepBatch
from model.config import ModelConfig, MoESpec, Routing
from model.experts import Experts, ExpertsBackend
from model.layers import MLP, param
from sharding.rules import AxisRules


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


class MoE(nnx.Module):
    """Routed experts and, where the spec has it, a shared one that every token passes."""

    def __init__(self, config: ModelConfig, spec: MoESpec, rules: AxisRules, backend: ExpertsBackend, *,
                 rngs: nnx.Rngs, dtype: jnp.dtype):
        D, E = config.hidden_size, spec.routing.num_experts
        self.rules, self.routing = rules, spec.routing
        # The router decides between close numbers: in float32, whatever the rest is in.
        self.router = param((D, E), ("embed", None), rngs=rngs, dtype=jnp.dtype(jnp.float32))
        bias = param((E,), (None,), rngs=rngs, dtype=jnp.dtype(jnp.float32)) if spec.routing.bias is not None else None
        self.router_bias = bias
        self.experts = Experts(config, spec, rules, backend, rngs=rngs, dtype=dtype)
        has_shared, width = spec.shared_width is not None, spec.shared_width or 0
        self.shared = MLP(config, width, rules, rngs=rngs, dtype=dtype) if has_shared else None
        has_gate = has_shared and spec.shared_gate is not None
        self.shared_gate = param((D, 1), ("embed", None), rngs=rngs, dtype=dtype) if has_gate else None

    def __call__(self, x: Float[Array, "T D"], batch: StepBatch, layer: Int[Array, ""] | None = None
                 ) -> tuple[Float[Array, "T D"], Int[Array, "G E"]]:  # fmt: skip
        """See `Experts`."""
        wide = x.astype(jnp.float32)
        chosen, weights = self._route(wide)
        out, load = self.experts(x, chosen, weights, batch, layer)
        if self.shared is None:
            return out, load
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * jax.nn.sigmoid(wide @ self.shared_gate[...].astype(jnp.float32)).astype(x.dtype)
        return out + shared, load

    def _route(self, x: Float[Array, "T D"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        """Of each device's tokens: XLA would gather those of all data groups for a `top_k`."""
        def choose(x: jax.Array, router: jax.Array, *bias: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = jnp.einsum("td,de->te", x, router, precision=jax.lax.Precision.HIGHEST)
            return route(self.routing, logits, *bias)

        bias = () if self.router_bias is None else (self.router_bias[...],)
        of_token, of_choices = ("tokens", None), (len(x), self.routing.top_k)
        return self.rules.map_over_shards(choose, (x, self.router[...], *bias),
                                          (of_token, (None, None), *[(None,)] * len(bias)), (of_token, of_token),
                                          (of_choices, of_choices))  # fmt: skip
