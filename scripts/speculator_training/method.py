"""What a way of drafting brings to training. Its parameters are the tensors of a published checkpoint, by their names,
as a file has them ([out, in]), in float32.

Axis letters: B sequences, L tokens of one, D model dim, V vocab, d tokens that may be drafted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from model.config import ModelConfig
from model.transformer import Transformer
from scripts.speculator_training.batches import Batch
from serving.loading import LoadedModel

Params = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """The target's arrays that a drafter uses and does not train."""

    embedding: Float[Array, "V D"]
    output: Float[Array, "V D"]
    drafted: Int[Array, " d"]  # the target's ids of the tokens that may be drafted


@dataclass(frozen=True)
class Target:
    config: ModelConfig
    hf_config: Mapping[str, Any]
    norm: np.ndarray  # [D], what its last norm multiplies with
    embedding: jax.Array
    output: jax.Array
    project: Callable[[jax.Array, jax.Array], jax.Array]  # output rows, hidden states -> logits

    @classmethod
    def of(cls, loaded: LoadedModel) -> "Target":
        model: Transformer = loaded.model
        norm = model.norm.offset + np.asarray(model.norm.scale[...], np.float32)
        return cls(model.config, loaded.hf_config, norm, model.embedding[...], model.output_matrix, model.project)


class Method(Protocol):
    @property
    def depth(self) -> int:
        """Drafts a step."""
        ...

    @property
    def needs_taps(self) -> bool: ...

    def init(self, key: jax.Array, frozen: Frozen) -> Params: ...

    def states(self, params: Params, frozen: Frozen, batch: Batch) -> list[Float[Array, "B L D"]]:
        """Of each draft i, what its output matrix takes: from position t they give token t + 2 + i, tokens before it
        being known."""
        ...

    def logits(self, params: Params, rows: Float[Array, "d D"], states: Float[Array, "N D"]) -> Float[Array, "N d"]:
        """rows: of the target's output matrix, for the tokens that may be drafted."""
        ...

    def config(self) -> dict[str, Any]:
        """The folder's `config.json`."""
        ...

    def tensors(self, params: Params, drafted: np.ndarray) -> dict[str, np.ndarray]:
        """The folder's tensors, floats in float32."""
        ...
