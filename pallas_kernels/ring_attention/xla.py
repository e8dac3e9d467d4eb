"""Ring attention in plain XLA: `ppermute` around a local attention, partial softmaxes merged. CPU, GPU, anywhere.

The next device's blocks are asked for before the resident ones are attended, so that the collective runs beside the
compute where the compiler can (GPU: collective-permute-start and -done around the loop). The local attention is an argument:
`attend_blocks` here follows the plan's items, so its cost follows the unmasked work; a flash kernel of the same
signature takes its place.

Axis letters: T tokens, N query heads, K kv heads, G = N / K, H head dim; D devices; J tiles of Q tokens,
R blocks of a round of W tokens.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ring_attention import pages
from pallas_kernels.ring_attention.plan import Items, RingPlan

_MASKED = -1e30  # the score of what may not be seen; finite, so that differences are never NaN
_LOWEST = -1e29  # no maximum is lower: exp(_MASKED - _LOWEST) is 0, also where nothing is seen


class Partial(NamedTuple):
    """A softmax over some of the keys, not yet divided: float32 [J, K, Q G] and, the output, [J, K, Q G, H]."""

    maximum: jax.Array
    total: jax.Array
    output: jax.Array


class LocalAttention(Protocol):
    """Adds the resident blocks to `acc`, for the items (fields [J]) 0 .. count - 1.

    queries[J, K, Q G, H] are scaled. query_positions[J, Q G]. blocks[R, 2, K, W, H] (or [R, 1, K, W, 2 H]: K and V are
    then the same array). key_positions[R, W]: NOWHERE in slots that hold nothing, whose bytes may be NaN.
    """

    def __call__(
        self, acc: Partial, queries: jax.Array, query_positions: jax.Array, blocks: jax.Array, key_positions: jax.Array,
        items: Items, count: jax.Array, *, window: int | None, soft_cap: float | None,
    ) -> Partial: ...  # fmt: skip


def ring_attention(
    q, k, v, kv_pages, layer, plan: RingPlan, *, scale, soft_cap=None, sinks=None, local: LocalAttention | None = None,
):  # fmt: skip
    """See `api.ring_attention`."""
    local = local or attend_blocks
    num_kv_heads, width = kv_pages.shape[3], kv_pages.shape[5]
    written = pages.pages_to_write(k, v, kv_pages, layer, plan)
    kv_pages = kv_pages.at[layer, plan.write_page].set(written)
    queries = pages.query_tiles(q, kv_pages, scale, plan)
    group = q.shape[1] // num_kv_heads
    query_positions = pages.rows_of_tile(plan.tile_position, group)
    rounds, devices = plan.count.shape
    size = plan.block_page.shape[0] // rounds
    me = lax.axis_index(plan.axis_name)
    to_the_right = [(device, (device + 1) % devices) for device in range(devices)]

    def one_round(number, acc: Partial) -> Partial:
        own = lax.dynamic_slice_in_dim(plan.block_page, number * size, size)
        blocks = _gather(kv_pages, layer, own).astype(q.dtype)
        for step in range(devices):  # unrolled: a loop would hide from the compiler that two steps may overlap
            coming = lax.ppermute(blocks, plan.axis_name, to_the_right) if step < devices - 1 else None
            source = (me - step) % devices
            places = lax.dynamic_slice(plan.block_position, (source, number * size, 0), (1, size, plan.config.kv_tokens))
            items = Items(*(field[number, step] for field in plan.items))
            acc = local(acc, queries, query_positions, blocks, places[0], items, plan.count[number, step],
                        window=plan.window, soft_cap=soft_cap)  # fmt: skip
            if coming is not None:
                blocks = coming
        return acc

    acc = nothing(queries.shape[:3], width)
    if sinks is not None:  # a key that was seen first, with a value of zeros
        sink = pages.sink_rows(sinks, num_kv_heads, plan.config.query_tokens)
        acc = acc._replace(maximum=jnp.broadcast_to(sink, acc.maximum.shape), total=jnp.ones_like(acc.total))
    acc = lax.fori_loop(0, plan.num_rounds, one_round, acc)
    out = (acc.output / jnp.maximum(acc.total, 1e-30)[..., None]).astype(q.dtype)
    return pages.from_tiles(out, q.shape, pages.is_packed(kv_pages, q.shape[2]), plan), kv_pages


def nothing(shape: tuple[int, ...], head_dim: int) -> Partial:
    return Partial(jnp.full(shape, _LOWEST), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))


def _gather(kv_pages, layer, block_page) -> jax.Array:
    """This device's blocks [R, W / B] of pages as [R, 2, K, W, H]."""
    blocks = kv_pages[layer, block_page]  # [R, W / B, 2, K, B, H]
    blocks = blocks.transpose(0, 2, 3, 1, 4, 5)
    return blocks.reshape(*blocks.shape[:3], -1, blocks.shape[5])


def merge(old: Partial, new: Partial) -> Partial:
    """Two partial softmaxes of the same queries over different keys."""
    maximum = jnp.maximum(old.maximum, new.maximum)
    keep, add = jnp.exp(old.maximum - maximum), jnp.exp(new.maximum - maximum)
    output = old.output * keep[..., None] + new.output * add[..., None]
    return Partial(maximum, old.total * keep + new.total * add, output)


def attend(queries, keys, values, visible, present, soft_cap) -> Partial:
    """queries [..., M, H] against keys, values [..., W, H]; visible [..., M, W], present [..., W]: slots with a token."""
    scores = jnp.einsum("...mh,...wh->...mw", queries, keys, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible, scores, _MASKED)
    maximum = jnp.maximum(scores.max(-1), _LOWEST)
    weights = jnp.exp(scores - maximum[..., None])
    # Zeroed where no token is: 0 * NaN left there by an earlier owner would be NaN.
    values = jnp.where(present[..., None], values, 0)
    output = jnp.einsum("...mw,...wh->...mh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return Partial(maximum, weights.sum(-1), output)


def see(query_positions, key_positions, window) -> jax.Array:
    """[..., M] and [..., W] true positions to [..., M, W]."""
    query, key = query_positions[..., :, None], key_positions[..., None, :]
    return (key <= query) if window is None else (key <= query) & (key > query - window)


def attend_blocks(acc, queries, query_positions, blocks, key_positions, items, count, *, window, soft_cap):
    """The local attention in XLA: one tile against one block at a time, only those that the items name."""

    def one_item(item, acc: Partial) -> Partial:
        tile = items.tile[item]
        query, places = queries[tile], query_positions[tile]

        def one_block(block, part: Partial) -> Partial:
            kv, held = blocks[block], key_positions[block]
            visible = see(places, held, window)[None]
            present = (held != jnp.iinfo(held.dtype).max)[None]
            return merge(part, attend(query, kv[0], kv[-1], visible, present, soft_cap))

        part = lax.fori_loop(items.first[item], items.end[item], one_block, Partial(*(a[tile] for a in acc)))
        return Partial(*(a.at[tile].set(b) for a, b in zip(acc, part, strict=True)))

    return lax.fori_loop(0, count, one_item, acc)
