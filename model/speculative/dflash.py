"""DFlash: a small transformer that fills a whole block of masks at once, seeing all of it and the target's features.

The block is the newest token and masks after it. What the target computed of the tokens before, at several layers, is
fused into one feature a token; every layer makes keys and values of the features with the same matrices as of the
block. Those of features depend on no layer below, so all layers' are written at once, and they alone are kept.
Chen, Liang and Liu, arXiv 2602.06036; z-lab/dflash `dflash/model.py`, whose checkpoints this loads, and what
`speculators` makes of them: copies of the target's embeddings and output matrix, and maybe fewer tokens to draft.

Axis letters: T tokens, S rows, B tokens of a block, K kv heads (drafts a row where it is about drafts), N query heads,
H head dim, D model dim, F features, V vocab, L layers, P pages, b tokens of a page.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from checkpoints.tensors import ParamSource
from model.batch import StepBatch
from model.config import ModelConfig
from model.families.names import LLAMA
from model.families.registry import read_config
from model.layers import MLP, RMSNorm, add, divided_by_rms, param, project, project_and_sum
from model.rope import apply_rope, rope_angles
from model.sampling import SamplingRows
from model.speculative.block_attention import PAGE_AXES, attend_blocks, write_pages
from model.speculative.drafter import Drafts, Settled
from model.speculative.draws import DraftSampling, draw_drafts
from model.speculative.speculators import from_speculators
from model.transformer import logits_of
from model.vocabulary import embed_tokens
from sharding.rules import AxisRules

_EVERYTHING = 1 << 30  # tokens: a window that ends nowhere
_OWN = frozenset(("block_size", "mask_token_id", "target_layer_ids", "is_causal", "input_embedding_scale",
                  "output_multiplier", "final_logit_softcapping"))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    model: ModelConfig  # the drafter's layers
    block_size: int  # B at most
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # whose outputs are the features
    causal: tuple[bool, ...]  # of each layer: its block tokens do not see those after them
    embedding_scale: float = 1.0  # of the block's embeddings
    num_known: int | None = None  # tokens of the target's vocabulary that it drafts; None: all


def read_dflash_config(hf: Mapping[str, Any], target: ModelConfig) -> DFlashConfig:
    """From a published `config.json`. Raises ValueError."""
    if "DFlash2DraftModel" in (hf.get("architectures") or ()):
        raise ValueError("architectures: DFlash2DraftModel is not supported, DFlashDraftModel is")
    hf, num_known = _published(hf)
    own = dict(hf.get("dflash_config") or {})
    if unknown := sorted(own.keys() - _OWN):
        raise ValueError(f"dflash_config has keys that are not supported: {', '.join(unknown)}")

    def value(name: str, default: Any = None) -> Any:
        return own.get(name, hf.get(name, default))

    for name in ("target_layer_ids", "mask_token_id"):
        if value(name) is None:
            raise ValueError(f"the drafter's config has no dflash_config.{name}: it is not a DFlash checkpoint")
    rest = {key: hf[key] for key in hf if key not in (*_OWN, "dflash_config", "num_target_layers")}
    model = read_config({**rest, "model_type": hf.get("model_type", "qwen3")})
    model = replace(model, logit_scale=float(value("output_multiplier", 1.0)),
                    logit_soft_cap=value("final_logit_softcapping") or None)  # fmt: skip
    for name in ("hidden_size", "vocab_size"):
        if getattr(model, name) != getattr(target, name):
            raise ValueError(f"the DFlash drafter has {name}={getattr(model, name)}, the target has "
                             f"{getattr(target, name)}; use the drafter of this model")  # fmt: skip
    taken, mask, size = tuple(map(int, value("target_layer_ids"))), int(value("mask_token_id")), value("block_size", 16)
    if not taken or not all(0 <= layer < target.num_layers - 1 for layer in taken):
        raise ValueError(f"target_layer_ids={list(taken)} must be in 0 to {target.num_layers - 2}, the target's layers "
                         "but its last")
    if not 0 <= mask < target.vocab_size:
        raise ValueError(f"mask_token_id={mask} is not in the vocabulary of {target.vocab_size}")
    if not 2 <= int(size) <= 1024:
        raise ValueError(f"block_size={size} must be in 2 to 1024")
    causal = value("is_causal")
    return DFlashConfig(
        model=model, block_size=int(size), mask_token_id=mask, target_layer_ids=taken,
        causal=tuple(layer.window is not None if causal is None else bool(causal) for layer in model.layers),
        embedding_scale=float(value("input_embedding_scale", 1.0)),
        num_known=None if num_known in (None, model.vocab_size) else num_known,
    )  # fmt: skip


def _published(hf: Mapping[str, Any]) -> tuple[Mapping[str, Any], int | None]:
    """A config as z-lab writes it, and how many tokens the drafter knows if it says so."""
    if "speculators_model_type" not in hf:
        return hf, None
    rest = dict(from_speculators(hf, "dflash", usual="qwen3"))
    if rest.pop("sample_from_anchor", None):
        raise ValueError("sample_from_anchor=true of a DFlash drafter is not supported: a draft for the newest token's "
                         "own place beside those of the masks")  # fmt: skip
    if (hidden := rest.pop("target_hidden_size", None)) not in (None, rest.get("hidden_size")):
        raise ValueError(f"target_hidden_size={hidden} of a DFlash drafter must be its hidden_size, "
                         f"{rest.get('hidden_size')}")  # fmt: skip
    inputs = rest.pop("aux_hidden_state_layer_ids", None)  # of these layers
    own = {"block_size": rest.pop("block_size", 8), "mask_token_id": rest.pop("mask_token_id", None),
           "target_layer_ids": None if inputs is None else [int(layer) - 1 for layer in inputs]}  # fmt: skip
    if rest.pop("sliding_window_non_causal", None):
        own["is_causal"] = False
    num_known = rest.pop("draft_vocab_size", None)
    return {**rest, "dflash_config": own}, num_known


class DFlashLayer(nnx.Module):
    """A layer without its attention, which differs for blocks and features."""

    def __init__(self, config: ModelConfig, rules: AxisRules, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        D, N, H = config.hidden_size, config.num_heads, config.head_dim
        K = rules.held("kv_heads", config.num_kv_heads)
        self.rules = rules
        heads, kv_heads = ("heads", "head_dim"), ("kv_heads", "head_dim")

        def make(shape, axes, ones: bool = False) -> nnx.Param:
            return param(shape, axes, rngs=rngs, dtype=dtype, ones=ones)

        self.q = make((D, N, H), ("embed", *heads))
        self.k, self.v = (make((D, K, H), ("embed", *kv_heads)) for _ in range(2))
        self.o = make((N, H, D), (*heads, "embed"))
        biased = config.biases
        self.q_bias = make((N, H), heads) if "q" in biased else None
        self.k_bias = make((K, H), kv_heads) if "k" in biased else None
        self.v_bias = make((K, H), kv_heads) if "v" in biased else None
        self.o_bias = make((D,), ("embed",)) if "o" in biased else None

        def norm(size: int, axis: str) -> RMSNorm:
            return RMSNorm((size,), (axis,), config, rngs=rngs, dtype=dtype)

        self.attention_norm, self.mlp_norm = norm(D, "embed"), norm(D, "embed")
        self.q_norm, self.k_norm = norm(H, "head_dim"), norm(H, "head_dim")
        self.mlp = MLP(config, config.intermediate_size, rules, rngs=rngs, dtype=dtype)


class DFlash(nnx.Module):
    """See `model.speculative.drafter.DeviceDrafter`. State: keys and values of all features, [L, P, b, 2, K, H]."""

    def __init__(self, config: DFlashConfig, rules: AxisRules, *, page_size: int, sampling: DraftSampling = "greedy",
                 rngs: nnx.Rngs, dtype: jnp.dtype):  # fmt: skip
        """rules: of a mesh for the drafter's numbers of heads, see `model.build.model_rules`."""
        model = config.model
        D, dtype = model.hidden_size, jnp.dtype(dtype)
        self.config, self.rules, self.page_size, self.dtype = config, rules, page_size, dtype
        self.taps = tuple(layer + 1 for layer in config.target_layer_ids)
        self.max_drafts, self.probabilistic = config.block_size - 1, sampling == "probabilistic"
        self.sampling: DraftSampling = sampling
        (self.rope,) = {layer.rope for layer in model.layers if layer.rope is not None}  # Qwen3: the same in all
        self.fc = param((len(self.taps) * D, D), (None, "embed"), rngs=rngs, dtype=dtype)
        self.hidden_norm = RMSNorm((D,), ("embed",), model, rngs=rngs, dtype=dtype)
        self.norm = RMSNorm((D,), ("embed",), model, rngs=rngs, dtype=dtype)
        some, V = config.num_known is not None, model.vocab_size
        # Which of the target's tokens it drafts.
        self.known = param((V,), ("vocab",), rngs=rngs, dtype=jnp.dtype(bool), ones=True) if some else None

        @nnx.split_rngs(splits=model.num_layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> DFlashLayer:
            return DFlashLayer(model, rules, rngs=rngs, dtype=dtype)

        self.layers = stacked(rngs)

    def state_shapes(self, num_pages: int) -> jax.ShapeDtypeStruct:
        model = self.config.model
        heads = self.rules.held("kv_heads", model.num_kv_heads)
        shape = (model.num_layers, num_pages, self.page_size, 2, heads, model.head_dim)
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=self.rules.sharding(PAGE_AXES, shape))

    def propose(self, state: jax.Array, settled: Settled, batch: StepBatch, rows: SamplingRows, num_drafts: int,
                embedding: jax.Array, output_matrix: jax.Array) -> tuple[Drafts, jax.Array]:  # fmt: skip
        state = self.take_in(state, settled.features, batch)
        if num_drafts == 0:
            return Drafts(jnp.zeros((len(settled.last), 0), jnp.int32)), state
        hidden = self.fill(state, settled, batch, num_drafts + 1, embedding)  # [S, B, D]
        hidden = hidden[:, 1:].reshape(-1, hidden.shape[-1])  # a mask's state is of its own token, not of the next
        every = SamplingRows(*(jnp.repeat(x, num_drafts, axis=0) for x in rows))
        depth = jnp.tile(jnp.arange(num_drafts, dtype=jnp.int32), len(rows.slot))
        every = every._replace(output_index=every.output_index + depth)
        tokens, q = draw_drafts(self.sampling, self.rules, hidden, output_matrix, partial(logits_of, self.config.model),
                                every, jnp.zeros((), jnp.int32), None if self.known is None else self.known[...])
        q = None if q is None else q.reshape(-1, num_drafts, q.shape[-1])
        return Drafts(tokens.reshape(-1, num_drafts), probabilities=q), state

    def take_in(self, pages: jax.Array, features: Float[Array, "T F"], batch: StepBatch) -> jax.Array:
        """Writes the keys and values of every settled token; what lies behind them in a row lands where later tokens
        of the row will."""
        context = self.hidden_norm(project("tf,fd->td", features, self.fc))
        row, index, real = self._places(batch, len(features))
        layers, model = self.layers, self.config.model
        k = jnp.einsum("td,ldkh->ltkh", context, layers.k[...], preferred_element_type=jnp.float32)
        v = jnp.einsum("td,ldkh->ltkh", context, layers.v[...], preferred_element_type=jnp.float32)
        k, v = (x.astype(context.dtype) for x in (k, v))
        k = k if layers.k_bias is None else k + layers.k_bias[...][:, None]
        v = v if layers.v_bias is None else v + layers.v_bias[...][:, None]
        scale = layers.k_norm.scale[...].astype(jnp.float32)[:, None, None]
        k = (divided_by_rms(k.astype(jnp.float32), (-1,), model.norm_eps) * scale).astype(k.dtype)
        angles = rope_angles(self.rope, index)
        k = jax.vmap(lambda k: apply_rope(self.rope, k, angles))(k)
        of_tokens = (None, "tokens", "kv_heads", "head_dim")
        (pages,) = self.rules.map_over_shards(
            lambda *args: (write_pages(*args),), (pages, k, v, batch.page_table, row, index, real),
            (PAGE_AXES, of_tokens, of_tokens, ("rows", None), ("tokens",), ("tokens",), ("tokens",)),
            (PAGE_AXES,), (pages.shape,),
        )  # fmt: skip
        return pages

    def _places(self, batch: StepBatch, num_tokens: int):
        """Of every token: its row in its data group, its place in the row's cache, and whether it has any."""

        def find(kv_lens, cu_q_lens, distribution, tokens):
            token = jnp.arange(len(tokens), dtype=jnp.int32)
            row = jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all").astype(jnp.int32)
            real = row < distribution[2]
            row = jnp.minimum(row, len(kv_lens) - 1)
            return row, jnp.where(real, kv_lens[row] - cu_q_lens[row + 1] + token, 0), real

        return self.rules.map_over_shards(
            find, (batch.kv_lens, batch.cu_q_lens, batch.distribution, batch.tokens),
            (("rows",), ("groups",), ("groups",), ("tokens",)), (("tokens",),) * 3, ((num_tokens,),) * 3,
        )  # fmt: skip

    def fill(self, pages: jax.Array, settled: Settled, batch: StepBatch, size: int, embedding: jax.Array
             ) -> Float[Array, "S B D"]:  # fmt: skip
        """The normed states of a block that follows each row's settled tokens. It is nowhere written."""
        model, layers = self.config.model, self.layers
        lens = jnp.where(settled.samples, settled.lens, 0)  # who wants no drafts costs nothing
        rows = len(lens)
        positions = (lens[:, None] + jnp.arange(size, dtype=jnp.int32)).reshape(-1)
        angles = rope_angles(self.rope, positions)
        x = self._embed(settled.token, size, embedding)
        structure, params = nnx.split(layers)
        windows = jnp.asarray([layer.window or _EVERYTHING for layer in model.layers], jnp.int32)
        causal = jnp.asarray(self.config.causal)

        def body(x: jax.Array, inputs):
            number, window, is_causal, of_layer = inputs
            layer = nnx.merge(structure, of_layer)
            h = layer.attention_norm(x)
            q = apply_rope(self.rope, layer.q_norm(add(project("td,dnh->tnh", h, layer.q), layer.q_bias)), angles)
            k = apply_rope(self.rope, layer.k_norm(add(project("td,dnh->tnh", h, layer.k), layer.k_bias)), angles)
            v = add(project("td,dnh->tnh", h, layer.v), layer.v_bias)
            q, k, v = (part.reshape(rows, size, *part.shape[1:]) for part in (q, k, v))

            def attend(q, k, v, pages, number, window, is_causal, table, lens):
                return (attend_blocks(q, k, v, pages, number, table, lens, scale=model.attention_scale, window=window,
                                      causal=is_causal),)  # fmt: skip

            heads, kv_heads = ("rows", None, "heads", "head_dim"), ("rows", None, "kv_heads", "head_dim")
            (out,) = self.rules.map_over_shards(
                attend, (q, k, v, pages, number, window, is_causal, batch.page_table, lens),
                (heads, kv_heads, kv_heads, PAGE_AXES, (), (), (), ("rows", None), ("rows",)), (heads,), (q.shape,),
            )  # fmt: skip
            out = project_and_sum(self.rules, "tnh,nhd->td", out.reshape(-1, *q.shape[2:]), layer.o,
                                  ("heads", "head_dim"))
            x = x + add(out, layer.o_bias)
            return x + layer.mlp(layer.mlp_norm(x)), None

        numbers = jnp.arange(model.num_layers, dtype=jnp.int32)
        x, _ = lax.scan(body, x, (numbers, windows, causal, params))
        return self.norm(x).reshape(rows, size, -1)

    def _embed(self, token: Int[Array, " S"], size: int, embedding: jax.Array) -> Float[Array, "SB D"]:
        masks = jnp.full((len(token), size - 1), self.config.mask_token_id, jnp.int32)
        block = jnp.concatenate([token[:, None].astype(jnp.int32), masks], axis=1)
        x = embed_tokens(self.rules, embedding, block.reshape(-1)) * self.config.embedding_scale
        return x.astype(self.dtype)


_OUTSIDE = {("fc",): "fc.weight", ("hidden_norm", "scale"): "hidden_norm.weight", ("norm", "scale"): "norm.weight",
            ("known",): "t2d"}  # fmt: skip
# `speculators` adds copies of the target's matrices, which its training leaves alone, and the reverse of t2d.
FROZEN = ("embed_tokens.weight", "lm_head.weight", "d2t")


def dflash_sources(config: DFlashConfig, paths: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], ParamSource]:
    """Which tensors make each of the parameters."""
    found = {}
    for path in paths:
        if path in _OUTSIDE:
            found[path] = ParamSource(names=(_OUTSIDE[path],), stacked=False, transpose=path == ("fc",))
            continue
        _, *of_layer = path
        inside = of_layer[0] in ("mlp", "mlp_norm", "attention_norm")
        name = LLAMA[tuple(of_layer) if inside else ("attention", *of_layer)]
        found[path] = ParamSource(
            names=tuple(f"layers.{layer}.{name}" for layer in range(config.model.num_layers)), stacked=True,
            transpose=not path[-1].endswith(("bias", "scale")),
        )  # fmt: skip
    return found
