"""Medusa: heads on the target's last hidden state, each guessing one more token ahead.

The target's own head gives token t + 1 from the state at t; head k gives token t + 2 + k, from
h = h + SiLU(W h + b), once or several times, and an output matrix. Cai et al., arXiv 2401.10774.

Axis letters: T tokens, S rows, K drafts a row, D model dim, V vocab, v tokens of a device's slice of it, h heads,
l blocks of a head.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from checkpoints.tensors import ParamSource
from model.batch import StepBatch
from model.config import ModelConfig
from model.layers import param
from model.sampling import SamplingRows
from model.speculative.drafter import Drafts, Settled
from model.speculative.trees import Path, StaticTree
from model.vocabulary import vocabulary_of
from sharding.rules import Axes, AxisRules

OutputMatrix = Literal["own", "shared", "target"]


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    num_heads: int
    num_blocks: int  # of a head
    has_bias: bool
    output: OutputMatrix  # of each head; one for all heads; the target's

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_blocks"):
            if not 1 <= getattr(self, name) <= 64:
                raise ValueError(f"Medusa heads: {name}={getattr(self, name)} must be in 1 to 64")


def read_medusa_config(hf: Mapping[str, Any], target: ModelConfig, names: Collection[str]) -> MedusaConfig:
    """hf: a `config.json` as FasterDecoding or vLLM write it. names: of the checkpoint's tensors, which say what there
    is: published configs speak of fewer heads, or are copies of the target's. Raises ValueError."""
    for name, size in (("vocab_size", target.vocab_size), ("hidden_size", target.hidden_size)):
        if hf.get(name, size) != size:
            raise ValueError(f"the Medusa heads have {name}={hf[name]}, the target has {size}; use heads of this model")
    if hf.get("truncated_vocab_size") not in (None, target.vocab_size):
        raise ValueError(f"truncated_vocab_size={hf['truncated_vocab_size']} of the Medusa heads is not supported: "
                         f"they must cover the target's {target.vocab_size} tokens")
    stored = _Names.of(names)
    heads = next(n for n in itertools.count() if stored.block.format(n, 0) + ".weight" not in names)
    blocks = next(n for n in itertools.count() if stored.block.format(0, n) + ".weight" not in names)
    if heads == 0:
        raise ValueError(f"there are no Medusa heads: no tensor {stored.block.format(0, 0)}.weight")
    # Of what the config speaks and the file has not, loading will say that it is missing.
    heads = max(heads, int(hf.get("medusa_num_heads", hf.get("num_heads")) or 0))
    own = sum(stored.output.format(head, blocks) in names for head in range(heads))
    return MedusaConfig(
        num_heads=heads, num_blocks=blocks, has_bias=stored.block.format(0, 0) + ".bias" in names,
        output="own" if own > 1 else "shared" if stored.shared.format(0, blocks) in names else "target",
    )  # fmt: skip


class Medusa(nnx.Module):
    """See `model.speculative.drafter.DeviceDrafter`. It keeps nothing from step to step."""

    taps: tuple[int, ...] = ()
    probabilistic = False

    def __init__(self, config: MedusaConfig, target: ModelConfig, rules: AxisRules, *,
                 tree: Sequence[Path] | None = None, rngs: nnx.Rngs, dtype: jnp.dtype):  # fmt: skip
        """rules: the target's. tree: paths of ranks, one rank a head; None: a chain of every head's best token. Raises
        ValueError."""
        chain = [(0,) * depth for depth in range(1, config.num_heads + 1)]
        paths = StaticTree.of(chain if tree is None else tree).paths
        _check(paths, config.num_heads, target.vocab_size)
        h, l, D, V = config.num_heads, config.num_blocks, target.hidden_size, target.vocab_size  # noqa: E741
        self.config, self.rules, self.vocab_size = config, rules, V
        self.paths, self.is_tree, self.max_drafts = paths, tree is not None, len(paths)
        def make(shape: tuple[int, ...], axes: Axes) -> nnx.Param:
            return param(shape, axes, rngs=rngs, dtype=dtype)

        self.blocks = make((h, l, D, D), (None, None, "embed", "embed"))
        self.bias = make((h, l, D), (None, None, "embed")) if config.has_bias else None
        output = {"own": ((h, V, D), (None, "vocab", "embed")), "shared": ((V, D), ("vocab", "embed")), "target": None}
        self.outputs = None if (of_heads := output[config.output]) is None else make(*of_heads)

    def state_shapes(self, num_pages: int) -> tuple[()]:
        return ()

    def states(self, hidden: Float[Array, "S D"], num_heads: int | None = None) -> Float[Array, "h S D"]:
        """What each head, or the first of them, multiplies with its output matrix."""
        h, dtype = num_heads or self.config.num_heads, hidden.dtype
        blocks = self.blocks[...][:h]
        bias = None if self.bias is None else self.bias[...][:h]
        x = jnp.broadcast_to(hidden, (h, *hidden.shape))
        for block in range(self.config.num_blocks):
            wide = jnp.einsum("hsd,hde->hse", x, blocks[:, block], preferred_element_type=jnp.float32)
            wide = wide if bias is None else wide + bias[:, block, None].astype(jnp.float32)
            x = x + jax.nn.silu(wide).astype(dtype)
        return x

    def logits(self, hidden: Float[Array, "S D"], output_matrix: Float[Array, "V D"]) -> Float[Array, "h S V"]:
        """Float32. output_matrix: the target's."""
        return _project(self.states(hidden), self._matrix(output_matrix))

    def propose(self, state: tuple[()], settled: Settled, batch: StepBatch, rows: SamplingRows, num_drafts: int,
                embedding: jax.Array, output_matrix: jax.Array) -> tuple[Drafts, tuple[()]]:  # fmt: skip
        if num_drafts == 0:
            return Drafts(jnp.zeros((len(settled.last), 0), jnp.int32)), state
        chosen = _nodes(self.paths[:num_drafts])
        heads, most = max(chosen.heads) + 1, max(chosen.ranks) + 1
        vocabulary = vocabulary_of(self.rules, self.vocab_size)
        matrix = self._matrix(output_matrix)

        def guess(features: Float[Array, "T D"], last: Int[Array, " S"], matrix: jax.Array) -> tuple[jax.Array]:
            """On each device: its group's rows, its part of the vocabulary."""
            x = self.states(features[last], heads)
            logits = _project(x, matrix if matrix.ndim == 2 else matrix[:heads])
            flat = logits.reshape(-1, logits.shape[-1])  # [h S, v]
            if most == 1:
                best = vocabulary.best(flat)[1][:, None]
            else:
                _, best, _ = vocabulary.top_k(flat, most, jnp.zeros(len(flat), jnp.int32))
            best = best.reshape(heads, len(last), most)
            return (best[jnp.asarray(chosen.heads), :, jnp.asarray(chosen.ranks)].T,)

        per_matrix = ("vocab", "embed") if matrix.ndim == 2 else (None, "vocab", "embed")
        shape = (*settled.last.shape, num_drafts)
        (tokens,) = self.rules.map_over_shards(
            guess, (settled.features, settled.last, matrix), (("tokens", "embed"), ("rows",), per_matrix),
            (("rows", None),), (shape,),
        )  # fmt: skip
        parents = None
        if self.is_tree:
            parents = jnp.broadcast_to(jnp.asarray(chosen.parents, jnp.int32), shape)
        return Drafts(tokens.astype(jnp.int32), parents), state

    def _matrix(self, of_target: jax.Array) -> jax.Array:
        return of_target if self.outputs is None else self.outputs[...]


class _Nodes(NamedTuple):
    parents: tuple[int, ...]  # -1: the last known token
    heads: tuple[int, ...]
    ranks: tuple[int, ...]


def _nodes(paths: Sequence[Path]) -> _Nodes:
    """Of a tree, in the order in which they are fed: a token's first branch follows it at once, so that the likeliest
    path is a prefix of the row and its K/V stays where it is."""
    order = sorted(paths)
    place = {path: index for index, path in enumerate(order)} | {(): -1}
    parents, heads = (place[path[:-1]] for path in order), (len(path) - 1 for path in order)
    return _Nodes(tuple(parents), tuple(heads), tuple(path[-1] for path in order))


def _check(paths: Sequence[Path], num_heads: int, vocab_size: int) -> None:
    for path in paths:
        if len(path) > num_heads:
            raise ValueError(f"path {list(path)} of the tree needs {len(path)} Medusa heads, there are {num_heads}")
        if path[-1] >= vocab_size:
            raise ValueError(f"path {list(path)} of the tree: rank {path[-1]} is not in a vocabulary "
                             f"of {vocab_size}")  # fmt: skip


def _project(x: Float[Array, "h S D"], matrix: jax.Array) -> Float[Array, "h S v"]:
    """The target's scale and soft cap are left out: they change no order."""
    equation = "hsd,vd->hsv" if matrix.ndim == 2 else "hsd,hvd->hsv"
    return jnp.einsum(equation, x, matrix, preferred_element_type=jnp.float32)


class _Names(NamedTuple):
    """Of a head's number and a block's. output: a head's matrix, where each has one; shared: where all have one."""

    block: str
    output: str
    shared: str

    @staticmethod
    def of(names: Collection[str]) -> "_Names":
        """As FasterDecoding wrote them (with or without "medusa_head." before each) or as vLLM wants them ("blocks."
        and "lm_heads."). There a head's matrix comes after its blocks and has the next number."""
        if any(".layers." in name for name in names):
            prefix = "medusa_heads." if any(name.startswith("medusa_heads.") for name in names) else ""
            output, shared = prefix + "lm_heads.{}.weight", prefix + "lm_head.weight"
            return _Names(prefix + "blocks.{}.layers.{}", output, shared if shared in names else output)
        prefix = "medusa_head." if any(name.startswith("medusa_head.") for name in names) else ""
        return _Names(prefix + "{}.{}.linear", prefix + "{}.{}.weight", prefix + "{}.{}.weight")


def medusa_sources(config: MedusaConfig, names: Collection[str]) -> dict[tuple[str, ...], ParamSource]:
    """Which tensors make the parameters. names: of the checkpoint."""
    h, l, stored = range(config.num_heads), range(config.num_blocks), _Names.of(names)  # noqa: E741

    def of_blocks(kind: str, transpose: bool) -> ParamSource:
        return ParamSource(names=tuple(stored.block.format(i, j) + kind for i in h for j in l), stacked=True,
                           experts=config.num_blocks, transpose=transpose)  # fmt: skip

    found = {("blocks",): of_blocks(".weight", transpose=True)}
    if config.has_bias:
        found[("bias",)] = of_blocks(".bias", transpose=False)
    if config.output == "own":
        output = tuple(stored.output.format(i, config.num_blocks) for i in h)
        found[("outputs",)] = ParamSource(names=output, stacked=True)
    elif config.output == "shared":
        found[("outputs",)] = ParamSource(names=(stored.shared.format(0, config.num_blocks),), stacked=False)
    return found
