"""A decoder-only transformer as stacks of scanned layers.

A stack repeats a pattern of layers, say five local and a global one, under one `lax.scan` over its periods; the layers
at one place of the pattern share stacked parameters [L, ...]. So compile time and the number of jit arguments do not
grow with depth. The paged KV cache of all layers is one array, carried through the scans in place.

Axis letters: T tokens, S rows, D model dim, V vocab, L periods of a stack, Lm layers with experts, E experts, G data
groups, F features: those of n taps, n D.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

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
from model.vocabulary import Vocabulary, embed_tokens, vocabulary_of
from sharding.rules import Axes, AxisRules

Path = tuple[str, ...]
AnyModule = TypeVar("AnyModule", bound=nnx.Module)


class Carried(NamedTuple):
    """What passes from layer to layer. tapped: the inputs of some layers, and a place for all others' [n + 1, T, D]."""

    x: Float[Array, "T D"]
    kv_pages: jax.Array
    tapped: Float[Array, "n T D"] | None = None


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

    def __call__(self, carried: Carried, angles: Angles, batch: StepBatch, taps: Sequence[int] = ()
                 ) -> tuple[Carried, Int[Array, "Lm G E"] | None]:  # fmt: skip
        """taps: layers of the model, in order, whose inputs are put in `carried.tapped`."""
        if pipeline.num_stages(self.rules) == 1:
            return self._run(self.layers, carried, angles, batch, taps)
        assert not taps, "no stage of a pipeline has the inputs of all layers"
        structure, params = nnx.split(self.layers)

        def run(params: nnx.State, x: jax.Array, of_ropes: Sequence[jax.Array], kv_pages: jax.Array, batch: StepBatch):
            of_rope = dict(zip(angles, of_ropes, strict=True))
            carried, load = self._run(nnx.merge(structure, params), Carried(x, kv_pages), of_rope, batch, ())
            return carried.x, carried.kv_pages, load

        x, kv_pages, load = pipeline.run_stages(run, params, self.spec.periods, self.rules, carried.x,
                                                list(angles.values()), carried.kv_pages, batch)
        return Carried(x, kv_pages), load

    def _run(self, layers: nnx.List, carried: Carried, angles: Angles, batch: StepBatch, taps: Sequence[int]):
        """The layers of one stage."""
        # A kernel takes no slice: what scan slices for it is copied. So experts' matrices, most of a model, stay whole.
        structure, whole, stacked = nnx.split(layers, is_expert_matrix, ...)

        def body(carried: Carried, inputs):
            period, first, params = inputs
            x, kv_pages, tapped = carried
            loads = []
            for place, layer in enumerate(nnx.merge(structure, whole, params)):
                if tapped is not None and not set(self.held.layers_at(place)).isdisjoint(taps):
                    tapped = lax.dynamic_update_index_in_dim(tapped, x, _place_of(taps, first + place), 0)
                x, kv_pages, load = layer(x, angles, kv_pages, first + place, period, batch)
                loads += [] if load is None else [load]
            return Carried(x, kv_pages, tapped), loads

        firsts = jnp.asarray(self.held.layers_at(0), jnp.int32)
        periods = jnp.arange(self.held.periods, dtype=jnp.int32)
        carried, loads = lax.scan(body, carried, (periods, firsts, stacked))
        load = jnp.stack(loads, 1).reshape(-1, *loads[0].shape[1:]) if loads else None  # layer after layer
        return carried, load


def _place_of(taps: Sequence[int], layer: Int[Array, ""]) -> Int[Array, ""]:
    """Of a layer among the taps; of others, after all of them."""
    return jnp.min(jnp.where(jnp.asarray(taps) == layer, jnp.arange(len(taps)), len(taps)))


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
        hidden, _, kv_pages, load = self.with_features(kv_pages, batch, ())
        return hidden, kv_pages, load

    def with_features(
        self, kv_pages: jax.Array, batch: StepBatch, taps: Sequence[int]
    ) -> tuple[Float[Array, "T D"], Float[Array, "T F"], jax.Array, Int[Array, "Lm G E"] | None]:
        """The same and, second, the inputs (the residual stream) of the layers `taps` side by side, in their order; of
        the one after the last layer, its output. Without taps: the normed hidden states."""
        x = embed_tokens(self.rules, self.embedding[...], batch.tokens) * self.config.embedding_scale
        ropes = {layer.rope for layer in self.config.layers if layer.rope is not None}
        angles = {rope: rope_angles(rope, batch.positions) for rope in ropes}
        loads = []
        if isinstance(self.attention, ContextAttention):
            windows = {layer.window for layer in self.config.layers}
            batch = batch._replace(plans=self.attention.plans(self.rules, batch, windows))
        order = sorted(set(taps))
        carried = Carried(x, kv_pages, self._nothing_tapped(x, len(order)) if taps else None)
        for stack in self.stacks:
            carried, load = stack(carried, angles, batch, order)
            loads += [] if load is None else [load]
        x, kv_pages, tapped = carried
        hidden, load = self.norm(x), jnp.concatenate(loads) if loads else None
        if tapped is None:
            return hidden, hidden, kv_pages, load
        of_tap = {**{tap: tapped[place] for place, tap in enumerate(order)}, self.config.num_layers: x}
        return hidden, jnp.concatenate([of_tap[tap] for tap in taps], axis=1), kv_pages, load

    def _nothing_tapped(self, x: Float[Array, "T D"], count: int) -> Float[Array, "n T D"]:
        return self.rules.constrain(jnp.zeros((count + 1, *x.shape), x.dtype), (None, "tokens", "embed"))

    @property
    def vocabulary(self) -> Vocabulary:
        """As the devices hold it."""
        return vocabulary_of(self.rules, self.config.vocab_size)

    @property
    def output_matrix(self) -> Float[Array, "V D"]:
        return (self.embedding if self.head is None else self.head)[...]

    def project(self, matrix: Float[Array, "V D"], hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
        """Float32 logits, of those tokens whose rows of the output matrix are given."""
        return logits_of(self.config, matrix, hidden)

    def logits(self, hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
        """Float32 logits of the whole vocabulary."""
        return self.rules.constrain(self.project(self.output_matrix, hidden), ("rows", "vocab"))


def logits_of(config: ModelConfig, matrix: Float[Array, "V D"], hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
    """Float32 logits, of those tokens whose rows of the output matrix are given."""
    logits = jnp.einsum("sd,vd->sv", hidden, matrix, preferred_element_type=jnp.float32) * config.logit_scale
    cap = config.logit_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def abstract_model(config: ModelConfig, rules: AxisRules, attention: AnyAttentionFn, dtype: jnp.dtype,
                   experts: ExpertsBackend | None = None) -> Transformer:  # fmt: skip
    """The model with shapes instead of arrays. experts: the grouped matmuls of a model that has experts."""
    return nnx.eval_shape(lambda: Transformer(config, rules, attention, experts, rngs=nnx.Rngs(0), dtype=dtype))


def variables_of(model: nnx.Module, kind: type[nnx.Variable] = nnx.Param) -> Iterator[tuple[Path, nnx.Variable]]:
    """Every parameter, or variable of another kind, with its path."""
    for path, variable in nnx.to_flat_state(nnx.state(model, kind)):
        yield tuple(map(str, path)), variable


def param_dtypes(model: nnx.Module) -> Mapping[Path, jnp.dtype]:
    """Of every parameter, by path."""
    return {path: variable.get_value().dtype for path, variable in variables_of(model)}


def param_axes(model: nnx.Module) -> Mapping[Path, tuple[tuple[int, ...], Axes]]:
    """Shape and logical axes of every parameter, by path; stacked parameters gain the axis "layers"."""
    found = {}
    for path, variable in variables_of(model):
        shape, axes = variable.get_value().shape, variable.get_metadata("axes")
        found[path] = (shape, ("layers", *axes) if len(axes) < len(shape) else axes)
    return found


def with_params(model: AnyModule, params: Mapping[Path, jax.Array | jax.ShapeDtypeStruct]) -> AnyModule:
    """The abstract model with arrays, or shapes with shardings, for every parameter, and for placements of experts
    where they are given."""
    structure, state = nnx.split(model)
    flat = []
    for path, variable in nnx.to_flat_state(state):
        name = tuple(map(str, path))
        given = name in params or not isinstance(variable, Placement)  # a placement may stay a shape
        flat.append((path, variable.replace(params[name]) if given else variable))
    return nnx.merge(structure, nnx.from_flat_state(flat))
