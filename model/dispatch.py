"""How tokens meet their experts on a mesh. A way is a small value, chosen at build time, that a device calls with its
tokens and a function that applies the experts it holds.

`GatherTokens`: every device sees the tokens of all that share the experts, applies its own experts, and the parts are
summed, each device keeping its tokens. `ExchangeRows`: every device takes a part of its group's tokens, sends a row for
each choice to the device of the expert, gets it back, and the group shares its results.

Numbers that a device receives for T tokens of each of G groups, with experts over all n devices, of which t = n/G have
the same tokens, k experts a token and D numbers a row:

    GatherTokens    tokens (G-1) T D          sums scattered (G-1) T D    and summed over t: 2 (t-1)/t T D
    ExchangeRows    rows T/t k D (n-1)/n      the same again, back        and shared by t: (t-1)/t T D

All in the model's dtype. An exchange wins with many groups (G-1 above k/t) and with many tokens (GatherTokens sorts and
writes the rows of all groups on every device, T G k of them, ExchangeRows T k/t). GatherTokens wins with few tokens:
fewer collectives, and none waits for counts.

Axis letters: T tokens, D model dim, k experts of a token, P places (replicas of experts), M rows, A places that sizes
count.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sharding.exchange import Exchange, row_slices
from sharding.rules import MeshAxes


class Choices(NamedTuple):
    """Tokens and where each one goes; a place of P or above: nowhere (padding)."""

    x: Float[Array, "T D"]
    places: Int[Array, "T k"]
    weights: Float[Array, "T k"]

    def map(self, f: Callable[[jax.Array], jax.Array]) -> "Choices":
        return Choices(*map(f, self))


# (rows [M, D] sorted by place, rows of each place [A], the first of those that this device holds, dtype) -> [M, D] in
# that dtype, zeros in rows of other devices' places and of none
ApplyExperts: TypeAlias = Callable[[jax.Array, jax.Array, "jax.Array | int", jnp.dtype], jax.Array]
# (the tokens of a group, the mesh axes that groups are divided over, ...) -> [T, D], in the dtype of the tokens
Dispatch: TypeAlias = Callable[[Choices, MeshAxes, ApplyExperts], jax.Array]


@dataclass(frozen=True, kw_only=True)
class GatherTokens:
    """axes: the mesh axes that the places are divided over; held: places on a device."""

    axes: MeshAxes
    num_places: int
    held: int

    def __call__(self, tokens: Choices, token_axes: MeshAxes, apply: ApplyExperts) -> Float[Array, "T D"]:
        both = tuple(axis for axis in self.axes if axis in token_axes)
        only = tuple(axis for axis in self.axes if axis not in token_axes)
        everyone = tokens.map(lambda a: _gathered(a, both))
        order, sizes = _sorted(everyone.places, self.num_places)
        first = lax.axis_index(self.axes) * self.held if self.axes else 0
        rows = apply(everyone.x[order // everyone.places.shape[1]], sizes, first, jnp.dtype(jnp.float32))
        out = _weighted_sum(rows, everyone.weights, order).astype(tokens.x.dtype)  # no wider numbers travel
        if both:
            out = lax.psum_scatter(out, both, tiled=True)
        return lax.psum(out, only) if only else out

    def __str__(self) -> str:
        return "gathered"


@dataclass(frozen=True, kw_only=True)
class ExchangeRows:
    """See GatherTokens for axes and held."""

    axes: MeshAxes
    num_places: int
    held: int
    exchange: Exchange

    def __call__(self, tokens: Choices, token_axes: MeshAxes, apply: ApplyExperts) -> Float[Array, "T D"]:
        alike = tuple(axis for axis in self.axes if axis not in token_axes)  # devices along these have the same tokens
        num_tokens, parts = len(tokens.x), math.prod(lax.axis_size(axis) for axis in alike)
        mine = self._part(tokens, alike, parts)
        k = mine.places.shape[1]
        order, sizes = _sorted(mine.places, self.num_places)
        counts = lax.all_gather(sizes, self.axes)  # [n, P]
        there, back, of_places = row_slices(counts, lax.axis_index(self.axes))
        rows = mine.x[order // k]
        most = len(counts) * len(mine.x) * min(k, self.held)  # every token of every device
        buffer = jnp.zeros((most, rows.shape[1]), rows.dtype)
        arrived = self.exchange(rows, buffer, there, self.axes)
        done = apply(arrived, of_places, 0, rows.dtype)
        returned = self.exchange(done, jnp.zeros_like(rows), back, self.axes)
        out = _weighted_sum(returned, mine.weights, order).astype(rows.dtype)
        return _gathered(out, alike)[:num_tokens]

    def _part(self, tokens: Choices, alike: MeshAxes, parts: int) -> Choices:
        """The tokens that this device sends; the last device may have padding."""
        if not alike:
            return tokens
        each = -(-len(tokens.x) // parts)
        missing, at = each * parts - len(tokens.x), lax.axis_index(alike) * each
        nowhere = Choices(*(jnp.full((missing, a.shape[1]), fill, a.dtype)
                            for a, fill in zip(tokens, (0, self.num_places, 0), strict=True)))  # fmt: skip
        padded = Choices(*(jnp.concatenate(pair) for pair in zip(tokens, nowhere, strict=True)))
        return padded.map(lambda a: lax.dynamic_slice_in_dim(a, at, each))

    def __str__(self) -> str:
        return "exchanged"


@dataclass(frozen=True, kw_only=True)
class BySize:
    """Steps of at least `from_tokens` tokens of a group go another way than smaller ones."""

    small: Dispatch
    large: Dispatch
    from_tokens: int

    def __call__(self, tokens: Choices, token_axes: MeshAxes, apply: ApplyExperts) -> Float[Array, "T D"]:
        way = self.small if len(tokens.x) < self.from_tokens else self.large
        return way(tokens, token_axes, apply)

    def __str__(self) -> str:
        return f"{self.small} in steps of fewer than {self.from_tokens} tokens, else {self.large}"


@dataclass(frozen=True, kw_only=True)
class TwoMicroBatches:
    """Two halves of the tokens that do not depend on each other, so that one's rows may travel while the other's
    compute. Fewer than `from_tokens` tokens of a group stay together."""

    way: Dispatch
    from_tokens: int

    def __call__(self, tokens: Choices, token_axes: MeshAxes, apply: ApplyExperts) -> Float[Array, "T D"]:
        half = len(tokens.x) // 2
        if len(tokens.x) < max(2, self.from_tokens):
            return self.way(tokens, token_axes, apply)
        halves = tokens.map(lambda a: a[:half]), tokens.map(lambda a: a[half:])
        return jnp.concatenate([self.way(one, token_axes, apply) for one in halves])

    def __str__(self) -> str:
        return f"{self.way}, in two micro-batches from {self.from_tokens} tokens on"


@dataclass(frozen=True, kw_only=True)
class WeightedInputs:
    """What goes into an expert is multiplied by its weight, instead of what comes out (Llama 4): each choice of a token
    goes its way as a token of its own."""

    way: Dispatch

    def __call__(self, tokens: Choices, token_axes: MeshAxes, apply: ApplyExperts) -> Float[Array, "T D"]:
        x = (tokens.x[:, None] * tokens.weights[:, :, None]).astype(tokens.x.dtype)  # [T, k, D]
        places = tokens.places.reshape(-1, 1)
        alone = Choices(x.reshape(len(places), -1), places, jnp.ones(places.shape, tokens.weights.dtype))
        return self.way(alone, token_axes, apply).reshape(x.shape).sum(1)

    def __str__(self) -> str:
        return str(self.way)


def count(numbers: Int[Array, "*any"], size: int) -> Int[Array, " size"]:
    """How often 0 .. size - 1 occur. By comparing: a TPU adds to places of an array one after the other."""
    return (numbers.reshape(-1, 1) == jnp.arange(size)).sum(0, dtype=jnp.int32)


def _sorted(places: Int[Array, "T k"], num_places: int) -> tuple[Int[Array, " M"], Int[Array, " P"]]:
    """(rows in the order of their places, rows of each place); a row is a token's choice, token after token."""
    return jnp.argsort(places.reshape(-1), stable=True), count(places, num_places)


def _weighted_sum(rows: Float[Array, "M D"], weights: Float[Array, "T k"], order: Int[Array, " M"]
                  ) -> Float[Array, "T D"]:  # fmt: skip
    """Float32, of the rows of each token."""
    weighted = rows.astype(jnp.float32) * weights.reshape(-1)[order, None]
    return weighted[jnp.argsort(order)].reshape(*weights.shape, -1).sum(1)


def _gathered(a: jax.Array, axes: MeshAxes) -> jax.Array:
    return lax.all_gather(a, axes, tiled=True) if axes else a
