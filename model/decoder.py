"""A decoder layer.

Axis letters: T tokens, D model dim, G data groups, E experts.
"""

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.batch import StepBatch
from model.config import LayerSpec, ModelConfig
from model.context import ContextAttention
from model.experts import ExpertsBackend
from model.latent import LatentAttention
from model.layers import MLP, Angles, Attention, RMSNorm, normed
from model.moe import MoE
from pallas_kernels.latent_attention.api import LatentAttentionFn
from pallas_kernels.ragged_paged_attention.api import AttentionFn
from sharding.rules import AxisRules

# Whichever the model's kind of attention is.
AnyAttentionFn: TypeAlias = AttentionFn | LatentAttentionFn | ContextAttention


class DecoderLayer(nnx.Module):
    """Attention and an MLP or a mixture of experts, each with a residual and norms before it, after it or both."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, rules: AxisRules, attention: AnyAttentionFn,
                 experts: ExpertsBackend | None, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.rules, self.residual_scale = rules, config.residual_scale

        def norm(place: Literal["input", "output"]) -> RMSNorm | None:
            if config.norms not in (place, "both"):
                return None
            return RMSNorm((config.hidden_size,), ("embed",), config, rngs=rngs, dtype=dtype)

        self.attention_norm, self.attention_out_norm = norm("input"), norm("output")
        self.mlp_norm, self.mlp_out_norm = norm("input"), norm("output")
        kind: Any = Attention if config.latent is None else LatentAttention
        self.attention = kind(config, spec, rules, attention, rngs=rngs, dtype=dtype)
        if spec.moe is None:
            self.mlp = MLP(config, config.intermediate_size, rules, rngs=rngs, dtype=dtype)
        else:
            assert experts is not None, "a layer with experts needs their matmuls"
            self.mlp = MoE(config, spec.moe, rules, experts, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "T D"], angles: Angles, kv_pages: jax.Array, layer: jax.Array,
                 period: jax.Array, batch: StepBatch
                 ) -> tuple[Float[Array, "T D"], jax.Array, Int[Array, "G E"] | None]:  # fmt: skip
        """(hidden states, KV pages, how many tokens of each data group chose each expert, if there are any).

        layer: of the model; period: of the stack, whose experts come whole.
        """
        out, kv_pages = self.attention(normed(self.attention_norm, x), angles, kv_pages, layer, batch)
        x = self._add(x, normed(self.attention_out_norm, out))
        x_in = normed(self.mlp_norm, x)
        if isinstance(self.mlp, MoE):
            out, load = self.mlp(x_in, batch, period)
        else:
            out, load = self.mlp(x_in), None
        return self._add(x, normed(self.mlp_out_norm, out)), kv_pages, load

    def _add(self, x: jax.Array, out: jax.Array) -> jax.Array:
        return self.rules.constrain(x + out * self.residual_scale, ("tokens", "embed"))
