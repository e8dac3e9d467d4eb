"""EAGLE's networks: one decoder layer that continues the target's own features.

A token's input is the embedding of the token after it beside a feature of it: what the target computed at that place
or, for guesses, what this layer gave at the guess before. Its output stands for the target's state at the next place.

EAGLE-1 (Li et al., arXiv 2401.15077; EAGLE-2 has the same weights): features are the target's normed final states, and
its output matrix turns the layer's output into tokens. The layer has no norm before attention.
EAGLE-3 (Li et al., arXiv 2503.01840): features are inputs of three of the target's layers, fused into one; the layer
norms embedding and feature apart, and has a norm, an output matrix and a vocabulary of its own.

Axis letters: T tokens, S rows, D model dim, V vocab, W draft vocab, F features of a token, k best tokens.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.batch import StepBatch
from model.config import ModelConfig
from model.layers import MLP, Attention, RMSNorm, add, divided_by_rms, normed, param, project
from model.rope import rope_angles
from model.speculative.common import best_tokens
from model.transformer import logits_of
from pallas_kernels.ragged_paged_attention.api import AttentionFn
from sharding.rules import AxisRules


class EagleNetwork(Protocol):
    """taps: see `DeviceDrafter`. embedding: of the drafter's own, if it has one."""

    config: ModelConfig
    rules: AxisRules
    taps: tuple[int, ...]
    embedding: nnx.Param | None

    def fuse(self, features: Float[Array, "T F"]) -> Float[Array, "T D"]:
        """The target's features, as the layer takes them."""
        ...

    def __call__(self, feature: Float[Array, "T D"], embedded: Float[Array, "T D"], pages: jax.Array, batch: StepBatch
                 ) -> tuple[Float[Array, "T D"], jax.Array]:  # fmt: skip
        """embedded: the embeddings of the tokens that follow. Returns the next features and the KV pages."""
        ...

    def best(self, feature: Float[Array, "S D"], output_matrix: Float[Array, "V D"], k: int
             ) -> tuple[Float[Array, "S k"], Int[Array, "S k"]]:  # fmt: skip
        """Log-probabilities and ids, of the target, of the k best tokens after it. output_matrix: the target's."""
        ...


class Block(nnx.Module):
    """A decoder layer whose attention may read something else than what it is added to."""

    def __init__(self, config: ModelConfig, rules: AxisRules, attention: AttentionFn, *, num_inputs: int,
                 rngs: nnx.Rngs, dtype: jnp.dtype):  # fmt: skip
        (self.spec,) = config.layers
        self.rules = rules
        self.attention = Attention(config, self.spec, rules, attention, rngs=rngs, dtype=dtype, num_inputs=num_inputs)
        self.mlp_norm = RMSNorm((config.hidden_size,), ("embed",), config, rngs=rngs, dtype=dtype)
        self.mlp = MLP(config, config.intermediate_size, rules, rngs=rngs, dtype=dtype)

    def __call__(self, read: Float[Array, "T I"], residual: Float[Array, "T D"], pages: jax.Array, batch: StepBatch
                 ) -> tuple[Float[Array, "T D"], jax.Array]:  # fmt: skip
        rope = self.spec.rope
        angles = {} if rope is None else {rope: rope_angles(rope, batch.positions)}
        out, pages = self.attention(read, angles, pages, jnp.zeros((), jnp.int32), batch)
        x = self.rules.constrain(residual + out, ("tokens", "embed"))
        return self.rules.constrain(x + self.mlp(self.mlp_norm(x)), ("tokens", "embed")), pages


class Eagle1(nnx.Module):
    taps: tuple[int, ...] = ()
    embedding: nnx.Param | None = None

    def __init__(self, config: ModelConfig, target: ModelConfig, rules: AxisRules, attention: AttentionFn, *,
                 has_bias: bool, rngs: nnx.Rngs, dtype: jnp.dtype):
        """has_bias: of what makes one of an embedding and a feature. rules: for the drafter's numbers of heads."""
        D = config.hidden_size
        self.config, self.rules, self.target = config, rules, target
        self.fc = param((2 * D, D), (None, "embed"), rngs=rngs, dtype=dtype)
        self.fc_bias = param((D,), ("embed",), rngs=rngs, dtype=dtype) if has_bias else None
        self.block = Block(config, rules, attention, num_inputs=D, rngs=rngs, dtype=dtype)

    def fuse(self, features: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return features

    def __call__(self, feature: Float[Array, "T D"], embedded: Float[Array, "T D"], pages: jax.Array, batch: StepBatch
                 ) -> tuple[Float[Array, "T D"], jax.Array]:  # fmt: skip
        both = jnp.concatenate([embedded.astype(feature.dtype), feature], axis=1)
        x = add(project("tf,fd->td", both, self.fc), self.fc_bias)
        return self.block(x, x, pages, batch)

    def best(self, feature: Float[Array, "S D"], output_matrix: Float[Array, "V D"], k: int
             ) -> tuple[Float[Array, "S k"], Int[Array, "S k"]]:  # fmt: skip
        return best_tokens(self.rules, feature, output_matrix, partial(logits_of, self.target), k)


# What some heads norm beside what all do: the taps, as one or each, before they are fused; the feature that attention
# is added to; the feature that comes out, also where it is fed again. EAGLE-3.1: "taps" and "output".
Normed = Literal["features", "taps", "residual", "output"]


class Eagle3(nnx.Module):
    def __init__(self, config: ModelConfig, rules: AxisRules, attention: AttentionFn, *, taps: Sequence[int],
                 target_hidden: int, draft_vocab: int, has_offsets: bool, has_embedding: bool,
                 norms: frozenset[Normed] = frozenset(), rngs: nnx.Rngs, dtype: jnp.dtype):
        """target_hidden: numbers of a tap. has_offsets: draft ids are not the target's."""
        D, W = config.hidden_size, draft_vocab
        self.config, self.rules, self.taps, self.norms = config, rules, tuple(taps), norms
        F = len(self.taps) * target_hidden

        def norm(size: int = D, axis: str | None = "embed") -> RMSNorm:
            return RMSNorm((size,), (axis,), config, rngs=rngs, dtype=dtype)

        make = partial(param, rngs=rngs)
        self.input_norm = norm(F, None) if "features" in norms else None
        each = len(self.taps), target_hidden
        self.tap_scales = make(each, (None, None), dtype=dtype, ones=True) if "taps" in norms else None
        self.fc = make((F, D), (None, "embed"), dtype=dtype)
        self.embedding_norm, self.feature_norm, self.norm = norm(), norm(), norm()
        self.block = Block(config, rules, attention, num_inputs=2 * D, rngs=rngs, dtype=dtype)
        self.head = make((W, D), ("vocab", "embed"), dtype=dtype)
        has, ints = has_embedding, jnp.dtype(jnp.int32)
        self.embedding = make((config.vocab_size, D), ("vocab", "embed"), dtype=dtype) if has else None
        # Of a draft id to the target's.
        self.offsets = make((W,), (None,), dtype=ints) if has_offsets else None

    def fuse(self, features: Float[Array, "T F"]) -> Float[Array, "T D"]:
        features = normed(self.input_norm, features)
        if self.tap_scales is not None:
            scales = self.tap_scales[...].astype(jnp.float32)
            of_taps = features.reshape(-1, *scales.shape).astype(jnp.float32)
            of_taps = divided_by_rms(of_taps, (-1,), self.config.norm_eps) * scales
            features = of_taps.astype(features.dtype).reshape(features.shape)
        return project("tf,fd->td", features, self.fc)

    def __call__(self, feature: Float[Array, "T D"], embedded: Float[Array, "T D"], pages: jax.Array, batch: StepBatch
                 ) -> tuple[Float[Array, "T D"], jax.Array]:  # fmt: skip
        read = self.feature_norm(feature)
        both = jnp.concatenate([self.embedding_norm(embedded.astype(feature.dtype)), read], axis=1)
        out, pages = self.block(both, read if "residual" in self.norms else feature, pages, batch)
        return self.norm(out) if "output" in self.norms else out, pages

    def best(self, feature: Float[Array, "S D"], output_matrix: Float[Array, "V D"], k: int
             ) -> tuple[Float[Array, "S k"], Int[Array, "S k"]]:  # fmt: skip
        state = feature if "output" in self.norms else self.norm(feature)
        values, ids = best_tokens(self.rules, state, self.head[...], _logits, k)
        return values, ids if self.offsets is None else ids + self.offsets[...][ids]


def _logits(matrix: Float[Array, "W D"], feature: Float[Array, "S D"]) -> Float[Array, "S W"]:
    return jnp.einsum("sd,vd->sv", feature, matrix, preferred_element_type=jnp.float32)
