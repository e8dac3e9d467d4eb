"""The blocks of a decoder layer. Every parameter names its logical axes; sharding follows from `AxisRules`.

Axis letters: T tokens, D model dim, N query heads, K kv heads, H head dim, F ffn dim, V vocab.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from model.batch import StepBatch
from model.config import LayerSpec, ModelConfig
from model.rope import apply_rope
from pallas_kernels.ragged_paged_attention.api import AttentionFn, KVLayout
from sharding.rules import Axes, AxisRules


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


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32."""

    def __init__(self, size: int, axis: str, *, eps: float, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.eps = eps
        self.scale = param((size,), (axis,), rngs=rngs, dtype=dtype, ones=True)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (normed * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention over the paged KV cache."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, rules: AxisRules, attention: AttentionFn, *,
                 rngs: nnx.Rngs, dtype: jnp.dtype):
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.rules, self.attention, self.window, self.scale = rules, attention, spec.window, H**-0.5
        self.q = param((D, N, H), ("embed", "heads", "head_dim"), rngs=rngs, dtype=dtype)
        self.k = param((D, K, H), ("embed", "kv_heads", "head_dim"), rngs=rngs, dtype=dtype)
        self.v = param((D, K, H), ("embed", "kv_heads", "head_dim"), rngs=rngs, dtype=dtype)
        self.o = param((N, H, D), ("heads", "head_dim", "embed"), rngs=rngs, dtype=dtype)
        self.o_bias = param((D,), ("embed",), rngs=rngs, dtype=dtype) if config.o_bias else None
        self.has_qkv_bias, self.has_norm = config.qkv_bias, config.qk_norm
        if self.has_qkv_bias:
            self.q_bias = param((N, H), ("heads", "head_dim"), rngs=rngs, dtype=dtype)
            self.k_bias = param((K, H), ("kv_heads", "head_dim"), rngs=rngs, dtype=dtype)
            self.v_bias = param((K, H), ("kv_heads", "head_dim"), rngs=rngs, dtype=dtype)
        if self.has_norm:
            self.q_norm = RMSNorm(H, "head_dim", eps=config.norm_eps, rngs=rngs, dtype=dtype)
            self.k_norm = RMSNorm(H, "head_dim", eps=config.norm_eps, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "T D"], angles: jax.Array, kv_pages: jax.Array, layer: jax.Array,
                 batch: StepBatch) -> tuple[Float[Array, "T D"], jax.Array]:
        q, k, v = (project("td,dnh->tnh", x, kernel) for kernel in (self.q, self.k, self.v))
        if self.has_qkv_bias:
            q, k, v = q + self.q_bias[...], k + self.k_bias[...], v + self.v_bias[...]
        if self.has_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, angles), apply_rope(k, angles)
        out, kv_pages = self._attend(q, k, v, kv_pages, layer, batch)
        out = project("tnh,nhd->td", out, self.o)
        return out if self.o_bias is None else out + self.o_bias[...], kv_pages

    def _attend(self, q, k, v, kv_pages, layer, batch: StepBatch):
        """Attention on each device's heads, with all tokens of the step."""

        def local(q, k, v, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution):
            return self.attention(q, k, v, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution,
                                  scale=self.scale, window=self.window)

        heads, kv_heads = (None, "heads", "head_dim"), (None, "kv_heads", "head_dim")
        args = (q, k, v, kv_pages, layer, batch.page_table, batch.kv_lens, batch.cu_q_lens, batch.distribution)
        in_axes = (heads, kv_heads, kv_heads, KVLayout.axes, (), (None, None), (None,), (None,), (None,))
        return self.rules.map_over_shards(local, args, in_axes, (heads, KVLayout.axes), (q.shape, kv_pages.shape))


class MLP(nnx.Module):
    """The gated feed-forward block: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        D, F = config.hidden_size, config.intermediate_size
        self.gate = param((D, F), ("embed", "mlp"), rngs=rngs, dtype=dtype)
        self.up = param((D, F), ("embed", "mlp"), rngs=rngs, dtype=dtype)
        self.down = param((F, D), ("mlp", "embed"), rngs=rngs, dtype=dtype)
        self.has_bias = config.mlp_bias
        if self.has_bias:
            self.gate_bias = param((F,), ("mlp",), rngs=rngs, dtype=dtype)
            self.up_bias = param((F,), ("mlp",), rngs=rngs, dtype=dtype)
            self.down_bias = param((D,), ("embed",), rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate, up = project_wide("td,df->tf", x, self.gate), project_wide("td,df->tf", x, self.up)
        if self.has_bias:
            gate, up = gate + self.gate_bias[...], up + self.up_bias[...]
        out = project("tf,fd->td", (jax.nn.silu(gate) * up).astype(x.dtype), self.down)
        return out + self.down_bias[...] if self.has_bias else out


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, each with a residual."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, rules: AxisRules, attention: AttentionFn, *,
                 rngs: nnx.Rngs, dtype: jnp.dtype):
        self.rules = rules
        D, eps = config.hidden_size, config.norm_eps
        self.attention_norm = RMSNorm(D, "embed", eps=eps, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(D, "embed", eps=eps, rngs=rngs, dtype=dtype)
        self.attention = Attention(config, spec, rules, attention, rngs=rngs, dtype=dtype)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "T D"], angles: jax.Array, kv_pages: jax.Array, layer: jax.Array,
                 batch: StepBatch) -> tuple[Float[Array, "T D"], jax.Array]:
        attended, kv_pages = self.attention(self.attention_norm(x), angles, kv_pages, layer, batch)
        x = self.rules.constrain(x + attended, ("tokens", "embed"))
        x = self.rules.constrain(x + self.mlp(self.mlp_norm(x)), ("tokens", "embed"))
        return x, kv_pages
