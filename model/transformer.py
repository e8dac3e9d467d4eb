"""A decoder-only transformer as stacks of scanned layers.

A stack repeats a pattern of layers, say five local and a global one, under one `lax.scan` over its periods; the layers
at one place of the pattern share stacked parameters [L, ...]. So compile time and the number of jit arguments do not
grow with depth. The paged KV cache of all layers is one array, carried through the scans in place.

Axis letters: T tokens, S rows, D model dim, V vocab, L periods of a stack, Lm layers with experts, E experts, G data
groups.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from model import pipeline
from model.batch import StepBatch
from model.config import LayerSpec, ModelConfig, StackSpec
from model.context import ContextAttention
from model.decoder import AnyAttentionFn, DecoderLayer
from model.experts import ExpertsBackend, Placement, is_expert_matrix
from model.layers import Angles, RMSNorm, param
from model.rope import rope_angles
from model.vocabulary import Vocabulary, embed, vocabulary_of
from sharding.rules import Axes, AxisRules

Path = tuple[str, ...]


class LayerStack(nnx.Module):
    """A repeated pattern of layers; those at one place of the pattern have stacked parameters."""

    def __init__(self, config: ModelConfig, spec: StackSpec, held: StackSpec, rules: AxisRules,
                 attention: AnyAttentionFn, experts: ExpertsBackend | None, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        """spec: of the model; held: what a stage of the pipeline, if there is one, has of it."""
        of_layers = rules.within(pipeline.AXIS) if pipeline.num_stages(rules) > 1 else rules

        def make(layer: LayerSpec) -> DecoderLayer:
            @nnx.split_rngs(splits=spec.periods)
            @nnx.vmap
            def stacked(rngs: nnx.Rngs) -> DecoderLayer:
                return DecoderLayer(config, layer, of_layers, attention, experts, rngs=rngs, dtype=dtype)

            return stacked(rngs)

        self.spec, self.held, self.rules = spec, held, rules
        self.layers = nnx.List([make(layer) for layer in spec.pattern])

    def __call__(self, x: Float[Array, "T D"], angles: Angles, kv_pages: jax.Array, batch: StepBatch
                 ) -> tuple[Float[Array, "T D"], jax.Array, Int[Array, "Lm G E"] | None]:  # fmt: skip
        if pipeline.num_stages(self.rules) == 1:
            return self._run(self.layers, x, angles, kv_pages, batch)
        structure, params = nnx.split(self.layers)

        def run(params: nnx.State, x: jax.Array, of_ropes: Sequence[jax.Array], kv_pages: jax.Array, batch: StepBatch):
            of_rope = dict(zip(angles, of_ropes, strict=True))
            return self._run(nnx.merge(structure, params), x, of_rope, kv_pages, batch)

        return pipeline.run_stages(run, params, self.spec.periods, self.rules, x, list(angles.values()), kv_pages,
                                   batch)  # fmt: skip

    def _run(self, layers: nnx.List, x: jax.Array, angles: Angles, kv_pages: jax.Array, batch: StepBatch):
        """The layers of one stage."""
        # A kernel takes no slice: what scan slices for it is copied. So experts' matrices, most of a model, stay whole.
        structure, whole, stacked = nnx.split(layers, is_expert_matrix, ...)

        def body(carry, inputs):
            period, first, params = inputs
            x, kv_pages = carry
            loads = []
            for place, layer in enumerate(nnx.merge(structure, whole, params)):
                x, kv_pages, load = layer(x, angles, kv_pages, first + place, period, batch)
                loads += [] if load is None else [load]
            return (x, kv_pages), loads

        firsts = jnp.asarray(self.held.layers_at(0), jnp.int32)
        periods = jnp.arange(self.held.periods, dtype=jnp.int32)
        (x, kv_pages), loads = lax.scan(body, (x, kv_pages), (periods, firsts, stacked))
        load = jnp.stack(loads, 1).reshape(-1, *loads[0].shape[1:]) if loads else None  # layer after layer
        return x, kv_pages, load


class Transformer(nnx.Module):
    """Tokens to hidden states, and hidden states to logits. The output matrix is the embedding where tied."""

    def __init__(self, config: ModelConfig, rules: AxisRules, attention: AnyAttentionFn,
                 experts: ExpertsBackend | None = None, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        V, D = config.vocab_size, config.hidden_size
        self.config, self.rules, self.attention = config, rules, attention
        self.embedding = param((V, D), ("vocab", "embed"), rngs=rngs, dtype=dtype)
        self.stacks = nnx.List([
            LayerStack(config, spec, held, rules, attention, experts, rngs=rngs, dtype=dtype)
            for spec, held in zip(config.stacks, pipeline.stacks_of_stage(config, rules), strict=True)
        ])
        self.norm = RMSNorm((D,), ("embed",), config, rngs=rngs, dtype=dtype)
        self.head = None if config.tie_embeddings else param((V, D), ("vocab", "embed"), rngs=rngs, dtype=dtype)

    def __call__(self, kv_pages: jax.Array, batch: StepBatch
                 ) -> tuple[Float[Array, "T D"], jax.Array, Int[Array, "Lm G E"] | None]:  # fmt: skip
        """Runs the layers. Returns the normed hidden states of all tokens, the updated KV pages and, of each layer that
        has experts, how many tokens of each data group chose each of them."""
        x = self._embed(batch.tokens) * self.config.embedding_scale
        ropes = {layer.rope for layer in self.config.layers if layer.rope is not None}
        angles = {rope: rope_angles(rope, batch.positions) for rope in ropes}
        loads = []
        if isinstance(self.attention, ContextAttention):
            windows = {layer.window for layer in self.config.layers}
            batch = batch._replace(plans=self.attention.plans(self.rules, batch, windows))
        for stack in self.stacks:
            x, kv_pages, load = stack(x, angles, kv_pages, batch)
            loads += [] if load is None else [load]
        return self.norm(x), kv_pages, jnp.concatenate(loads) if loads else None

    def _embed(self, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        matrix, vocabulary = self.embedding[...], self.vocabulary
        (x,) = self.rules.map_over_shards(
            lambda matrix, tokens: (embed(matrix, tokens, vocabulary),), (matrix, tokens),
            (("vocab", "embed"), ("tokens",)), (("tokens", "embed"),), ((len(tokens), matrix.shape[1]),),
        )  # fmt: skip
        return x

    @property
    def vocabulary(self) -> Vocabulary:
        """As the devices hold it."""
        return vocabulary_of(self.rules, self.config.vocab_size)

    @property
    def output_matrix(self) -> Float[Array, "V D"]:
        return (self.embedding if self.head is None else self.head)[...]

    def project(self, matrix: Float[Array, "V D"], hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
        """Float32 logits, of those tokens whose rows of the output matrix are given."""
        cap = self.config.logit_soft_cap
        logits = jnp.einsum("sd,vd->sv", hidden, matrix, preferred_element_type=jnp.float32) * self.config.logit_scale
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def logits(self, hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
        """Float32 logits of the whole vocabulary."""
        return self.rules.constrain(self.project(self.output_matrix, hidden), ("rows", "vocab"))


def abstract_model(config: ModelConfig, rules: AxisRules, attention: AnyAttentionFn, dtype: jnp.dtype,
                   experts: ExpertsBackend | None = None) -> Transformer:  # fmt: skip
    """The model with shapes instead of arrays. experts: the grouped matmuls of a model that has experts."""
    return nnx.eval_shape(lambda: Transformer(config, rules, attention, experts, rngs=nnx.Rngs(0), dtype=dtype))


def param_dtypes(model: Transformer) -> Mapping[Path, jnp.dtype]:
    """Of every parameter, by path."""
    return {
        tuple(str(part) for part in path): variable.get_value().dtype
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def param_axes(model: Transformer) -> Mapping[Path, tuple[tuple[int, ...], Axes]]:
    """Shape and logical axes of every parameter, by path; stacked parameters gain the axis "layers"."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        shape, axes = variable.get_value().shape, variable.get_metadata("axes")
        found[tuple(str(part) for part in path)] = (shape, ("layers", *axes) if len(axes) < len(shape) else axes)
    return found


def last_hidden(hidden: Float[Array, "T D"], cu_q_lens: Int[Array, " S+1"]) -> Float[Array, "S D"]:
    """The hidden state of each row's last token."""
    return hidden[jnp.maximum(cu_q_lens[1:] - 1, 0)]


def with_params(model: Transformer, params: Mapping[Path, jax.Array]) -> Transformer:
    """The abstract model with arrays for every parameter, and for placements of experts where they are given."""
    structure, state = nnx.split(model)
    flat = []
    for path, variable in nnx.to_flat_state(state):
        name = tuple(str(part) for part in path)
        given = name in params or not isinstance(variable, Placement)  # a placement may stay a shape
        flat.append((path, variable.replace(params[name]) if given else variable))
    return nnx.merge(structure, nnx.from_flat_state(flat))
