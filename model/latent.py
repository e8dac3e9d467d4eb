"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form.

Keys and values of all heads are products of one cached row a token. Instead of making them, the up-projection of keys
is applied to the queries and that of values to what attention gives, so that all heads attend to the row itself.

Axis letters: T tokens, D model dim, N heads, R latent numbers, C numbers of a query before its heads, H head dim
(not rotated and rotated), W value dim.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from model.batch import ROW_AXES, StepBatch
from model.config import LayerSpec, ModelConfig
from model.layers import Angles, RMSNorm, normed, param, project, project_and_sum
from model.rope import apply_rope
from pallas_kernels.latent_attention.api import LatentAttentionFn, LatentLayout
from sharding.rules import AxisRules


class LatentAttention(nnx.Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, rules: AxisRules, attention: LatentAttentionFn, *,
                 rngs: nnx.Rngs, dtype: jnp.dtype):
        assert config.latent is not None and spec.rope is not None
        of, D, N = config.latent, config.hidden_size, config.num_heads
        R, C, H = of.latent_dim, of.query_rank, of.nope_dim + of.rope_dim
        self.rules, self.attention, self.rope, self.of = rules, attention, spec.rope, of
        self.scale, self.soft_cap = config.attention_scale, config.attention_soft_cap
        make = partial(param, rngs=rngs, dtype=dtype)
        norm = partial(RMSNorm, config=replace(config, norm_eps=of.norm_eps), rngs=rngs, dtype=dtype)
        self.q_down = None if C is None else make((D, C), ("embed", None))
        self.q_norm = None if C is None else norm((C,), (None,))
        self.q = make((C or D, N, H), (None, "heads", "head_dim"))
        self.kv_down = make((D, R + of.rope_dim), ("embed", None))
        self.kv_norm = norm((R,), ("latent",))
        self.k_up = make((R, N, of.nope_dim), ("latent", "heads", "head_dim"))
        self.v_up = make((R, N, of.value_dim), ("latent", "heads", "head_dim"))
        self.o = make((N, of.value_dim, D), ("heads", "head_dim", "embed"))

    def __call__(self, x: Float[Array, "T D"], angles: Angles, kv_pages: jax.Array, layer: jax.Array,
                 batch: StepBatch) -> tuple[Float[Array, "T D"], jax.Array]:
        short = x if self.q_down is None else normed(self.q_norm, project("td,dc->tc", x, self.q_down))
        q_nope, q_rope = jnp.split(project("tc,cnh->tnh", short, self.q), [self.of.nope_dim], axis=-1)
        latent, rope = jnp.split(project("td,dr->tr", x, self.kv_down), [self.of.latent_dim], axis=-1)
        q_rope, rope = (apply_rope(self.rope, y, angles[self.rope]) for y in (q_rope, rope[:, None]))
        q_latent = project("tnh,rnh->tnr", q_nope, self.k_up)
        out, kv_pages = self._attend(q_latent, q_rope, self.kv_norm(latent), rope[:, 0], kv_pages, layer, batch)
        values = project("tnr,rnw->tnw", out, self.v_up)
        return project_and_sum(self.rules, "tnw,nwd->td", values, self.o, ("heads", "head_dim")), kv_pages

    def _attend(self, q_latent, q_rope, latent, rope, kv_pages, layer, batch: StepBatch):
        """Each device's heads attend; all devices of a group hold, and write, the rows of its tokens."""
        more = {} if batch.tree_mask is None else {"tree_mask": batch.tree_mask}

        def attend(*args: jax.Array):
            step, given = args[: len(in_axes)], args[len(in_axes) :]
            return self.attention(*step, scale=self.scale, soft_cap=self.soft_cap,
                                  **dict(zip(more, given, strict=True)))  # fmt: skip

        heads, row = ("tokens", "heads", None), ("tokens", None)
        args = (q_latent, q_rope, latent, rope, kv_pages, layer, *batch.of_rows)
        in_axes = (heads, heads, row, row, LatentLayout.axes, (), *ROW_AXES)
        shapes = (q_latent.shape, kv_pages.shape)
        return self.rules.map_over_shards(attend, (*args, *more.values()), (*in_axes, *[("tokens", None)] * len(more)),
                                          (heads, LatentLayout.axes), shapes)  # fmt: skip
