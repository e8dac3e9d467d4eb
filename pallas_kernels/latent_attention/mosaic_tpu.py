"""Latent attention on a TPU: pages stream through VMEM while the MXU attends all heads to them.

A walk through query blocks (one token of a decode row, or Q tokens of a longer row) and their KV blocks, which are
fetched page by page several blocks ahead, across the borders of rows. A decode row's new token is put into its tile of
the last KV block in VMEM, and that tile alone goes back to the page. Longer rows' tokens are written first, by
`write_tpu`, because several query blocks read them.

    HBM pages --DMA a page--> kv[slot] [W / 2, 2R + 128] --+-- q_latent [M, R], q_rope [2M, 128] --> scores [M, w]
                                                           |                                            |
                                                           +--> out [M, R] += weights . latents <-- weights [M, w]

A row of a page holds two tokens: their latents, then their rotated keys in one register's 128 lanes. Scores and weights
of the even tokens come first, then those of the odd ones. For the rotated keys the queries are there twice, once with
zeros where the odd token's key lies and once where the even one's does.

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
from pallas_kernels.latent_attention.config import LANES, SMALL, SUBLANES, Problem, TPUBlocks, round_up
from pallas_kernels.latent_attention.layout import LatentLayout, pair_rows
from pallas_kernels.latent_attention.spec import LatentSpec
from pallas_kernels.latent_attention.worklist import QueryBlocks, chunk_blocks, decode_blocks, page_writes
from pallas_kernels.latent_attention.write_tpu import token_in_row, write_pages

_MASKED = -1e30  # the score of what may not be seen; finite, so that differences are never NaN
_LOWEST = -1e29  # no maximum is lower: exp2(MASKED - LOWEST) is 0, also where nothing is seen
_LOG2_E = 1.4426950408889634


def latent_attention(
    q_latent, q_rope, latent, rope, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution, *,
    scale, soft_cap=None, tree_mask=None, blocks: TPUBlocks | None = None, interpret: Any = False,
):  # fmt: skip
    """See `api.LatentAttentionFn`. kv_pages as `layout` says. interpret: True, or parameters of pltpu."""
    num_tokens, num_heads, latent_dim = q_latent.shape
    num_rows, page_size = kv_lens.shape[0], 2 * kv_pages.shape[2]
    heads = round_up(num_heads, SUBLANES)
    device = _device(interpret)
    problem = Problem(
        heads=heads, latent_dim=latent_dim, rope_dim=rope.shape[1], page_size=page_size,
        itemsize=q_latent.dtype.itemsize, kv_itemsize=kv_pages.dtype.itemsize,
    )  # fmt: skip
    blocks = problem.blocks(device) if blocks is None else blocks
    problem.check(blocks, device)
    q_latent, q_rope = (jnp.pad(q, ((0, 0), (0, heads - num_heads), (0, 0))) for q in (q_latent, q_rope))
    q_rope = jnp.concatenate([q_rope, q_rope], axis=-1)
    new = jnp.concatenate([latent, rope], axis=-1).astype(kv_pages.dtype)
    interpret = tpu_params() if interpret is True else interpret
    # Layers and pages as one axis, and the table's entries in it: less scalar work for each page.
    shape = kv_pages.shape
    kv_pages = kv_pages.reshape(-1, *shape[2:])
    page_table = page_table + layer * shape[1]
    table = page_table.reshape(-1)
    attend = functools.partial(_attend, pages_of_row=page_table.shape[1], scale=scale, soft_cap=soft_cap,
                               blocks=blocks, vmem_bytes=device.vmem_bytes, interpret=interpret)  # fmt: skip

    items = decode_blocks(kv_lens, cu_q_lens, distribution, blocks.kv_tokens)
    pairs = pair_rows(jnp.repeat(new[:num_rows, None], 2, axis=1), latent_dim)  # [S, 1, C], the token in both places
    tiles = jnp.repeat(pairs, SUBLANES, axis=1)
    out = jax.ShapeDtypeStruct(q_latent.shape, q_latent.dtype)
    out, kv_pages = attend(items, table, q_latent, q_rope, tiles, kv_pages, out, query_tokens=1)
    if num_tokens > num_rows:
        writes = page_writes(num_tokens, page_size, page_table, kv_lens, cu_q_lens, distribution)
        kv_pages = write_pages(writes, new, kv_pages, latent_dim=latent_dim, interpret=interpret)
        items = chunk_blocks(num_tokens, kv_lens, cu_q_lens, distribution, blocks.kv_tokens, blocks.query_tokens)
        seen = None if tree_mask is None else _bits(tree_mask)
        out, kv_pages = attend(items, table, q_latent, q_rope, seen, kv_pages, out,
                               query_tokens=blocks.query_tokens,
                               tree_nodes=0 if tree_mask is None else 32 * tree_mask.shape[1])  # fmt: skip
    return out[:, :num_heads], kv_pages.reshape(shape)


def _device(interpret) -> Device:
    """What is compiled for."""
    if interpret:
        return DEVICES["v5e"]
    version = str(pltpu.get_tpu_info().chip_version)  # "v6e", "7x"
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
    if 2 * spec.rope_dim != LANES:
        return f"rope_dim={spec.rope_dim} must be {LANES // 2}"
    if spec.page_size % (2 * SUBLANES):
        return f"page_size={spec.page_size} must be a multiple of {2 * SUBLANES}, a tile of rows of two tokens"
    if spec.num_heads > 256:
        return f"num_heads={spec.num_heads} must be at most 256"
    if device_kind is not None:
        try:
            device_of_kind(device_kind)
        except KeyError as error:
            return str(error.args[0])
    return None


def layout(**fields) -> LatentLayout:
    return LatentLayout(**fields, pairs=True)


def _attend(
    items: QueryBlocks, table, q_latent, q_rope, extra, kv_pages, out, *,
    pages_of_row, scale, soft_cap, blocks: TPUBlocks, vmem_bytes, query_tokens, tree_nodes=0, interpret,
):  # fmt: skip
    """One launch. `extra`: decode: rows of the new tokens [S, 16, C]; else: trees as bits [T, 1, bits], or None. `out`
    is the array to write into, or its shape."""
    _, heads, latent_dim = q_latent.shape
    queries = query_tokens * heads
    depth = blocks.buffers
    decode = query_tokens == 1
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    aliased = [] if isinstance(out, jax.ShapeDtypeStruct) else [out]
    extras = [] if extra is None else [extra]
    scalars = [table, *items]
    operands = [*scalars, q_latent, q_rope, *extras, *aliased, kv_pages]
    per_item = () if decode else (query_tokens,)
    extra_buffers = [] if extra is None else [pltpu.VMEM((depth, *per_item, *extra.shape[1:]), extra.dtype)]
    kernel = functools.partial(
        _kernel, has_extra=extra is not None, aliased=bool(aliased), decode=decode, pages_of_row=pages_of_row,
        scale=scale, soft_cap=soft_cap, compute_tokens=blocks.decode_tokens if decode else blocks.chunk_tokens,
        tree_nodes=tree_nodes,
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
                pltpu.VMEM((depth, blocks.kv_tokens // 2, kv_pages.shape[2]), kv_pages.dtype),
                pltpu.VMEM((depth, query_tokens, heads, latent_dim), dtype),
                pltpu.VMEM((depth, query_tokens, heads, LANES), dtype),
                *extra_buffers,
                pltpu.VMEM((2, query_tokens, heads, latent_dim), dtype),  # results on their way out
                pltpu.VMEM((2 * queries, LANES), dtype),  # q_rope for even and for odd tokens
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
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_bytes, disable_bounds_checks=True),
        interpret=interpret,
        name=f"latent_attention_{'decode' if decode else 'chunks'}",
    )(*operands)


def _kernel(
    # Scalars: page table [S * M], query blocks.
    table, row, start, tokens, position, kv_len, new, steps, count, total,
    *refs, has_extra, aliased, decode, pages_of_row, scale, soft_cap, compute_tokens, tree_nodes,
):  # fmt: skip
    # Inputs in HBM: q_latent [T, N, R], q_rope [T, N, 128], extra, (out), (pages [L * P, B / 2, C], aliased).
    q_latent_hbm, q_rope_hbm, *rest = refs
    extra_hbm: Any = rest.pop(0) if has_extra else None
    if aliased:
        rest.pop(0)
    _, out_hbm, pages, kv, q_latent, q_rope, *rest = rest
    extra: Any = rest.pop(0) if has_extra else None
    out, q_even_odd, acc, highest, weight_sum, kv_sem, q_sem, out_sem, write_sem = rest
    depth, kv_rows, row_dim = kv.shape
    kv_tokens = 2 * kv_rows
    page_rows = pages.shape[1]
    page_size = 2 * page_rows
    _, query_tokens, heads, latent_dim = q_latent.shape
    queries = query_tokens * heads
    block_pages = kv_tokens // page_size
    dtype = q_latent.dtype
    copy = pltpu.make_async_copy
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    dot = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def seen_len(item):  # tokens of its row that the query block's last token sees
        return position[item] + tokens[item]

    def pages_in(item, block):
        return jnp.minimum(pl.cdiv(seen_len(item), page_size) - block * block_pages, block_pages)

    def page_copies(item, block, slot):
        first = row[item] * pages_of_row + block * block_pages
        mine, sem = kv.at[slot], kv_sem.at[slot]

        def page_copy(i):
            rows = pl.ds(pl.multiple_of(i * page_rows, SUBLANES), page_rows)
            return copy(pages.at[table[first + i]], mine.at[rows], sem)

        return page_copy

    def token_copies(item, i):
        token, slot = start[item] + i, lax.rem(item, depth)
        yield copy(q_latent_hbm.at[token], q_latent.at[slot, i], q_sem.at[slot])
        yield copy(q_rope_hbm.at[token], q_rope.at[slot, i], q_sem.at[slot])
        if has_extra:
            yield copy(extra_hbm.at[token], extra.at[slot] if decode else extra.at[slot, i], q_sem.at[slot])

    def out_copy(item, i):
        slot = lax.rem(item, 2)
        return copy(out.at[slot, i], out_hbm.at[start[item] + i], out_sem.at[slot])

    def tile_copy(item):
        """A decode row's tile with its new token."""
        page = table[row[item] * pages_of_row + position[item] // page_size]
        at = pl.multiple_of(lax.rem(position[item], page_size) // 2 // SUBLANES * SUBLANES, SUBLANES)
        slot = lax.rem(item, depth)
        return copy(extra.at[slot], pages.at[page, pl.ds(at, SUBLANES)], write_sem.at[slot])

    def for_each(count, do):
        """In fours, whose scalar work overlaps."""
        fours = count // 4
        lax.fori_loop(0, fours, lambda i, _: [do(4 * i + j) for j in range(4)] and None, None)
        lax.fori_loop(4 * fours, count, lambda i, _: do(i), None)

    def each_token(item, do):
        if decode:
            do(0)
        else:
            lax.fori_loop(0, tokens[item], lambda i, _: do(i), None)

    def fetch(step, item, block):
        """Starts the copies of one KV block, with the first of an item also those of its queries."""
        slot = lax.rem(step, depth)
        page_copy = page_copies(item, block, slot)
        for_each(pages_in(item, block), lambda i: page_copy(i).start())

        @pl.when(block == 0)
        def _():
            if decode:  # the buffer's former tile must have left
                pl.when(item >= depth)(lambda: tile_copy(item - depth).wait())
            each_token(item, lambda i: [c.start() for c in token_copies(item, i)] and None)

    def advance(item, block):
        done = block + 1 >= steps[item]
        return item + done, jnp.where(done, 0, block + 1)

    def fetch_if_any(step, cursor):
        pl.when(step < total[0])(lambda: fetch(step, *cursor))
        following = advance(jnp.minimum(cursor[0], row.shape[0] - 1), cursor[1])
        return tuple(jnp.where(step < total[0], new, old) for new, old in zip(following, cursor, strict=True))

    def attend(item, slot, block, first, size):
        """`size` tokens of a KV block, from its row `first` on."""
        half = size // 2
        keys = kv[slot, pl.ds(pl.multiple_of(first, SUBLANES), half)].astype(dtype)  # [w / 2, C]
        by_rows, by_columns = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))
        latents = q_latent[lax.rem(item, depth)].reshape(queries, latent_dim)
        even, odd = [], []
        for at in range(0, half, 2 * LANES):  # as wide as the MXU
            some = keys[at : at + 2 * LANES]
            rotated = dot(q_even_odd[...], some[:, 2 * latent_dim :], by_rows)  # [2M, 256]
            even.append(dot(latents, some[:, :latent_dim], by_rows) + rotated[:queries])
            odd.append(dot(latents, some[:, latent_dim : 2 * latent_dim], by_rows) + rotated[queries:])
        s = jnp.concatenate(even + odd, axis=1)
        if soft_cap is None:
            s *= scale * _LOG2_E
        else:
            s = jnp.tanh(s * (scale / soft_cap)) * (soft_cap * _LOG2_E)
        s = jnp.where(visible(item, block * kv_tokens + 2 * first, size), s, _MASKED)

        before = highest[...]
        after = jnp.maximum(before, s.max(axis=1, keepdims=True))
        keep = jnp.exp2(before - after)
        highest[...] = after
        tiles = [jnp.exp2(s[:, at : at + LANES] - after) for at in range(0, size, LANES)]
        weight_sum[...] = weight_sum[...] * keep + sum(tiles[1:], tiles[0])  # lanes are summed at the end
        weights = jnp.concatenate([tile.astype(dtype) for tile in tiles], axis=1)
        added = dot(weights[:, :half], keys[:, :latent_dim], by_columns)
        added += dot(weights[:, half:], keys[:, latent_dim : 2 * latent_dim], by_columns)
        acc[...] = acc[...] * keep[:, :1] + added

    def visible(item, at, size):
        """[M or 1, w]: whether the queries see the `size` keys from cache index `at` on, the even ones first."""
        lane = lax.broadcasted_iota(jnp.int32, (1, size), 1)
        index = at + 2 * lane - jnp.where(lane < size // 2, 0, size - 1)
        if decode:
            return index < seen_len(item)
        token = lax.broadcasted_iota(jnp.int32, (query_tokens, heads, size), 0)
        seen = index[None] <= token + position[item]
        if has_extra:
            is_tree = (new[item] >= 2) & (new[item] <= tree_nodes)
            in_tree = is_tree & (index >= kv_len[item] - new[item])
            seen = jnp.where(in_tree[None], tree_seen(item, index)[:, None] > 0.5, seen)
        return seen.reshape(queries, size)

    def tree_seen(item, index):
        """1 where a token sees the key at a cache index: [Q, w]. A shifted unit matrix moves the bits there."""
        bits = extra[lax.rem(item, depth)].reshape(query_tokens, -1)
        node = lax.broadcasted_iota(jnp.int32, (bits.shape[1], index.shape[1]), 0)
        place = jnp.where(node == index - (kv_len[item] - new[item]), 1.0, 0.0)
        return jnp.dot(bits, place, preferred_element_type=jnp.float32)

    def finish_tokens(item, slot, block):
        """Puts a decode row's new token into its tile, and zeros what is beyond the last query: it may be NaN."""
        length = seen_len(item) - block * kv_tokens
        at = pl.multiple_of((length - 1) // 2 // SUBLANES * SUBLANES, SUBLANES)
        tile = kv[slot, pl.ds(at, SUBLANES)]
        index = 2 * (lax.broadcasted_iota(jnp.int32, tile.shape, 0) + at) + token_in_row(tile.shape, latent_dim)
        if decode:
            mine = lax.rem(item, depth)
            tile = jnp.where(index == length - 1, extra[mine], tile)
            extra[mine] = tile
            tile_copy(item).start()
        kv[slot, pl.ds(at, SUBLANES)] = jnp.where(index < length, tile, jnp.zeros_like(tile))

        def clear(i, _):
            rows = pl.ds(pl.multiple_of(i * SUBLANES, SUBLANES), SUBLANES)
            kv[slot, rows] = jnp.zeros((SUBLANES, row_dim), kv.dtype)

        first, tiles = at // SUBLANES + 1, SMALL // 2 // SUBLANES
        lax.fori_loop(first, pl.cdiv(first, tiles) * tiles, clear, None)

    def begin(item):
        each_token(item, lambda i: [c.wait() for c in token_copies(item, i)] and None)
        both = q_rope[lax.rem(item, depth)].reshape(queries, LANES)
        even = lax.broadcasted_iota(jnp.int32, both.shape, 1) < LANES // 2
        q_even_odd[:queries] = jnp.where(even, both, jnp.zeros_like(both))
        q_even_odd[queries:] = jnp.where(even, jnp.zeros_like(both), both)
        acc[...] = jnp.zeros_like(acc)
        highest[...] = jnp.full_like(highest, _LOWEST)
        weight_sum[...] = jnp.zeros_like(weight_sum)

    def finish(item):
        pl.when(item >= 2)(lambda: each_token(item - 2, lambda i: out_copy(item - 2, i).wait()))
        result = acc[...] / weight_sum[...].sum(axis=1, keepdims=True)
        out[lax.rem(item, 2)] = result.reshape(query_tokens, heads, latent_dim).astype(out.dtype)
        each_token(item, lambda i: out_copy(item, i).start())

    def body(step, carry):
        ahead, (item, block) = carry
        ahead = fetch_if_any(step + depth - 1, ahead)
        slot = lax.rem(step, depth)
        last = block + 1 == steps[item]
        pl.when(block == 0)(lambda: begin(item))
        page_copy = page_copies(item, block, slot)
        for_each(pages_in(item, block), lambda i: page_copy(i).wait())
        pl.when(last)(lambda: finish_tokens(item, slot, block))
        length = jnp.minimum(seen_len(item) - block * kv_tokens, kv_tokens)
        # In large steps, and what is left in small ones, which waste little.
        large = length // compute_tokens
        small = pl.cdiv(length - large * compute_tokens, SMALL)

        def step_of(size, first):
            return lambda i, _: attend(item, slot, block, first + i * (size // 2), size)

        if compute_tokens > SMALL:
            lax.fori_loop(0, large, step_of(compute_tokens, 0), None)
            lax.fori_loop(0, small, step_of(SMALL, large * (compute_tokens // 2)), None)
        else:
            lax.fori_loop(0, large + small, step_of(SMALL, 0), None)
        pl.when(last)(lambda: finish(item))
        return ahead, advance(item, block)

    ahead = (jnp.int32(0), jnp.int32(0))
    for step in range(depth - 1):
        ahead = fetch_if_any(jnp.int32(step), ahead)
    lax.fori_loop(0, total[0], body, (ahead, (jnp.int32(0), jnp.int32(0))))

    # Copies that nobody has waited for.
    for i in range(1, 3):
        item = count[0] - i
        pl.when(item >= 0)(lambda item=item: each_token(item, lambda t: out_copy(item, t).wait()))
    for i in range(1, depth + 1) if decode else ():
        item = count[0] - i
        pl.when(item >= 0)(lambda item=item: tile_copy(item).wait())
