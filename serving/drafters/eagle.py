"""EAGLE-1, 2 and 3: a head for the target, from its folder."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from flax import nnx

from checkpoints.tensors import TensorSource
from model.build import Kernels
from model.config import ModelConfig
from model.speculative.eagle import Eagle1, Eagle3, EagleNetwork
from model.speculative.eagle_checkpoint import (
    FROZEN,
    Eagle3Config,
    check_vocabulary,
    eagle1_sources,
    eagle3_sources,
    read_eagle1,
    read_eagle3,
)
from model.speculative.eagle_drafter import EagleDrafter, Tree, num_guesses
from model.speculative.trees import DynamicTree, StaticTree
from model.transformer import param_axes
from pallas_kernels.ragged_paged_attention.api import Backend
from serving.decoding.speculation.config import FLAG, SpeculativeConfig
from serving.drafters.loading import Surroundings, load_weights, open_drafter
from serving.errors import ConfigError

DEPTH = 6  # levels of a dynamic tree, as in EAGLE-2's paper


def load_eagle(config: SpeculativeConfig, around: Surroundings) -> EagleDrafter:
    """Raises ConfigError."""
    with open_drafter(config) as (checkpoint, source):
        load = _load_eagle1 if config.method == "eagle" else _load_eagle3
        network, kernels, num_tokens = load(checkpoint.config, source, around)
        _check_width(tree_of(config), num_tokens)
        return drafter_of(network, kernels, config, around)


def drafter_of(network: EagleNetwork, kernels: Kernels, config: SpeculativeConfig, around: Surroundings
               ) -> EagleDrafter:  # fmt: skip
    tree = tree_of(config)
    if tree is not None and network.config.layers[0].window:
        raise ConfigError(f"{FLAG}: the head's attention has a window, which counts a tree's tokens in the order of "
                          "the cache; a chain does: leave out speculative_token_tree and eagle_topk")  # fmt: skip
    spares = around.spare_pages(num_guesses(tree, config.most))
    return EagleDrafter(network, kernels, spares, max_drafts=config.most, tree=tree)


def tree_of(config: SpeculativeConfig) -> Tree | None:
    if (paths := config.speculative_token_tree) is not None:
        is_chain = all(path == (0,) * depth for depth, path in enumerate(paths, 1))  # as vLLM writes one
        return None if is_chain else StaticTree.of(paths)
    if config.eagle_topk == 1:
        return None
    return DynamicTree(top_k=config.eagle_topk, depth=config.eagle_num_steps or min(DEPTH, config.most))


def _check_width(tree: Tree | None, num_tokens: int) -> None:
    width = 1 if tree is None else tree.top_k if isinstance(tree, DynamicTree) else tree.most_children
    if width > num_tokens:
        raise ConfigError(f"{FLAG}: a tree with {width} children of a token is wider than the head's vocabulary of "
                          f"{num_tokens}")  # fmt: skip


Loaded = tuple[EagleNetwork, Kernels, int]  # and the tokens that it knows


def _load_eagle1(hf: Mapping[str, Any], source: TensorSource, around: Surroundings) -> Loaded:
    target = around.target.config
    model = read_eagle1(hf, target, around.max_model_len)
    rules, kernels, attend = _kernels(model, around)
    names = source.names()
    has_bias = "fc.bias" in names or "fusion_fc.bias" in names
    network = nnx.eval_shape(lambda: Eagle1(model, target, rules, attend, has_bias=has_bias, rngs=nnx.Rngs(0),
                                            dtype=around.dtype))  # fmt: skip
    sources = eagle1_sources(param_axes(network), names)
    network = load_weights(network, rules, source, sources, ignore=FROZEN, progress=around.progress)
    return network, kernels, model.vocab_size


def _load_eagle3(hf: Mapping[str, Any], source: TensorSource, around: Surroundings) -> Loaded:
    config, names = read_eagle3(hf, around.target.config, around.max_model_len), source.names()
    check_vocabulary(source, config)
    has_embedding = "embed_tokens.weight" in names
    if not has_embedding and config.model.hidden_size != config.target_hidden:
        raise ValueError(f"the head has hidden_size={config.model.hidden_size} and no embed_tokens.weight, and the "
                         f"target's embeddings have {config.target_hidden} numbers")  # fmt: skip
    network, kernels = make_eagle3(config, around, has_offsets="d2t" in names, has_embedding=has_embedding)
    sources = eagle3_sources(param_axes(network), names, len(config.taps))
    network = load_weights(network, network.rules, source, sources, ignore=("t2d",), progress=around.progress)
    return network, kernels, config.draft_vocab


def make_eagle3(config: Eagle3Config, around: Surroundings, *, has_offsets: bool, has_embedding: bool) -> Any:
    """(the network with shapes instead of arrays, its kernels)"""
    rules, kernels, attend = _kernels(config.model, around)
    make = partial(
        Eagle3, config.model, rules, attend, taps=config.taps, target_hidden=config.target_hidden,
        draft_vocab=config.draft_vocab, has_offsets=has_offsets, has_embedding=has_embedding,
        norms=config.norms, dtype=around.dtype,
    )  # fmt: skip
    return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))), kernels


def _kernels(model: ModelConfig, around: Surroundings):
    """(rules, kernels, attention) for the head's own numbers of heads."""
    rules, kernels = around.rules_and_kernels(model)
    assert isinstance(kernels.attention, Backend), "no context axis: `serving.drafters.make` has seen to it"
    return rules, kernels, kernels.attention.attend
