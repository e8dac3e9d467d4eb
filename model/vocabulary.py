"""A vocabulary in slices over devices: every device holds the same number of tokens' rows, logits and counts.

Everything here runs where a device sees only its slice (within `map_over_shards`). Rows of logits are never gathered:
what a row is reduced to is. On one device there is no collective.

Axis letters: T tokens, S rows, V vocab, v tokens of a slice, n slices, D model dim.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from sharding.rules import AxisRules


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    size: int  # V
    shards: int = 1  # n
    axis: str | tuple[str, ...] | None = None  # of the mesh; None: the vocabulary is whole

    @property
    def held(self) -> int:
        """v"""
        return self.size // self.shards

    @property
    def first(self) -> Int[Array, ""] | int:
        """This slice's first token."""
        return 0 if self.axis is None else lax.axis_index(self.axis) * self.held

    def sum(self, x: Array) -> Array:
        return x if self.axis is None else lax.psum(x, self.axis)

    def max(self, x: Array) -> Array:
        return x if self.axis is None else lax.pmax(x, self.axis)

    def gather(self, x: Int[Array, "..."]) -> Int[Array, "n ..."]:
        """What every device has, by slice."""
        return x[None] if self.axis is None else lax.all_gather(x, self.axis)

    def here(self, tokens: Int[Array, "..."]) -> tuple[Int[Array, "..."], Bool[Array, "..."]]:
        """Their places in this slice, and whether they are in it; a place is valid in any case."""
        local = tokens - self.first
        mine = (local >= 0) & (local < self.held)
        return jnp.where(mine, local, 0), mine

    def pick(self, x: Float[Array, "S v"], tokens: Int[Array, " S"]) -> Float[Array, " S"]:
        """Each row's number at one token: this device's part of it, for `sum`."""
        place, mine = self.here(tokens)
        return jnp.where(mine, jnp.take_along_axis(x, place[:, None], axis=-1)[:, 0], 0)

    def best(self, x: Float[Array, "S w"]) -> tuple[Float[Array, " S"], Int[Array, " S"]]:
        """Each row's maximum and the first token that has it; w: v and padding. One collective.

        Two plain reductions: several times faster on CPU than jnp.argmax.
        """
        width = x.shape[-1]
        most = x.max(-1)
        token = jnp.where(x == most[:, None], jnp.arange(width), width).min(-1) + self.first
        if self.axis is not None:
            found = self.gather(jnp.stack([_bits(most), token]))  # [n, 2, S]
            mosts = _floats(found[:, 0])
            most = mosts.max(0)
            token = jnp.where(mosts == most, found[:, 1], self.size).min(0)
        return most, jnp.minimum(token, self.size - 1)  # a row of NaN has no maximum

    def top_k(self, x: Float[Array, "S v"], k: int, counts: Int[Array, " S"]
              ) -> tuple[Float[Array, "S k"], Int[Array, "S k"], Int[Array, " S"]]:  # fmt: skip
        """The k largest of each row, of equals the lower tokens, and the sum of `counts`. One collective."""
        # XLA for GPUs (0.12) fails on the top k of what it has padded a product of few rows for: not of anything else.
        values, tokens = lax.top_k(jnp.where(jnp.isnan(x), -jnp.inf, x), min(k, self.held))
        if self.axis is None:
            return values, tokens.astype(jnp.int32), counts
        k_held = values.shape[1]
        found = self.gather(jnp.concatenate([_bits(values), tokens + self.first, counts[:, None]], axis=1))
        values, tokens = (jnp.moveaxis(part, 0, 1).reshape(len(x), -1)  # [S, n * k_held]: by slice, then by size
                          for part in (_floats(found[:, :, :k_held]), found[:, :, k_held : 2 * k_held]))  # fmt: skip
        values, where = lax.top_k(values, k)
        return values, jnp.take_along_axis(tokens, where, axis=1), found[:, :, -1].sum(0)


def vocabulary_of(rules: AxisRules, size: int) -> Vocabulary:
    (axis,) = rules.spec(("vocab",), (size,))
    return Vocabulary(size=size, shards=rules.shards("vocab", size), axis=axis)


def embed(matrix: Float[Array, "v D"], tokens: Int[Array, " T"], vocabulary: Vocabulary) -> Float[Array, "T D"]:
    """Rows of the slice that holds them. One collective; exact, as all but one of the summed parts are zero."""
    if vocabulary.axis is None:
        return matrix[tokens]
    place, mine = vocabulary.here(tokens)
    return vocabulary.sum(jnp.where(mine[:, None], matrix[place], 0))


def embed_tokens(rules: AxisRules, matrix: Float[Array, "V D"], tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Of a step's tokens, outside `map_over_shards`."""
    vocabulary = vocabulary_of(rules, matrix.shape[0])
    (x,) = rules.map_over_shards(
        lambda matrix, tokens: (embed(matrix, tokens, vocabulary),), (matrix, tokens),
        (("vocab", "embed"), ("tokens",)), (("tokens", "embed"),), ((len(tokens), matrix.shape[1]),),
    )  # fmt: skip
    return x


def _bits(x: Float[Array, "..."]) -> Int[Array, "..."]:
    return lax.bitcast_convert_type(x, jnp.int32)


def _floats(x: Int[Array, "..."]) -> Float[Array, "..."]:
    return lax.bitcast_convert_type(x, jnp.float32)
