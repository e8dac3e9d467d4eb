"""Ring attention in plain XLA: `ppermute` around a local attention, partial softmaxes merged. CPU, GPU, anywhere.

The next device's blocks are asked for before the resident ones are attended, so that the collective runs beside the
compute where the compiler can (GPU: collective-permute-start and -done around the loop). The local attention is an
argument: `attend_blocks` here follows the plan's items, so its cost follows the unmasked work; a flash kernel of the
same signature takes its place.

Axis letters: T tokens, N query heads, K kv heads, G = N / K, H head dim, R numbers of K in a stored row; D devices;
J tiles of Q tokens, U rounds of C blocks of W tokens.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ring_attention import pages
from pallas_kernels.ring_attention.plan import NOWHERE, Items, RingPlan
from quant.kv import QuantizedPages

_MASKED = -1e30  # the score of what may not be seen; finite, so that differences are never NaN
_LOWEST = -1e29  # no maximum is lower: exp(_MASKED - _LOWEST) is 0, also where nothing is seen


class Partial(NamedTuple):
    """A softmax over some of the keys, not yet divided: float32 [J, K, Q G] and, the output, [J, K, Q G, H]."""

    maximum: jax.Array
    total: jax.Array
    output: jax.Array


class LocalAttention(Protocol):
    """Adds the resident blocks to `acc`, for the items (fields [J]) 0 .. count - 1.

    queries[J, K, Q G, R] are scaled. query_positions[J, Q G]. blocks[C, 2, K, W, R] (or [C, 1, K, W, 2 R]: K and V are
    then the same array); scales[C, 2, K, W] where they are quantized. key_positions[C, W]: NOWHERE in slots that hold
    nothing, whose bytes may be NaN.
    """

    def __call__(
        self, acc: Partial, queries: jax.Array, query_positions: jax.Array, blocks: jax.Array,
        scales: jax.Array | None, key_positions: jax.Array, items: Items, count: jax.Array, *,
        window: int | None, soft_cap: float | None,
    ) -> Partial: ...  # fmt: skip


def ring_attention(
    q, k, v, kv_pages: pages.KVPages, layer, plan: RingPlan, *, scale, soft_cap=None, sinks=None,
    local: LocalAttention | None = None,
):  # fmt: skip
    """See `api.RingFn`."""
    acc, kv_pages = _attended(q, k, v, kv_pages, layer, plan, scale, soft_cap, local or attend_blocks)
    return output_of(acc, q, kv_pages, plan, sinks), kv_pages


def shared_attention(
    q, k, v, kv_pages: pages.KVPages, layer, plan: RingPlan, *, scale, soft_cap=None, sinks=None,
    local: LocalAttention | None = None,
):  # fmt: skip
    """`api.RingFn` where q, k and v are the same on all devices, for a plan of `shared_plan`: each device attends to
    its own KV, then the partial softmaxes merge."""
    acc, kv_pages = _attended(q, k, v, kv_pages, layer, plan, scale, soft_cap, local or attend_blocks)
    return output_of(merge_over(plan.axis_name, acc), q, kv_pages, plan, sinks), kv_pages


def _attended(q, k, v, kv_pages, layer, plan: RingPlan, scale, soft_cap, local: LocalAttention):
    """(Partial of the tiles over all blocks of the plan, kv_pages with the new tokens)."""
    how = pages.stored(kv_pages, q.shape[2])
    page, offset = plan.writes.slot
    # Token by token: to write whole pages, merged with what they hold, XLA would copy the cache that it also reads.
    kv_pages = jax.tree.map(
        lambda pool, new: pool.at[layer, page, :, :, offset].set(new, mode="promise_in_bounds"),
        kv_pages, pages.new_rows(k, v, kv_pages),
    )  # fmt: skip
    queries = pages.query_tiles(q, kv_pages, scale, plan)
    query_positions = pages.rows_of_tile(plan.tile_position, q.shape[1] // how.num_kv_heads)
    rounds, devices = plan.count.shape
    size = plan.block_page.shape[0] // rounds
    me = lax.axis_index(plan.axis_name)
    to_the_right = [(device, (device + 1) % devices) for device in range(devices)]

    def one_round(number, acc: Partial) -> Partial:
        own = lax.dynamic_slice_in_dim(plan.block_page, number * size, size)
        resident = jax.tree.map(lambda pool: _gather(pool, layer, own), kv_pages)
        for step in range(devices):  # unrolled: a loop would hide from the compiler that two steps may overlap
            last = step == devices - 1
            coming = resident if last else lax.ppermute(resident, plan.axis_name, to_the_right)
            blocks, scales = resident if isinstance(resident, QuantizedPages) else (resident, None)
            start = ((me - step) % devices, number * size, 0)
            places = lax.dynamic_slice(plan.block_position, start, (1, size, plan.config.kv_tokens))[0]
            items = Items(*(field[number, step] for field in plan.items))
            acc = local(acc, queries, query_positions, blocks, scales, places, items, plan.count[number, step],
                        window=plan.window, soft_cap=soft_cap)  # fmt: skip
            resident = coming
        return acc

    acc = nothing(queries.shape[:3], how.width)
    return lax.fori_loop(0, plan.num_rounds, one_round, acc), kv_pages


def output_of(acc: Partial, q, kv_pages, plan: RingPlan, sinks) -> jax.Array:
    how = pages.stored(kv_pages, q.shape[2])
    sink = None if sinks is None else pages.sink_rows(sinks, how.num_kv_heads, plan.config.query_tokens)
    return pages.from_tiles(divided(acc, sink).astype(q.dtype), q.shape, how, plan)


def nothing(shape: tuple[int, ...], head_dim: int) -> Partial:
    return Partial(jnp.full(shape, _LOWEST), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))


def _gather(pool, layer, block_page) -> jax.Array:
    """Blocks [C, W / B] of pages of [L, P, 2, K, B, ...] as [C, 2, K, W, ...]."""
    blocks = jnp.moveaxis(pool[layer, block_page], 1, 3)  # [C, 2, K, W / B, B, ...]
    return blocks.reshape(*blocks.shape[:3], -1, *blocks.shape[5:])


def merge(old: Partial, new: Partial) -> Partial:
    """Two partial softmaxes of the same queries over different keys."""
    maximum = jnp.maximum(old.maximum, new.maximum)
    keep, add = jnp.exp(old.maximum - maximum), jnp.exp(new.maximum - maximum)
    output = old.output * keep[..., None] + new.output * add[..., None]
    return Partial(maximum, old.total * keep + new.total * add, output)


def merge_over(axis_name: str, acc: Partial) -> Partial:
    """The devices' partial softmaxes of the same queries."""
    maximum = lax.pmax(acc.maximum, axis_name)
    weight = jnp.exp(acc.maximum - maximum)
    total, output = lax.psum((acc.total * weight, acc.output * weight[..., None]), axis_name)
    return Partial(maximum, total, output)


def divided(acc: Partial, sink: jax.Array | None) -> jax.Array:
    """The output. sink: one more logit, of a key with a value of zeros; broadcast to acc.maximum."""
    total, output = acc.total, acc.output
    if sink is not None:
        highest = jnp.maximum(acc.maximum, sink)
        keep = jnp.exp(acc.maximum - highest)
        total, output = total * keep + jnp.exp(sink - highest), output * keep[..., None]
    return output / jnp.maximum(total, 1e-30)[..., None]


def attend(queries, kv, scales, visible, present, soft_cap) -> Partial:
    """queries [..., K, M, R] against kv [2, ..., K, W, R] (or [1, ...]) with scales [2, ..., K, W] or None.

    visible [..., 1, M, W]; present [..., 1, W]: slots with a token.
    """
    # Zeroed where no token is: 0 * NaN left there by an earlier owner would be NaN.
    values = jnp.where(present[..., None], kv[-1], 0).astype(queries.dtype)
    scores = jnp.einsum("...mh,...wh->...mw", queries, kv[0].astype(queries.dtype), preferred_element_type=jnp.float32)
    if scales is not None:
        scores = scores * scales[0][..., None, :]
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible, scores, _MASKED)
    maximum = jnp.maximum(scores.max(-1), _LOWEST)
    weights = jnp.exp(scores - maximum[..., None])
    total = weights.sum(-1)
    if scales is not None:
        weights = weights * jnp.where(present, scales[1], 0)[..., None, :]
    output = jnp.einsum("...mw,...wh->...mh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return Partial(maximum, total, output)


def see(query_positions, key_positions, window) -> jax.Array:
    """[..., M] and [..., W] true positions to [..., M, W]."""
    query, key = query_positions[..., :, None], key_positions[..., None, :]
    return (key <= query) if window is None else (key <= query) & (key > query - window)


def attend_blocks(
    acc, queries, query_positions, blocks, scales, key_positions, items, count, *, window, soft_cap
) -> Partial:
    """The local attention in XLA: one tile against one block at a time, only those that the items name."""

    def one_item(item, acc: Partial) -> Partial:
        tile = items.tile[item]
        query, places = queries[tile], query_positions[tile]

        def one_block(block, part: Partial) -> Partial:
            held = key_positions[block]
            visible, present = see(places, held, window)[None], (held != NOWHERE)[None]
            scale = None if scales is None else scales[block]
            return merge(part, attend(query, blocks[block], scale, visible, present, soft_cap))

        part = lax.fori_loop(items.first[item], items.end[item], one_block, Partial(*(a[tile] for a in acc)))
        return Partial(*(a.at[tile].set(b) for a, b in zip(acc, part, strict=True)))

    return lax.fori_loop(0, count, one_item, acc)
