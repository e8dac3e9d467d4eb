"""EAGLE as the step has it: takes in what was settled, then guesses a chain or a tree.

Whatever a step settles passes the network with the target's features, so the cache of what is settled never holds the
drafter's own. Guesses are fed with those, and lie where nobody looks after the step (see `model.speculative.common`).

Axis letters: T tokens, S rows, K drafts of a row, D model dim, V vocab, n tokens of a level.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.batch import StepBatch
from model.build import Kernels
from model.sampling import SamplingRows
from model.speculative.common import SparePages, draft_chain, guess_batch, settled_batch, take_rows
from model.speculative.drafter import Drafts, Settled
from model.speculative.eagle import EagleNetwork
from model.speculative.growth import Best, Level, grow_dynamic, grow_static, num_fed
from model.speculative.trees import DynamicTree, StaticTree, ancestors, depth_first, rerank, words
from model.vocabulary import embed_tokens

Tree = StaticTree | DynamicTree


def num_guesses(tree: Tree | None, max_drafts: int) -> int:
    """Of a row, that are fed in a step and need a place."""
    return max_drafts - 1 if tree is None else num_fed(tree)


class EagleDrafter(nnx.Module):
    """See `model.speculative.drafter.DeviceDrafter`. State: KV pages of one layer. Tokens are chosen, not drawn."""

    probabilistic = False

    def __init__(self, network: EagleNetwork, kernels: Kernels, spares: SparePages, *, max_drafts: int,
                 tree: Tree | None = None):  # fmt: skip
        """spares: for `num_guesses`. tree: None: a chain."""
        self.network, self.kernels, self.spares, self.max_drafts, self.tree = network, kernels, spares, max_drafts, tree
        self.taps = network.taps
        if isinstance(tree, DynamicTree) and tree.num_candidates < max_drafts:
            raise ValueError(f"a tree of {tree.top_k} children a token on {tree.depth} levels has "
                             f"{tree.num_candidates} tokens to choose from, fewer than {max_drafts} drafts")
        assert spares.guesses >= num_guesses(tree, max_drafts)

    def state_shapes(self, num_pages: int) -> jax.ShapeDtypeStruct:
        return self.kernels.kv_pages(self.network.rules, self.spares.with_spares(num_pages))

    def propose(self, state: jax.Array, settled: Settled, batch: StepBatch, rows: SamplingRows, num_drafts: int,
                embedding: jax.Array, output_matrix: jax.Array) -> tuple[Drafts, jax.Array]:  # fmt: skip
        run = _Run(self, settled, batch, embedding, output_matrix, state)
        last = run.take_in()
        if num_drafts == 0:
            drafts = Drafts(jnp.zeros((len(settled.last), 0), jnp.int32))
        elif self.tree is None:
            drafts = Drafts(run.chain(last, num_drafts))
        else:
            drafts = run.grow(last, self.tree, num_drafts)
        return drafts, run.pages


class _Run:
    """One call of `propose`. pages: the newest."""

    def __init__(self, drafter: EagleDrafter, settled: Settled, batch: StepBatch, embedding: jax.Array,
                 output_matrix: jax.Array, pages: jax.Array):  # fmt: skip
        self.network, self.rules, self.groups = drafter.network, drafter.network.rules, drafter.spares.groups
        self.settled, self.batch, self.output_matrix, self.pages = settled, batch, output_matrix, pages
        own = self.network.embedding
        self.embedding = embedding if own is None else own[...]
        self.table = drafter.spares.table(batch, pages.shape[1])
        self._levels: list[Level] = []

    def take_in(self) -> Float[Array, "S D"]:
        """Passes the settled tokens. Returns what comes out at each row's last one."""
        step = settled_batch(self.settled, self.batch, self.table, self.groups)
        feature, embedded = self.network.fuse(self.settled.features), self._embed(step.tokens)
        out, self.pages = self.network(feature, embedded, self.pages, step)
        return take_rows(self.rules, out, self.settled.last)

    def chain(self, last: Float[Array, "S D"], num_drafts: int) -> Int[Array, "S K"]:
        def feed(carry: tuple[jax.Array, jax.Array], token: Int[Array, " S"], index: jax.Array):
            hidden, pages = carry
            step = guess_batch(self.settled, self.batch, self.table, self.groups, token[:, None], first=index)
            hidden, pages = self.network(hidden, self._embed(token), pages, step)
            return (hidden, pages), self._best(hidden, 1)[1][:, 0], None

        first = self._best(last, 1)[1]
        (_, self.pages), tokens, _ = draft_chain(feed, (last, self.pages), first[:, 0], num_drafts - 1)
        return jnp.concatenate([first, tokens], axis=1)

    def grow(self, last: Float[Array, "S D"], tree: Tree, num_drafts: int) -> Drafts:
        most = tree.top_k if isinstance(tree, DynamicTree) else tree.most_children
        values, tokens = self._best(last, most)
        root = Best(values[:, None], tokens[:, None], last[:, None])
        if isinstance(tree, DynamicTree):
            depth = min(tree.depth, num_drafts)
            found = rerank(grow_dynamic(tree, depth, root, self._feed(most)), num_drafts)
        else:
            assert num_drafts == len(tree.paths), "a static tree is drafted whole"
            depth, found = tree.depth, grow_static(tree, root, self._feed(most))
        found = depth_first(found, depth)
        return Drafts(found.tokens, found.parents)

    def _feed(self, most: int):
        """Feeds a level with all those before it, whose keys are computed again: a token must not see its siblings,
        and what a token does not see can only be another of the same step."""

        def feed(level: Level) -> Best:
            self._levels.append(level)
            tokens, hidden, parents = (jnp.concatenate(parts, 1) for parts in zip(*self._levels, strict=True))
            (rows, num), depth = tokens.shape, len(self._levels)
            depths = jnp.repeat(jnp.arange(depth), jnp.asarray([x.tokens.shape[1] for x in self._levels]),
                                total_repeat_length=num)  # fmt: skip
            mask = words(ancestors(parents, depth)) if num > 1 else None
            step = guess_batch(self.settled, self.batch, self.table, self.groups, tokens, depths=depths, tree_mask=mask)
            flat = hidden.reshape(rows * num, -1)
            out, self.pages = self.network(flat, self._embed(step.tokens), self.pages, step)
            new = level.tokens.shape[1]
            out = out.reshape(rows, num, -1)[:, -new:]
            values, best = self._best(out.reshape(rows * new, -1), most)
            return Best(values.reshape(rows, new, -1), best.reshape(rows, new, -1), out)

        return feed

    def _best(self, hidden: Float[Array, "S D"], k: int) -> tuple[jax.Array, jax.Array]:
        return self.network.best(hidden, self.output_matrix, k)

    def _embed(self, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        return embed_tokens(self.rules, self.embedding, tokens)
