"""EAGLE-3: one decoder layer on three of the target's hidden states, unrolled over its own outputs as when it drafts.

Step n of the unrolling stands at position t for the draft made n tokens after t: it takes the embedding of token
t + 1 + n and, in the features' place, its own output of step n - 1. It sees the keys of step 0 up to t, which come
from the target, and those of its own steps 1 to n at t. Li et al., arXiv 2503.01840; code: SafeAILab/EAGLE,
sgl-project/SpecForge.

Axis letters: B sequences, L tokens of one, D model dim, K kv heads, G queries of a kv head, H head dim, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.config import ModelConfig
from model.families.registry import read_config
from model.layers import divided_by_rms
from model.rope import apply_rope, rope_angles
from scripts.speculator_training.batches import Batch, ahead
from scripts.speculator_training.method import Frozen, Params, Target

OWN = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")  # of the config, beside a Llama's
NORMS = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")


@dataclass(frozen=True, eq=False)
class Eagle3:
    target: Target
    depth: int
    dtype: Any  # of products
    width: int  # of the MLP
    draft_vocab_size: int
    taps: tuple[int, ...]  # layers of the target
    tap_scales: np.ndarray  # [F]: of the features; they are trained on divided by these
    needs_taps: bool = True

    @cached_property
    def layer(self) -> ModelConfig:
        """The drafter's layer, as that of a Llama."""
        return read_config({key: value for key, value in self.config().items() if key not in OWN})

    def init(self, key: jax.Array, frozen: Frozen) -> Params:
        config, D = self.layer, self.target.config.hidden_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        shapes = {"self_attn.q_proj": (q, 2 * D), "self_attn.k_proj": (kv, 2 * D), "self_attn.v_proj": (kv, 2 * D),
                  "self_attn.o_proj": (D, q), "mlp.gate_proj": (self.width, D), "mlp.up_proj": (self.width, D),
                  "mlp.down_proj": (D, self.width)}  # fmt: skip
        keys = jax.random.split(key, len(shapes))
        params = {f"midlayer.{name}.weight": 0.02 * jax.random.normal(k, shape)
                  for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
        # The last of the features is closest to what the output matrix takes: it is passed on to begin with.
        params["fc.weight"] = jnp.eye(D, len(self.tap_scales), k=len(self.tap_scales) - D)
        params |= {f"{name}.weight": jnp.ones(D) for name in NORMS}
        head = frozen.output[frozen.drafted].astype(jnp.float32)
        # A feature of an earlier layer would make the output matrix sure of something wrong.
        return {**params, "norm.weight": jnp.asarray(self.target.norm) / 4, "lm_head.weight": head}

    def states(self, params: Params, frozen: Frozen, batch: Batch) -> list[jax.Array]:
        w = {name: value.astype(self.dtype) for name, value in params.items()}
        g = _product((batch.taps / self.tap_scales).astype(self.dtype), w["fc.weight"])
        keys, values, states = [], [], []
        for n in range(self.depth):
            embedded = frozen.embedding[ahead(batch.tokens, 1 + n)].astype(self.dtype)
            g = self._layer(w, embedded, g, n, keys, values)
            states.append(self._norm(g, w["norm.weight"]))
        return states

    def _layer(self, w: Params, embedded: jax.Array, g: jax.Array, n: int, keys: list, values: list) -> jax.Array:
        """keys, values: of the steps so far; gain this one's."""
        config, (B, L, _) = self.layer, g.shape
        x = jnp.concatenate([self._norm(embedded, w["midlayer.input_layernorm.weight"]),
                             self._norm(g, w["midlayer.hidden_norm.weight"])], axis=-1)  # fmt: skip

        def heads(name: str) -> jax.Array:
            return _product(x, w[f"midlayer.self_attn.{name}_proj.weight"]).reshape(B, L, -1, config.head_dim)

        keys.append(self._turned(heads("k"), n))
        values.append(heads("v"))
        out = _attend(self._turned(heads("q"), n), keys, values, config.head_dim**-0.5)
        g = g + _product(out.reshape(B, L, -1), w["midlayer.self_attn.o_proj.weight"])
        x = self._norm(g, w["midlayer.post_attention_layernorm.weight"])
        gate, up = (_product(x, w[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return g + _product(jax.nn.silu(gate) * up, w["midlayer.mlp.down_proj.weight"])

    def _turned(self, x: jax.Array, n: int) -> jax.Array:
        """Rotated by position t + n."""
        B, L, heads, H = x.shape
        rope = self.layer.layers[0].rope
        assert rope is not None
        angles = rope_angles(rope, jnp.tile(jnp.arange(L) + n, B))
        return apply_rope(rope, x.reshape(B * L, heads, H), angles).reshape(x.shape)

    def _norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        normed = divided_by_rms(x.astype(jnp.float32), (-1,), self.layer.norm_eps)
        return (normed * scale.astype(jnp.float32)).astype(x.dtype)

    def logits(self, params: Params, rows: jax.Array, states: jax.Array) -> jax.Array:
        head = params["lm_head.weight"].astype(self.dtype)
        return jnp.einsum("nd,vd->nv", states, head, preferred_element_type=jnp.float32)

    def config(self) -> dict[str, Any]:
        hf, config = self.target.hf_config, self.target.config
        rope = {key: hf[key] for key in ("rope_theta", "rope_scaling", "rope_parameters") if hf.get(key) is not None}
        return {
            "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": config.hidden_size,
            "intermediate_size": self.width, "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "num_hidden_layers": 1,
            "hidden_act": "silu", "rms_norm_eps": config.norm_eps, "max_position_embeddings": config.max_position,
            **rope, "vocab_size": config.vocab_size, "draft_vocab_size": self.draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        }  # fmt: skip

    def tensors(self, params: Params, drafted: np.ndarray) -> dict[str, np.ndarray]:
        may_draft = np.zeros(self.target.config.vocab_size, bool)
        may_draft[drafted] = True
        offsets = drafted.astype(np.int64) - np.arange(len(drafted))
        tensors = {name: np.asarray(value) for name, value in params.items()}
        tensors["fc.weight"] = tensors["fc.weight"] / self.tap_scales
        return {**tensors, "d2t": offsets, "t2d": may_draft}


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("bld,ed->ble", x, weight, preferred_element_type=jnp.float32).astype(x.dtype)


def _attend(q: jax.Array, keys: Sequence[jax.Array], values: Sequence[jax.Array], scale: float) -> jax.Array:
    """q [B, L, K G, H]: to the first keys [B, L, K, H] up to its own position, to later ones at its own position."""
    B, L, N, H = q.shape
    K = keys[0].shape[2]
    q = (q * scale).reshape(B, L, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, keys[0], preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.tril(jnp.ones((L, L), bool)), scores, -jnp.inf)
    own = [jnp.einsum("btkgh,btkh->bkgt", q, k, preferred_element_type=jnp.float32)[..., None] for k in keys[1:]]
    weights = jax.nn.softmax(jnp.concatenate([scores, *own], axis=-1), axis=-1).astype(q.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights[..., :L], values[0], preferred_element_type=jnp.float32)
    for i, v in enumerate(values[1:]):
        out = out + jnp.einsum("bkgt,btkh->btkgh", weights[..., L + i], v, preferred_element_type=jnp.float32)
    return out.reshape(B, L, N, H).astype(q.dtype)
