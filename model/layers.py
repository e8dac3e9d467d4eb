"""The blocks of a decoder layer. Every parameter names its logical axes; sharding follows from `AxisRules`.

Axis letters: T tokens, D model dim, N query heads, K kv heads, H head dim, R rotated pairs, F ffn dim, V vocab.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from model.batch import ROW_AXES, StepBatch
from model.config import Activation, ClampedSwiGLU, LayerSpec, ModelConfig, Projection, RopeConfig
from model.context import ContextAttention
from model.rope import apply_rope, growth_of
from pallas_kernels.ragged_paged_attention.api import AttentionFn, KVLayout
from sharding.rules import Axes, AxisRules

Angles = Mapping[RopeConfig, Float[Array, "T 2 R"]]  # of every rope that some layer has

_ACTIVATIONS: Mapping[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def gated(activation: Activation | ClampedSwiGLU, gate: Float[Array, "T F"], up: Float[Array, "T F"]
          ) -> Float[Array, "T F"]:  # fmt: skip
    if isinstance(activation, ClampedSwiGLU):
        limit = activation.limit
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(activation.alpha * gate)
    return _ACTIVATIONS[activation](gate) * up


def param(shape: tuple[int, ...], axes: Axes, *, rngs: nnx.Rngs, dtype: jnp.dtype, ones: bool = False) -> nnx.Param:
    """A parameter with logical axes. Initial values matter to tests only: serving loads checkpoints."""
    value = jnp.ones(shape, dtype) if ones else (0.02 * jax.random.normal(rngs.params(), shape)).astype(dtype)
    return nnx.Param(value, axes=axes)


def project_wide(equation: str, x: jax.Array, kernel: nnx.Param) -> jax.Array:
    """A matrix product in float32, for what is computed on before it is rounded."""
    return jnp.einsum(equation, x, kernel[...], preferred_element_type=jnp.float32)


def project(equation: str, x: jax.Array, kernel: nnx.Param) -> jax.Array:
    """A matrix product accumulated in float32 and cast back once."""
    return project_wide(equation, x, kernel).astype(x.dtype)


def project_and_sum(rules: AxisRules, equation: str, x: jax.Array, kernel: nnx.Param, over: tuple[str, ...]
                    ) -> jax.Array:  # fmt: skip
    """A product of [T, over ...] and [over ..., D], where devices hold parts of the first axis in `over`.

    A part is rounded to the dtype of x before the parts are summed, so that no wider numbers travel.
    """
    def part(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array]:
        out = jnp.einsum(equation, x, kernel, preferred_element_type=jnp.float32).astype(x.dtype)
        return (rules.sum_over(over[0], size, out),)

    size, of_tokens = x.shape[1], ("tokens", "embed")
    (out,) = rules.map_over_shards(part, (x, kernel[...]), (("tokens", *over), (*over, "embed")), (of_tokens,),
                                   ((len(x), kernel.shape[-1]),))  # fmt: skip
    return out


def add(x: jax.Array, bias: nnx.Param | None) -> jax.Array:
    return x if bias is None else x + bias[...]


def divided_by_rms(x: Float[Array, "..."], axes: tuple[int, ...], eps: float) -> Float[Array, "..."]:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=axes, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """x / rms(x) * (offset + scale) over the last axes, in float32."""

    def __init__(self, shape: tuple[int, ...], axes: Axes, config: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.eps, self.offset = config.norm_eps, config.norm_offset
        self.normed = tuple(range(-len(shape), 0))
        self.scale = param(shape, axes, rngs=rngs, dtype=dtype, ones=True)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        normed = divided_by_rms(x.astype(jnp.float32), self.normed, self.eps)
        return (normed * (self.offset + self.scale[...].astype(jnp.float32))).astype(x.dtype)


def normed(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


class Attention(nnx.Module):
    """Grouped-query attention over the paged KV cache."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, rules: AxisRules,
                 attention: AttentionFn | ContextAttention, *, rngs: nnx.Rngs, dtype: jnp.dtype,
                 num_inputs: int | None = None):
        """num_inputs: numbers of a token that queries, keys and values are made of; None: D."""
        D, N, H = config.hidden_size, config.num_heads, config.head_dim
        I = num_inputs or D  # noqa: E741
        K = rules.held("kv_heads", config.num_kv_heads)
        self.rules, self.attention, self.rope, self.window = rules, attention, spec.rope, spec.window
        self.scale, self.soft_cap = config.attention_scale, config.attention_soft_cap
        self.chunk, self.growth, self.eps = spec.chunk, spec.growth, config.norm_eps
        self.norm_rotated = config.qk_norm == "rotated" and spec.rope is not None
        heads, kv_heads = ("heads", "head_dim"), ("kv_heads", "head_dim")
        self.q = param((I, N, H), ("embed", *heads), rngs=rngs, dtype=dtype)
        self.k = param((I, K, H), ("embed", *kv_heads), rngs=rngs, dtype=dtype)
        self.v = param((I, K, H), ("embed", *kv_heads), rngs=rngs, dtype=dtype)
        self.o = param((N, H, D), (*heads, "embed"), rngs=rngs, dtype=dtype)

        def bias(name: Projection, shape: tuple[int, ...], axes: Axes) -> nnx.Param | None:
            return param(shape, axes, rngs=rngs, dtype=dtype) if name in config.biases else None

        self.q_bias, self.k_bias = bias("q", (N, H), heads), bias("k", (K, H), kv_heads)
        self.v_bias, self.o_bias = bias("v", (K, H), kv_heads), bias("o", (D,), ("embed",))

        def norm(shape: tuple[int, ...], axes: Axes) -> RMSNorm | None:
            if config.qk_norm in (None, "rotated"):
                return None
            first = {"projection": 0, "head": 1}[config.qk_norm]
            return RMSNorm(shape[first:], axes[first:], config, rngs=rngs, dtype=dtype)

        self.q_norm, self.k_norm = norm((N, H), heads), norm((K, H), kv_heads)
        self.sinks = None if config.sinks is None else param((N,), ("heads",), rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "T D"], angles: Angles, kv_pages: jax.Array, layer: jax.Array,
                 batch: StepBatch) -> tuple[Float[Array, "T D"], jax.Array]:
        q = add(project("td,dnh->tnh", x, self.q), self.q_bias)
        k = add(project("td,dnh->tnh", x, self.k), self.k_bias)
        v = add(project("td,dnh->tnh", x, self.v), self.v_bias)
        q = self._placed(normed(self.q_norm, q), angles)
        k = self._placed(normed(self.k_norm, k), angles)
        if self.growth is not None:
            q = (q * growth_of(self.growth, batch.positions)[:, None, None]).astype(q.dtype)
        out, kv_pages = self._attend(q, k, v, kv_pages, layer, batch)
        out = project_and_sum(self.rules, "tnh,nhd->td", out, self.o, ("heads", "head_dim"))
        return add(out, self.o_bias), kv_pages

    def _placed(self, x: Float[Array, "T N H"], angles: Angles) -> Float[Array, "T N H"]:
        """Heads of queries or keys, as their position makes them."""
        if self.rope is not None:
            x = apply_rope(self.rope, x, angles[self.rope])
        if self.norm_rotated:
            x = divided_by_rms(x.astype(jnp.float32), (-1,), self.eps).astype(x.dtype)
        return x

    def _attend(self, q, k, v, kv_pages, layer, batch: StepBatch):
        """Attention of each device's heads and group of rows."""
        attention = self.attention
        if isinstance(attention, ContextAttention):
            sinks = None if self.sinks is None else self.sinks[...].astype(jnp.float32)
            return attention(self.rules, q, k, v, kv_pages, layer, batch, scale=self.scale, window=self.window,
                             soft_cap=self.soft_cap, sinks=sinks)  # fmt: skip

        more: dict[str, tuple[jax.Array, Axes]] = {}
        if self.sinks is not None:
            more["sinks"] = self.sinks[...].astype(jnp.float32), ("heads",)
        if batch.tree_mask is not None:
            more["tree_mask"] = batch.tree_mask, ("tokens", None)

        def attend(*args: jax.Array):
            step, given = args[: len(in_axes)], args[len(in_axes) :]
            return attention(*step, scale=self.scale, window=self.window, chunk=self.chunk, soft_cap=self.soft_cap,
                             **dict(zip(more, given, strict=True)))  # fmt: skip

        heads, kv_heads = ("tokens", "heads", "head_dim"), ("tokens", "kv_heads", "head_dim")
        args = (q, k, v, kv_pages, layer, *batch.of_rows)
        in_axes = (heads, kv_heads, kv_heads, KVLayout.axes, (), *ROW_AXES)
        given, given_axes = [array for array, _ in more.values()], [axes for _, axes in more.values()]
        return self.rules.map_over_shards(attend, (*args, *given), (*in_axes, *given_axes), (heads, KVLayout.axes),
                                          (q.shape, kv_pages.shape))  # fmt: skip


class MLP(nnx.Module):
    """The gated feed-forward block: down(activation(gate(x)) * up(x)), F of this width."""

    def __init__(self, config: ModelConfig, width: int, rules: AxisRules, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        D, F = config.hidden_size, width
        self.rules = rules
        self.activation: Activation | ClampedSwiGLU = config.activation
        self.gate = param((D, F), ("embed", "mlp"), rngs=rngs, dtype=dtype)
        self.up = param((D, F), ("embed", "mlp"), rngs=rngs, dtype=dtype)
        self.down = param((F, D), ("mlp", "embed"), rngs=rngs, dtype=dtype)

        def bias(name: Projection, size: int, axis: str) -> nnx.Param | None:
            return param((size,), (axis,), rngs=rngs, dtype=dtype) if name in config.biases else None

        self.gate_bias, self.up_bias = bias("gate", F, "mlp"), bias("up", F, "mlp")
        self.down_bias = bias("down", D, "embed")

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate = add(project_wide("td,df->tf", x, self.gate), self.gate_bias)
        up = add(project_wide("td,df->tf", x, self.up), self.up_bias)
        hidden = gated(self.activation, gate, up).astype(x.dtype)
        return add(project_and_sum(self.rules, "tf,fd->td", hidden, self.down, ("mlp",)), self.down_bias)
