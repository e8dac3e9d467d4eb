"""Latent attention on NVIDIA GPUs of sm_90, written in Pallas' Mosaic GPU; after the design of FlashMLA (DeepSeek).

All heads read the same rows, so 64 of a token's heads (or of a few tokens', where it has fewer) are the 64 rows of a
matrix product. Their output [64, R] is too large for the registers of one warpgroup: two share it by columns, and
share the scores by keys. The work list, its equal cuts and the merge of what they cut are those of ragged attention.

    warpgroup w  page ids from the table; TMA of its half of the columns of the next KV block
                 wgmma: scores [64, W/2] of its half of the keys; maxima meet in shared memory
                 weights of its half -> shared memory
                 wgmma: output [64, R/2] += weights of both halves x its half of the columns
    at the end of an item: output / sum -> where the queries were -> TMA, or a partial softmax to a workspace

Both warpgroups compute, and none only moves data: with a third, ptxas gives each thread 168 registers (it ignores
setmaxnreg here), spills, and serializes the products; two get 255.

Axis letters: T tokens, S rows, N query heads, R latent numbers, E rope numbers, L layers, P pages, B page tokens;
W tokens of a KV block.
"""

import jax.numpy as jnp

from pallas_kernels.devices import DEVICES, device_of_kind
from pallas_kernels.latent_attention.layout import LatentLayout
from pallas_kernels.latent_attention.spec import LatentSpec
from pallas_kernels.ragged_paged_attention.xla import slots_of

KV_TOKENS = 64  # W
_TILE = 8  # rows that one copy to the output has at least
_SMS = DEVICES["h200"].cores


def latent_attention(
    q_latent, q_rope, latent, rope, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution, *,
    scale, soft_cap=None, tree_mask=None, interpret=False,
):  # fmt: skip
    """See `api.LatentAttentionFn`."""
    from pallas_kernels.latent_attention.mosaic_gpu_kernel import attend

    step = (page_table, kv_lens, cu_q_lens, distribution)
    # XLA's scatter, in place: blocks of the grid read what others would write, and no order exists between them.
    page, slot = slots_of(latent.shape[0], kv_pages.shape[2], *step)
    new = jnp.concatenate([latent, rope], axis=-1).astype(kv_pages.dtype)
    kv_pages = kv_pages.at[layer, page, slot].set(new, mode="promise_in_bounds")
    num_heads = q_latent.shape[1]
    q_latent, q_rope = (jnp.pad(q, ((0, 0), (0, -num_heads % _TILE), (0, 0))) for q in (q_latent, q_rope))
    out = attend(
        q_latent, q_rope, kv_pages, layer, *step, scale=scale, soft_cap=soft_cap, tree_mask=tree_mask,
        sms=2 if interpret else _SMS, interpret=interpret,
    )  # fmt: skip
    return out[:, :num_heads], kv_pages


def smem_bytes(latent_dim: int, rope_dim: int, itemsize: int) -> int:
    """Shared memory of one thread block: queries, ring, weights; barriers and alignment."""
    row = (latent_dim + rope_dim) * itemsize
    return (64 + 2 * KV_TOKENS) * row + 64 * (KV_TOKENS + 8) * itemsize + 2 * 64 * 4 + 1024


def unsupported(spec: LatentSpec, device_kind: str | None) -> str | None:
    """What keeps this backend from serving `spec`, if anything."""
    for name in ("dtype", "kv_dtype"):
        dtype = jnp.dtype(getattr(spec, name)).name
        if dtype != "bfloat16" and (device_kind is not None or dtype != "float32"):
            return f"{name}={dtype} must be bfloat16 (float32 is simulated only: wgmma would round it)"
    if spec.dtype != spec.kv_dtype:
        return f"dtype={spec.dtype} and kv_dtype={spec.kv_dtype} must be equal: wgmma multiplies numbers of one kind"
    if spec.latent_dim % 128 or spec.latent_dim > 512:
        return f"latent_dim={spec.latent_dim} must be a multiple of 128, two halves of whole tiles, and at most 512"
    if spec.rope_dim != 64:
        return f"rope_dim={spec.rope_dim} must be 64, one tile"
    if spec.page_size % KV_TOKENS and KV_TOKENS % spec.page_size or spec.page_size < 8:
        return f"page_size={spec.page_size} must divide {KV_TOKENS} and be at least 8, or be a multiple of it"
    if device_kind is not None:
        try:
            device = device_of_kind(device_kind)
        except KeyError as error:
            return str(error.args[0])
        needed = smem_bytes(spec.latent_dim, spec.rope_dim, jnp.dtype(spec.dtype).itemsize)
        if needed > device.smem_bytes:
            return f"{needed:,} bytes of shared memory are needed and {device.name} has {device.smem_bytes:,}"
    return None


def layout(**fields) -> LatentLayout:
    return LatentLayout(**fields)
