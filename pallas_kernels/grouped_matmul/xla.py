"""Grouped matmul in plain XLA: for CPUs, and wherever no kernel exists.

Axis letters: M rows, D contracted, F columns, E experts.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.tiles import GroupTiles
from quant.experts import QuantizedExperts, dequantize_experts


def tile_rows(num_rows: int, num_experts: int) -> int:
    """About what an expert has, from 8 to 64. Measured on 2 CPU cores: less reads weights again, more multiplies rows
    that are not its own."""
    average = num_rows // max(1, min(num_experts, num_rows))
    return min(64, max(8, 1 << (average.bit_length() - 1 if average else 0)))


def grouped_matmul(lhs: jax.Array, rhs, tiles: GroupTiles, *, out_dtype) -> jax.Array:
    """One visit after the other, with a dynamic trip count: the cost follows the rows, never rows x experts.

    The way for a CPU. jax.lax.ragged_dot multiplies every row with every expert there: 2 to 17 times slower.
    tiles: any alignment. Quantized weights are widened one expert at a time.
    """
    size, num_rows = tiles.tile_rows, lhs.shape[0]
    columns = rhs.shape[2]
    padded = jnp.pad(lhs, ((0, size), (0, 0)))

    def visit(index, out):
        row, weights = tiles.row[index], expert_weights(rhs, tiles.expert[index], lhs.dtype)
        product = jnp.dot(lax.dynamic_slice_in_dim(padded, row, size), weights, preferred_element_type=jnp.float32)
        rows = row + jnp.arange(size)[:, None]
        mine = (rows >= tiles.start[index]) & (rows < tiles.end[index]) & (tiles.weights[index] > 0)
        old = lax.dynamic_slice_in_dim(out, row, size)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(mine, product.astype(out_dtype), old), row, 0)

    return lax.fori_loop(0, tiles.count, visit, jnp.zeros((num_rows + size, columns), out_dtype))[:num_rows]


def expert_weights(rhs, expert: jax.Array, dtype) -> jax.Array:
    """[D, F] of one expert; quantized ones in float32, where the scales are exact."""
    one = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, expert, 1), rhs)
    return dequantize_experts(one)[0] if isinstance(one, QuantizedExperts) else one[0].astype(dtype)


def ragged_dot(lhs: jax.Array, rhs, group_sizes: jax.Array, *, out_dtype, group_offset: jax.Array | int = 0
               ) -> jax.Array:  # fmt: skip
    """The compiler's own, for a GPU or TPU without a kernel here. Quantized weights are widened in HBM, all of them.

    Weights of an expert without rows must be finite: where the compiler has no grouped product, they meet zeros.
    """
    num_experts = rhs.shape[0]
    weights = dequantize_experts(rhs, lhs.dtype) if isinstance(rhs, QuantizedExperts) else rhs
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    sizes = lax.dynamic_slice_in_dim(group_sizes.astype(jnp.int32), group_offset, num_experts)
    high = lax.dynamic_slice_in_dim(ends, group_offset + num_experts - 1, 1)[0]
    low = high - sizes.sum()
    # Its groups start at row 0, and what it leaves in rows of no group is not promised.
    out = lax.ragged_dot(jnp.roll(lhs, -low, 0), weights, sizes, preferred_element_type=jnp.float32)
    rows = jnp.arange(lhs.shape[0])[:, None]
    return jnp.where((rows >= low) & (rows < high), jnp.roll(out, low, 0), 0).astype(out_dtype)
