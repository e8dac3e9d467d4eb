"""Latent attention on a TPU: pages stream through VMEM while the MXU attends all heads to them.

A walk through query blocks (one token of a decode row, or Q tokens of a longer row) and their KV blocks, which are
fetched page by page several blocks ahead, across the borders of rows. A decode row's new token is put into its tile of
the last KV block in VMEM, and that tile alone goes back to the page. Longer rows' tokens are written first, by
`write_tpu`, because several query blocks read them.

    HBM pages --DMA a page--> kv[slot] [W, C] --+-- q_latent [M, R], q_rope [M, 128] --> scores [M, w] --> weights
                                                 +-------------- first R lanes -----------------> out += weights . kv

Axis letters: as in `config`; D buffers, I query blocks, w tokens attended at once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.devices import DEVICES, Device, device_of_kind
from pallas_kernels.interpret import tpu_params
from pallas_kernels.latent_attention.config import LANES, SUBLANES, Problem, TPUBlocks, round_up
from pallas_kernels.latent_attention.layout import LatentLayout
from pallas_kernels.latent_attention.spec import LatentSpec
from pallas_kernels.latent_attention.worklist import QueryBlocks, chunk_blocks, decode_blocks, page_writes
from pallas_kernels.latent_attention.write_tpu import write_pages

_MASKED = -1e30  # the score of what may not be seen; finite, so that differences are never NaN
_LOWEST = -1e29  # no maximum is lower: exp2(MASKED - LOWEST) is 0, also where nothing is seen
_LOG2_E = 1.4426950408889634


def latent_attention(
    q_latent, q_rope, latent, rope, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution, *,
    scale, soft_cap=None, tree_mask=None, blocks: TPUBlocks | None = None, interpret: Any = False,
):  # fmt: skip
    """See `api.LatentAttentionFn`. kv_pages as `layout` says. interpret: True, or parameters of pltpu."""
    num_tokens, num_heads, latent_dim = q_latent.shape
    num_rows, page_size = kv_lens.shape[0], kv_pages.shape[2]
    heads = round_up(num_heads, SUBLANES)
    device = _device(interpret)
    problem = Problem(
        heads=heads, latent_dim=latent_dim, row_dim=kv_pages.shape[3], page_size=page_size,
        itemsize=q_latent.dtype.itemsize, kv_itemsize=kv_pages.dtype.itemsize,
    )  # fmt: skip
    blocks = problem.blocks(device) if blocks is None else blocks
    problem.check(blocks, device)
    rope_lanes = kv_pages.shape[3] - latent_dim
    q_latent = jnp.pad(q_latent, ((0, 0), (0, heads - num_heads), (0, 0)))
    q_rope = jnp.pad(q_rope, ((0, 0), (0, heads - num_heads), (0, rope_lanes - q_rope.shape[2])))
    new = jnp.concatenate([latent, rope], axis=-1).astype(kv_pages.dtype)
    new = jnp.pad(new, ((0, 0), (0, kv_pages.shape[3] - new.shape[1])))
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    table = page_table.reshape(-1)
    attend = functools.partial(_attend, pages_of_row=page_table.shape[1], scale=scale, soft_cap=soft_cap,
                               blocks=blocks, interpret=tpu_params() if interpret is True else interpret)  # fmt: skip

    items = decode_blocks(kv_lens, cu_q_lens, distribution, blocks.kv_tokens)
    tiles = jnp.repeat(new[:num_rows, None], SUBLANES, axis=1)  # [S, 16, C]
    out = jax.ShapeDtypeStruct(q_latent.shape, q_latent.dtype)
    out, kv_pages = attend(items, layer, table, q_latent, q_rope, tiles, kv_pages, out, query_tokens=1)
    if num_tokens > num_rows:
        writes = page_writes(num_tokens, page_size, page_table, kv_lens, cu_q_lens, distribution)
        kv_pages = write_pages(writes, layer, new, kv_pages, interpret=interpret)
        items = chunk_blocks(num_tokens, kv_lens, cu_q_lens, distribution, blocks.kv_tokens, blocks.query_tokens)
        seen = None if tree_mask is None else _bits(tree_mask)
        out, kv_pages = attend(items, layer, table, q_latent, q_rope, seen, kv_pages, out,
                               query_tokens=blocks.query_tokens,
                               tree_nodes=0 if tree_mask is None else 32 * tree_mask.shape[1])  # fmt: skip
    return out[:, :num_heads], kv_pages


def _device(interpret) -> Device:
    """What is compiled for."""
    if interpret:
        return DEVICES["v5e"]
    version = pltpu.get_tpu_info().chip_version.value  # "v6e", "7x"
    return device_of_kind(version if version.startswith("v") else f"v{version}")


def _bits(tree_mask: jax.Array) -> jax.Array:
    """[T, words] to float32 [T, 1, bits], bits a multiple of 128."""
    bits = (tree_mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    bits = bits.reshape(tree_mask.shape[0], 1, -1)
    return jnp.pad(bits, ((0, 0), (0, 0), (0, -bits.shape[-1] % LANES))).astype(jnp.float32)


def unsupported(spec: LatentSpec, device_kind: str | None) -> str | None:
    """What keeps this backend from serving `spec`, if anything."""
    dtypes = ("bfloat16", "float32")
    for name in ("dtype", "kv_dtype"):
        if jnp.dtype(getattr(spec, name)).name not in dtypes:
            return f"{name}={jnp.dtype(getattr(spec, name)).name} must be one of {', '.join(dtypes)}"
    if spec.latent_dim % LANES:
        return f"latent_dim={spec.latent_dim} must be a multiple of {LANES}"
    if spec.rope_dim > LANES:
        return f"rope_dim={spec.rope_dim} must be at most {LANES}"
    if spec.page_size % SUBLANES:
        return f"page_size={spec.page_size} must be a multiple of {SUBLANES}"
    if spec.num_heads > 256:
        return f"num_heads={spec.num_heads} must be at most 256"
    if device_kind is not None:
        try:
            device_of_kind(device_kind)
        except KeyError as error:
            return str(error.args[0])
    return None


def layout(**fields) -> LatentLayout:
    """The rotated key has lanes of its own, so that both parts of a row start at a register's first lane."""
    return LatentLayout(**fields, row_dim=fields["latent_dim"] + LANES)


def _attend(
    items: QueryBlocks, layer, table, q_latent, q_rope, extra, kv_pages, out, *,
    pages_of_row, scale, soft_cap, blocks: TPUBlocks, query_tokens, tree_nodes=0, interpret,
):  # fmt: skip
    """One launch. `extra`: decode: the new rows [S, 16, C]; else: trees as bits [T, 1, bits], or None. `out` is the array
    to write into, or its shape."""
    (_, heads, latent_dim), rope_lanes = q_latent.shape, q_rope.shape[2]
    page_size, row_dim = kv_pages.shape[2:]
    queries = query_tokens * heads
    depth = blocks.buffers
    decode = query_tokens == 1
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    aliased = [] if isinstance(out, jax.ShapeDtypeStruct) else [out]
    extras = [] if extra is None else [extra]
    scalars = [layer, table, *items]
    operands = [*scalars, q_latent, q_rope, *extras, *aliased, kv_pages]
    per_item = () if decode else (query_tokens,)
    extra_buffers = [] if extra is None else [pltpu.VMEM((depth, *per_item, *extra.shape[1:]), extra.dtype)]
    kernel = functools.partial(
        _kernel, has_extra=extra is not None, aliased=bool(aliased), decode=decode, pages_of_row=pages_of_row,
        scale=scale, soft_cap=soft_cap, compute_tokens=blocks.compute_tokens, tree_nodes=tree_nodes,
    )  # fmt: skip
    dtype = q_latent.dtype
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[anywhere] * (len(operands) - len(scalars)),
            out_specs=[anywhere, anywhere],
            scratch_shapes=[
                pltpu.VMEM((depth, blocks.kv_tokens, row_dim), kv_pages.dtype),
                pltpu.VMEM((depth, query_tokens, heads, latent_dim), dtype),
                pltpu.VMEM((depth, query_tokens, heads, rope_lanes), dtype),
                *extra_buffers,
                pltpu.VMEM((2, query_tokens, heads, latent_dim), dtype),  # results on their way out
                pltpu.VMEM((queries, latent_dim), jnp.float32),  # weighted values
                pltpu.VMEM((queries, LANES), jnp.float32),  # maximum, the same in all lanes
                pltpu.VMEM((queries, LANES), jnp.float32),  # sum of weights
                pltpu.SemaphoreType.DMA((depth,)),
                pltpu.SemaphoreType.DMA((depth,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((depth,)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(q_latent.shape, dtype), jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype)],
        input_output_aliases={len(operands) - 1: 1, **({len(operands) - 2: 0} if aliased else {})},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=100 * 1024 * 1024, disable_bounds_checks=True),
        interpret=interpret,
        name=f"latent_attention_{'decode' if decode else 'chunks'}",
    )(*operands)


def _kernel(
    # Scalars: layer [1], page table [S * M], query blocks.
    layer, table, row, start, tokens, position, kv_len, new, steps, count, total,
    *refs, has_extra, aliased, decode, pages_of_row, scale, soft_cap, compute_tokens, tree_nodes,
):  # fmt: skip
    # Inputs in HBM: q_latent [T, N, R], q_rope [T, N, 128], extra, (out), (pages [L, P, B, C], aliased).
    q_latent_hbm, q_rope_hbm, *rest = refs
    extra_hbm = rest.pop(0) if has_extra else None
    if aliased:
        rest.pop(0)
    _, out_hbm, pages, kv, q_latent, q_rope, *rest = rest
    extra = rest.pop(0) if has_extra else None
    out, acc, highest, weight_sum, kv_sem, q_sem, out_sem, write_sem = rest
    depth, kv_tokens, _ = kv.shape
    page_size = pages.shape[2]
    _, query_tokens, heads, latent_dim = q_latent.shape
    queries = query_tokens * heads
    block_pages = kv_tokens // page_size
    copy = pltpu.make_async_copy

    def seen_len(item):  # tokens of its row that the query block's last token sees
        return position[item] + tokens[item]

    def pages_in(item, block):
        return jnp.minimum(pl.cdiv(seen_len(item), page_size) - block * block_pages, block_pages)

    def page_copy(item, block, slot, i):
        page = table[row[item] * pages_of_row + block * block_pages + i]
        return copy(pages.at[layer[0], page], kv.at[slot, pl.ds(i * page_size, page_size)], kv_sem.at[slot])

    def token_copies(item, slot, i):
        token = start[item] + i
        yield copy(q_latent_hbm.at[token], q_latent.at[slot, i], q_sem.at[slot])
        yield copy(q_rope_hbm.at[token], q_rope.at[slot, i], q_sem.at[slot])
        if has_extra:
            yield copy(extra_hbm.at[token], extra.at[slot] if decode else extra.at[slot, i], q_sem.at[slot])

    def out_copy(item, i):
        slot = lax.rem(item, 2)
        return copy(out.at[slot, i], out_hbm.at[start[item] + i], out_sem.at[slot])

    def tile_of(item):
        """Where in its page the tile of a decode row's new token starts."""
        return pl.multiple_of(lax.rem(position[item], page_size) // SUBLANES * SUBLANES, SUBLANES)

    def tile_copy(item):
        page = table[row[item] * pages_of_row + position[item] // page_size]
        slot = lax.rem(item, depth)
        return copy(extra.at[slot], pages.at[layer[0], page, pl.ds(tile_of(item), SUBLANES)], write_sem.at[slot])

    def each_token(item, do):
        if decode:
            do(0)
        else:
            lax.fori_loop(0, tokens[item], lambda i, _: do(i), None)

    def fetch(step, item, block):
        """Starts the copies of one KV block, with the first of an item also those of its queries."""
        slot = lax.rem(step, depth)
        for i in range(block_pages):
            pl.when(i < pages_in(item, block))(lambda i=i: page_copy(item, block, slot, i).start())

        @pl.when(block == 0)
        def _():
            mine = lax.rem(item, depth)
            if decode:  # the buffer's former tile must have left
                pl.when(item >= depth)(lambda: tile_copy(item - depth).wait())
            each_token(item, lambda i: [c.start() for c in token_copies(item, mine, i)] and None)

    def advance(item, block):
        done = block + 1 >= steps[item]
        return item + done, jnp.where(done, 0, block + 1)

    def fetch_if_any(step, cursor):
        pl.when(step < total[0])(lambda: fetch(step, *cursor))
        following = advance(jnp.minimum(cursor[0], row.shape[0] - 1), cursor[1])
        return tuple(jnp.where(step < total[0], new, old) for new, old in zip(following, cursor, strict=True))

    def tree_seen(item, first, size):
        """1 where a token sees key i of a block in which the row's new tokens start at `first`: [Q, w]. Moving the bits
        to their place is a product with a shifted unit matrix."""
        bits = extra[lax.rem(item, depth)].reshape(query_tokens, -1)
        node = lax.broadcasted_iota(jnp.int32, (bits.shape[1], size), 0)
        key = lax.broadcasted_iota(jnp.int32, (bits.shape[1], size), 1)
        place = jnp.where(node == key - first, 1.0, 0.0)
        return jnp.dot(bits, place, preferred_element_type=jnp.float32)

    def attend(item, slot, block, i):
        """`w` tokens of a KV block."""
        size = compute_tokens
        keys = kv[slot, pl.ds(pl.multiple_of(i * size, size), size)]
        mine = lax.rem(item, depth)
        dtype = q_latent.dtype
        keys = keys.astype(dtype)
        precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
        dot = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
        rows_by_rows = (((1,), (1,)), ((), ()))
        scores = dot(q_latent[mine].reshape(queries, latent_dim), keys[:, :latent_dim], rows_by_rows)
        scores += dot(q_rope[mine].reshape(queries, -1), keys[:, latent_dim:], rows_by_rows)  # [M, w]
        if soft_cap is None:
            scores *= scale * _LOG2_E
        else:
            scores = jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * _LOG2_E)
        at = block * kv_tokens + i * size
        if decode:
            index = lax.broadcasted_iota(jnp.int32, (1, size), 1)
            visible = index < seen_len(item) - at
        else:
            shape = (query_tokens, heads, size)
            token = lax.broadcasted_iota(jnp.int32, shape, 0)
            index = lax.broadcasted_iota(jnp.int32, shape, 2) + at
            visible = index <= token + position[item]
            if has_extra:
                seen = tree_seen(item, kv_len[item] - new[item] - at, size)  # [Q, w]
                is_tree = (new[item] >= 2) & (new[item] <= tree_nodes)
                visible = jnp.where(is_tree & (index >= kv_len[item] - new[item]), seen[:, None] > 0.5, visible)
            visible = visible.reshape(queries, size)
        scores = jnp.where(visible, scores, _MASKED)

        before = highest[...]
        after = jnp.maximum(before, scores.max(axis=1, keepdims=True))
        weights = jnp.exp2(scores - after[:, :1])
        keep = jnp.exp2(before - after)
        highest[...] = after
        weight_sum[...] = weight_sum[...] * keep + weights.sum(axis=1, keepdims=True)
        added = dot(weights.astype(dtype), keys[:, :latent_dim], (((1,), (0,)), ((), ())))
        acc[...] = acc[...] * keep[:, :1] + added

    def finish_rows(item, slot, block):
        """Puts a decode row's new token into its tile, and zeros what is beyond the last query: it may be NaN."""
        length = seen_len(item) - block * kv_tokens
        at = pl.multiple_of((length - 1) // SUBLANES * SUBLANES, SUBLANES)
        tile = kv[slot, pl.ds(at, SUBLANES)]
        index = lax.broadcasted_iota(jnp.int32, tile.shape, 0) + at
        if decode:
            mine = lax.rem(item, depth)
            tile = jnp.where(index == length - 1, extra[mine], tile)
            extra[mine] = tile
            tile_copy(item).start()
        kv[slot, pl.ds(at, SUBLANES)] = jnp.where(index < length, tile, jnp.zeros_like(tile))

        def clear(i, _):
            at = pl.multiple_of(i * SUBLANES, SUBLANES)
            kv[slot, pl.ds(at, SUBLANES)] = jnp.zeros((SUBLANES, kv.shape[2]), kv.dtype)

        tiles = compute_tokens // SUBLANES
        first = pl.cdiv(length, SUBLANES)
        lax.fori_loop(first, pl.cdiv(first, tiles) * tiles, clear, None)

    def body(step, carry):
        ahead, (item, block) = carry
        ahead = fetch_if_any(step + depth - 1, ahead)
        slot = lax.rem(step, depth)
        here = pages_in(item, block)

        @pl.when(block == 0)
        def _():
            mine = lax.rem(item, depth)
            each_token(item, lambda i: [c.wait() for c in token_copies(item, mine, i)] and None)
            acc[...] = jnp.zeros_like(acc)
            highest[...] = jnp.full_like(highest, _LOWEST)
            weight_sum[...] = jnp.zeros_like(weight_sum)

        lax.fori_loop(0, here, lambda i, _: page_copy(item, block, slot, i).wait(), None)
        last = block + 1 == steps[item]
        length = jnp.minimum(seen_len(item) - block * kv_tokens, kv_tokens)
        pl.when(last)(lambda: finish_rows(item, slot, block))
        lax.fori_loop(
            0, pl.cdiv(length, compute_tokens), lambda i, _: attend(item, slot, block, i), None
        )

        @pl.when(last)
        def _():
            pl.when(item >= 2)(lambda: each_token(item - 2, lambda i: out_copy(item - 2, i).wait()))
            result = acc[...] / weight_sum[:, :1]
            out[lax.rem(item, 2)] = result.reshape(query_tokens, heads, latent_dim).astype(out.dtype)
            each_token(item, lambda i: out_copy(item, i).start())

        return ahead, advance(item, block)

    ahead = (jnp.int32(0), jnp.int32(0))
    for step in range(depth - 1):
        ahead = fetch_if_any(jnp.int32(step), ahead)
    lax.fori_loop(0, total[0], body, (ahead, (jnp.int32(0), jnp.int32(0))))

    def drain(i, most, wait):
        item = count[0] - 1 - i
        pl.when(item >= 0)(lambda: wait(item))

    for i in range(2):
        drain(i, 2, lambda item: each_token(item, lambda t: out_copy(item, t).wait()))
    if decode:
        for i in range(depth):
            drain(i, depth, lambda item: tile_copy(item).wait())
