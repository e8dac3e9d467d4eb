"""DeepSeek-V3's multi-token prediction (arXiv 2412.19437, section 2.2): one more layer, trained with the model, which
from the hidden state of a token and the embedding of the token after it predicts the one after that.

x = eh_proj([enorm(embedding of token t + 1), hnorm(state of t)]), in this order; the layer; a norm; the target's output
matrix. Both states, the target's and the layer's own where guesses follow guesses, are normed ones. A guess after the
first reads the layer's state in the target's place, as if it were one more module: the checkpoint has one.

Axis letters: T tokens, S rows, K drafts of a row, D model dim, V vocab.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from checkpoints.tensors import ParamSource
from model.batch import StepBatch
from model.build import Kernels
from model.config import ModelConfig
from model.families import deepseek
from model.families.names import sources
from model.layers import RMSNorm, param, project
from model.rope import rope_angles
from model.sampling import SamplingRows
from model.speculative.common import SparePages, drawn_chain, guess_batch, settled_batch, take_rows
from model.speculative.drafter import Drafts, Settled
from model.speculative.draws import DraftSampling, draw_drafts
from model.transformer import Carried, LayerStack, Path, logits_of
from model.vocabulary import embed_tokens
from pallas_kernels.latent_attention.api import LatentBackend
from sharding.rules import AxisRules


def mtp_config(target: ModelConfig) -> ModelConfig:
    """Of the one layer. It is as the target's last."""
    return replace(target, layers=target.layers[-1:])


def mtp_prefix(target: ModelConfig) -> str:
    """Of the layer's tensors: it is behind the target's last."""
    return f"model.layers.{target.num_layers}."


class MTP(nnx.Module):
    """See `model.speculative.drafter.DeviceDrafter`."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: ModelConfig, rules: AxisRules, kernels: Kernels, spares: SparePages, *, max_drafts: int,
                 sampling: DraftSampling, rngs: nnx.Rngs, dtype: jnp.dtype):
        """config: see `mtp_config`."""
        D = config.hidden_size
        self.config, self.rules, self.kernels, self.spares = config, rules, kernels, spares
        self.max_drafts, self.probabilistic = max_drafts, sampling == "probabilistic"
        self.sampling: DraftSampling = sampling

        def norm() -> RMSNorm:
            return RMSNorm((D,), ("embed",), config, rngs=rngs, dtype=dtype)

        self.enorm, self.hnorm, self.norm = norm(), norm(), norm()
        self.eh_proj = param((2 * D, D), (None, "embed"), rngs=rngs, dtype=dtype)
        (spec,), attention = config.stacks, kernels.attention
        assert isinstance(attention, LatentBackend), "DeepSeek-V3's"
        self.stack = LayerStack(config, spec, spec, rules, attention.attend, kernels.experts, rngs=rngs, dtype=dtype)

    def state_shapes(self, num_pages: int) -> jax.ShapeDtypeStruct:
        return self.kernels.kv_pages(self.rules, self.spares.with_spares(num_pages))

    def __call__(self, kv_pages: jax.Array, batch: StepBatch, states: Float[Array, "T D"],
                 embedding: Float[Array, "V D"]) -> tuple[Float[Array, "T D"], jax.Array]:  # fmt: skip
        """batch: its tokens are those after the ones that `states` are of. Returns the normed states, and the pages."""
        embedded = embed_tokens(self.rules, embedding, batch.tokens)
        both = jnp.concatenate([self.enorm(embedded), self.hnorm(states)], axis=-1)
        (rope,) = {layer.rope for layer in self.config.layers}
        assert rope is not None, "latent attention rotates"
        angles = {rope: rope_angles(rope, batch.positions)}
        carried, _ = self.stack(Carried(project("tf,fd->td", both, self.eh_proj), kv_pages), angles, batch)
        return self.norm(carried.x), carried.kv_pages

    def propose(self, state: jax.Array, settled: Settled, batch: StepBatch, rows: SamplingRows, num_drafts: int,
                embedding: jax.Array, output_matrix: jax.Array) -> tuple[Drafts, jax.Array]:  # fmt: skip
        groups, layout = self.spares.groups, self.kernels.kv_layout(1)
        table = self.spares.table(batch, state.shape[layout.axes.index("pages")])

        project_to = partial(logits_of, self.config)

        def draw(states: Float[Array, "S D"], depth: int | Int[Array, ""]):
            return draw_drafts(self.sampling, self.rules, states, output_matrix, project_to, rows, jnp.asarray(depth))

        states, pages = self(state, settled_batch(settled, batch, table, groups), settled.features, embedding)
        states = take_rows(self.rules, states, settled.last)
        first = draw(states, 0)

        def feed(carry, token: Int[Array, " S"], depth: Int[Array, ""]):
            pages, states = carry
            guess = guess_batch(settled, batch, table, groups, token[:, None], first=depth)
            states, pages = self(pages, guess, states, embedding)
            return (pages, states), *draw(states, depth + 1)

        drafts, (pages, _) = drawn_chain(feed, (pages, states), first, num_drafts)
        return drafts, pages


_OWN: dict[Path, str] = {
    ("enorm", "scale"): "enorm.weight", ("hnorm", "scale"): "hnorm.weight", ("eh_proj",): "eh_proj.weight",
    ("norm", "scale"): "shared_head.norm.weight",
}  # fmt: skip


def mtp_sources(target: ModelConfig, paths: Iterable[Path]) -> dict[Path, ParamSource]:
    """Which tensors make the parameters. The layer's embedding and output matrix are copies of the target's, which are
    used instead."""
    prefix, config = mtp_prefix(target), mtp_config(target)
    found = {}
    for path in paths:
        if path in _OWN:
            found[path] = ParamSource(names=(prefix + _OWN[path],), stacked=False, transpose=path == ("eh_proj",))
            continue
        of_stack = ("stacks", "0", *path[1:])
        source = sources(config, deepseek.names(config), [of_stack])[of_stack]
        found[path] = replace(source, names=tuple(prefix + n.removeprefix("model.layers.0.") for n in source.names))
    return found
