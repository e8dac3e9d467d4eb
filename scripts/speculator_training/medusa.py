"""Medusa heads that share the target's output matrix: h + SiLU(W h + b), starting as the target itself (W = 0).

The published heads have an output matrix each; for a small model with a large vocabulary these would be most of it.
Cai et al., arXiv 2401.10774.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.speculator_training.batches import Batch
from scripts.speculator_training.method import Frozen, Params, Target


@dataclass(frozen=True, eq=False)
class Medusa:
    target: Target
    depth: int
    dtype: Any  # of products
    needs_taps: bool = False

    def init(self, key: jax.Array, frozen: Frozen) -> Params:
        D = self.target.config.hidden_size
        params = {}
        for head in range(self.depth):
            params[_name(head, "weight")] = jnp.zeros((D, D))
            params[_name(head, "bias")] = jnp.zeros(D)
        return params

    def states(self, params: Params, frozen: Frozen, batch: Batch) -> list[jax.Array]:
        h, states = batch.hidden.astype(self.dtype), []
        for head in range(self.depth):
            weight = params[_name(head, "weight")].astype(self.dtype)
            wide = jnp.einsum("bld,ed->ble", h, weight, preferred_element_type=jnp.float32)
            states.append((h + jax.nn.silu(wide + params[_name(head, "bias")])).astype(self.dtype))
        return states

    def logits(self, params: Params, rows: jax.Array, states: jax.Array) -> jax.Array:
        return self.target.project(rows.astype(self.dtype), states)

    def config(self) -> dict[str, Any]:
        config = self.target.config
        return {
            "model_type": "medusa", "architectures": ["MedusaModel"], "medusa_num_heads": self.depth,
            "medusa_num_layers": 1, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        }  # fmt: skip

    def tensors(self, params: Params, drafted: np.ndarray) -> dict[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in params.items()}


def _name(head: int, kind: str) -> str:
    return f"medusa_head.{head}.0.linear.{kind}"
