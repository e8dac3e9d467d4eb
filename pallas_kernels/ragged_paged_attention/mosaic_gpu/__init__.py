"""Ragged paged attention on NVIDIA GPUs of sm_90, written in Pallas' Mosaic GPU.

Three launches at most on the way of a token: the new K and V are written to their pages (XLA's scatter, in place: other
blocks of the same row read them, and no order exists between the blocks of one launch), attention (kernel.py; once for
rows of one token, once for the longer ones, if the step can have any), and the merge of rows that several workers
shared (merge.py).

Axis letters: T tokens, S rows, N query heads, K kv heads, G = N / K, H head dim, L layers, P pages, B page tokens.
"""

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.devices import DEVICES, device_of_kind
from pallas_kernels.ragged_paged_attention.layout import KVLayout
from pallas_kernels.ragged_paged_attention.mosaic_gpu.config import QUERY_ROWS, Blocks, chunk_blocks, decode_blocks
from pallas_kernels.ragged_paged_attention.mosaic_gpu.schedule import Batch, make_schedule
from pallas_kernels.ragged_paged_attention.mosaic_gpu.write import write
from pallas_kernels.ragged_paged_attention.reach import Reach
from pallas_kernels.ragged_paged_attention.spec import AttentionSpec
from quant.kv import LARGEST, QuantizedPages

if TYPE_CHECKING:  # imported where it is used: jax before 0.12 lacks what it needs
    from pallas_kernels.ragged_paged_attention.mosaic_gpu.kernel import Operands

_SMS = DEVICES["h200"].cores  # blocks of the persistent grid; on a GPU with fewer the rest run after the first
_PAGES, _HEADS = (16, 32, 64, 128, 256), (64, 128, 256)
_SIMULATED_PAGES, _SIMULATED_HEADS = (8, *_PAGES), (16, 32, 48, 64, 128, 192, 256)  # whole columns of kernel.finish


def unsupported(spec: AttentionSpec, device_kind: str | None) -> str | None:
    """What keeps this backend from serving `spec`, if anything; device_kind None: interpret mode on a CPU."""
    if spec.num_heads // spec.num_kv_heads > 16:
        return f"{spec.num_heads // spec.num_kv_heads} query heads a kv head, 16 are the most"
    pages, heads = (_SIMULATED_PAGES, _SIMULATED_HEADS) if device_kind is None else (_PAGES, _HEADS)
    if spec.page_size not in pages:
        return f"page_size={spec.page_size} must be one of {', '.join(map(str, pages))}"
    if spec.head_dim not in heads:
        return f"head_dim={spec.head_dim} must be one of {', '.join(map(str, heads))}"
    dtype, kv_dtype = jnp.dtype(spec.dtype), jnp.dtype(spec.kv_dtype)
    dtypes = ("bfloat16", "float16", "float32") if device_kind is None else ("bfloat16", "float16")
    if dtype.name not in dtypes:
        return f"{dtype.name} queries: the matrix units of the GPU take {' and '.join(dtypes)}"
    if kv_dtype != dtype and kv_dtype.name not in LARGEST:
        return f"{kv_dtype.name} pages with {dtype.name} queries: pages are {', '.join((dtype.name, *LARGEST))}"
    if device_kind is not None:
        try:
            device_of_kind(device_kind)
        except KeyError as error:
            return f"{error.args[0]}; the kernel is for Hopper GPUs, which have wgmma"
    return None


def layout(**fields) -> KVLayout:
    return KVLayout(**fields)


def ragged_paged_attention(
    q, k, v, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution, *,
    scale, window=None, chunk=None, soft_cap=None, sinks=None, kv_bias=None, tree_mask=None, interpret=False,
    decode: Blocks | None = None, mixed: Blocks | None = None,
):  # fmt: skip
    """See `api.AttentionFn`. decode, mixed: block sizes of the two launches, chosen by shape if None."""
    (num_tokens, num_heads, head_dim), num_rows = q.shape, kv_lens.shape[0]
    kv_pages = write(k, v, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution)
    values, scales = kv_pages if isinstance(kv_pages, QuantizedPages) else (kv_pages, None)
    group = num_heads // values.shape[3]
    given = _operands(q, values, scales, layer, page_table, scale=scale, sinks=sinks, kv_bias=kv_bias,
                      tree_mask=tree_mask)  # fmt: skip
    attend = partial(
        _attend, given, Batch(kv_lens, cu_q_lens, distribution), values.shape, num_tokens,
        reach=Reach(window, chunk), soft_cap=soft_cap, interpret=interpret,
    )  # fmt: skip
    kinds = (head_dim, q.dtype, values.dtype, kv_bias is not None)
    if interpret:  # small blocks: more of them, and fewer wasted numbers, in the short rows that a simulation can have
        decode = decode or Blocks(kv_tokens=32)
        mixed = mixed or Blocks(kv_tokens=32, shared=True)
    out = attend(decode or decode_blocks(*kinds), is_decode=True)
    if num_tokens != num_rows:  # otherwise a decode-only shape
        longer = attend(mixed or chunk_blocks(*kinds), is_decode=False)
        decoded = jnp.arange(out.shape[1]) < distribution[0] * group
        out = jnp.where(decoded[None, :, None], out, longer)
    out = out[:, : num_tokens * group].reshape(-1, num_tokens, group, head_dim)
    return out.swapaxes(0, 1).reshape(q.shape), kv_pages


def _operands(q, values, scales, layer, page_table, *, scale, sinks, kv_bias, tree_mask) -> "Operands":
    """The contract's arrays as the kernel takes them: queries, sinks and trees packed by kv head, pages flat."""
    from pallas_kernels.ragged_paged_attention.mosaic_gpu.kernel import Operands

    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = values.shape[3:5]
    group = num_heads // num_kv_heads
    numbers = 2 * page_size if page_size == 16 else page_size  # see kernel._numbers
    if values.size // head_dim >= 2**31 or (kv_bias is not None and kv_bias.size % numbers):
        raise ValueError(f"pages {values.shape}: fewer than 2**31 rows of a head, and an even number of pages' biases")
    packed = (q.astype(jnp.float32) * scale).astype(q.dtype).reshape(num_tokens, num_kv_heads, group, head_dim)
    packed = packed.swapaxes(0, 1).reshape(num_kv_heads, num_tokens * group, head_dim)
    if sinks is not None:
        sinks = jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, group), (1, -(-QUERY_ROWS // group) + 1))
        sinks = sinks[:, : QUERY_ROWS + group]
    tree = None
    if tree_mask is not None:
        tree = jnp.repeat(jax.lax.bitcast_convert_type(tree_mask, jnp.int32), group, axis=0)
        tree = jnp.pad(tree, ((0, 2 * QUERY_ROWS), (0, 0))).T
    return Operands(
        layer=jnp.asarray(layer, jnp.int32).reshape(1), table=page_table,
        q=jnp.pad(packed, ((0, 0), (0, 2 * QUERY_ROWS), (0, 0))), pages=values.reshape(-1, head_dim),
        scales=None if scales is None else scales.reshape(-1, numbers),
        bias=None if kv_bias is None else kv_bias.reshape(-1, numbers), sinks=sinks, tree=tree,
    )  # fmt: skip


def _attend(
    given: "Operands", batch: Batch, pages_shape: tuple[int, ...], num_tokens: int, blocks: Blocks, *, is_decode: bool,
    reach: Reach, soft_cap: float | None, interpret: bool,
) -> jax.Array:
    """[K, rows, H] of the rows of one token, or of all others; the rest is undefined."""
    from pallas_kernels.ragged_paged_attention.mosaic_gpu.kernel import Launch, attend
    from pallas_kernels.ragged_paged_attention.mosaic_gpu.merge import merge

    _, num_pages, _, num_kv_heads, page_size, head_dim = pages_shape
    if not interpret:
        blocks.check(head_dim, given.q.dtype, given.pages.dtype, given.bias is not None)
        if blocks.kv_tokens < QUERY_ROWS:
            raise ValueError(f"{blocks}: on a GPU kv_tokens is 64 or 128, the rows that a register tile needs")
    if is_decode:
        given = given._replace(tree=None)
    group = (given.q.shape[1] - 2 * QUERY_ROWS) // num_tokens
    words = 0 if given.tree is None else given.tree.shape[0]
    launch = Launch(
        group=group, num_kv_heads=num_kv_heads, num_pages=num_pages, page_size=page_size, head_dim=head_dim,
        dtype=given.q.dtype, kv_dtype=given.pages.dtype, blocks=blocks, sms=2 if interpret else _SMS, reach=reach,
        soft_cap=soft_cap, tree_words=words, bias=given.bias is not None, sinks=given.sinks is not None,
        interpret=interpret, mean_tokens=given.table.size * page_size // 2,
    )  # fmt: skip
    schedule = make_schedule(
        batch, group=group, num_kv_heads=num_kv_heads, rows=blocks.rows, num_tokens=num_tokens,
        kv_tokens=blocks.kv_tokens, num_workers=launch.workers, decode=is_decode, reach=reach, tree_words=words,
    )
    out, values, maxima, sums = attend(launch, schedule, given)
    return merge(launch, schedule, out, values, maxima, sums, given.sinks)
