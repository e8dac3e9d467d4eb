"""One compute block: W tokens of some pages in VMEM against rows of queries of one kv head. No loops, no copies.

The three steps are apart so that callers can interleave them over heads: the products of one head run on the matrix
unit while the softmax of another is on the vector units.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ragged_paged_attention.mosaic_tpu.problem import LANES, LOG2E, MASKED, Problem, cdiv


class Softmax(NamedTuple):
    """A softmax so far, of some rows."""

    maximum: Any  # [rows, 128] f32, all lanes equal
    total: Any  # [rows, 128] f32, to be summed over lanes: adding lanes in every block would cost more
    output: Any  # [rows, R] f32


@dataclass(frozen=True)
class Block:
    """refs.values [slots, pages, X, K, B, R], refs.scales [slots, pages, 2, K, B], refs.bias [slots, pages, K, B]."""

    refs: Any
    problem: Problem
    slot: Any
    first_page: Any
    pages: int

    def _gather(self, ref, *index, axis: int):
        parts = [ref[(self.slot, self.first_page + p, *index)] for p in range(self.pages)]
        return parts[0] if self.pages == 1 else jnp.concatenate(parts, axis)

    def _matrix(self, plane: int, head):
        return self._gather(self.refs.values, plane, head, axis=0).astype(self.problem.compute_dtype)  # [W, R]

    def _per_key(self, ref, *index):
        """[1, W]"""
        *outer, head = index
        parts = [ref[(self.slot, self.first_page + p, *outer, pl.ds(head, 1))] for p in range(self.pages)]
        return parts[0] if self.pages == 1 else jnp.concatenate(parts, axis=1)

    def scores(self, q, head):
        """q [rows, R] -> [rows, W] f32, as powers of two."""
        problem = self.problem
        s = lax.dot_general(
            q, self._matrix(0, head), (((1,), (1,)), ((), ())), precision=problem.precision,
            preferred_element_type=jnp.float32,
        )
        if problem.quantized:
            s = s * self._per_key(self.refs.scales, 0, head)
        if problem.soft_cap is not None:
            s = jnp.tanh(s) * (problem.soft_cap * LOG2E)
        return s

    def weights(self, s, old: Softmax, head, visible=None, biased=None):
        """The running maximum and total, what the old output is multiplied with, and the weights of the keys.

        visible, biased: lane tile -> bool [rows, 128]; None: all.
        """
        problem = self.problem
        tiles = [s[:, j : j + LANES] for j in range(0, s.shape[1], LANES)]
        if problem.biased:
            bias = self._per_key(self.refs.bias, head) * LOG2E
            for j, tile in enumerate(tiles):
                added = bias[:, j * LANES : (j + 1) * LANES]
                tiles[j] = tile + (added if biased is None else jnp.where(biased(j), added, 0.0))
        seen = []
        if visible is not None:
            seen = [visible(j) for j in range(len(tiles))]
            tiles = [jnp.where(mask, tile, MASKED) for mask, tile in zip(seen, tiles, strict=True)]
        highest = _fold(jnp.maximum, tiles)
        maximum = jnp.maximum(old.maximum, jnp.max(highest, axis=1, keepdims=True))
        rescale = jnp.exp2(old.maximum - maximum)
        tiles = [jnp.exp2(tile - maximum) for tile in tiles]
        total = old.total * rescale + _fold(jnp.add, tiles)
        if problem.quantized:
            scales = self._per_key(self.refs.scales, 1, head)
            for j, tile in enumerate(tiles):
                scaled = tile * scales[:, j * LANES : (j + 1) * LANES]
                # Scales beyond the row's length may be NaN.
                tiles[j] = scaled if visible is None else jnp.where(seen[j], scaled, 0.0)
        weights = jnp.concatenate([tile.astype(problem.compute_dtype) for tile in tiles], axis=1)
        return maximum, total, rescale, weights

    def output(self, old, rescale, weights, head):
        """[rows, R]: the old output rescaled, and the weighted values."""
        new = lax.dot_general(
            weights, self._matrix(self.problem.planes - 1, head), (((1,), (0,)), ((), ())),
            precision=self.problem.precision, preferred_element_type=jnp.float32,
        )
        return old * jnp.concatenate([rescale] * (old.shape[1] // LANES), axis=1) + new


class Ranges:
    """Which pages of a fetched block are computed how: whole compute blocks without a mask, the edges in smaller
    blocks with one.

    In tokens of the fetched block: something is visible from `first` to `end`, everything from `start` to `whole`.
    """

    def __init__(self, blocks, first, start, whole, end):
        self._blocks = blocks
        ratio = blocks.compute_pages // blocks.edge_pages
        self._edges = cdiv(end, blocks.edge_tokens)
        self._start = jnp.minimum(cdiv(start, blocks.compute_tokens), cdiv(end, blocks.compute_tokens))
        self._end = jnp.maximum(jnp.minimum(whole, end) // blocks.compute_tokens, self._start)
        self._low = first // blocks.edge_tokens
        self._low_end = jnp.clip(self._start * ratio, self._low, self._edges)
        self._high = jnp.maximum(self._end * ratio, self._low_end)

    def loop(self, step, carry=None, times: tuple[int, int] = (1, 1)):
        """carry = step(first page, i, carry, pages, masked) for i in range(times) of each block; times: of whole
        blocks and of those at an edge."""
        blocks, low, high = self._blocks, self._low_end - self._low, self._high

        def run(count, page_of, pages, masked, carry):
            turns = times[masked]

            def body(n, carry):
                return step(page_of(n // turns), n % turns, carry, pages, masked)

            return lax.fori_loop(0, count * turns, body, carry)

        whole, edge = blocks.compute_pages, blocks.edge_pages
        carry = run(self._end - self._start, lambda n: (self._start + n) * whole, whole, False, carry)
        return run(low + jnp.maximum(self._edges - high, 0),
                   lambda n: jnp.where(n < low, self._low + n, high + n - low) * edge, edge, True, carry)  # fmt: skip


def _fold(f, parts):
    """Pairwise, so that the chain is short."""
    while len(parts) > 1:
        parts = [f(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def finish(softmax: Softmax, dtype):
    total = jnp.maximum(jnp.sum(softmax.total, axis=1, keepdims=True), 1e-30)
    return (softmax.output / total).astype(dtype)


def lane_index(shape):
    return lax.broadcasted_iota(jnp.int32, shape, 1)


def row_index(shape):
    return lax.broadcasted_iota(jnp.int32, shape, 0)
