"""Latent attention in plain XLA: the loop of ragged paged attention, with one kv head whose values are the start of
its keys."""

import jax.numpy as jnp

from pallas_kernels.latent_attention.layout import LatentLayout
from pallas_kernels.latent_attention.spec import LatentSpec
from pallas_kernels.ragged_paged_attention.xla import attend_pages, slots_of

_FLOATS = ("float32", "bfloat16", "float16")


def latent_attention(
    q_latent, q_rope, latent, rope, kv_pages, layer, page_table, kv_lens, cu_q_lens, distribution, *,
    scale, soft_cap=None, tree_mask=None,
):  # fmt: skip
    """See `api.LatentAttentionFn`."""
    step = (page_table, kv_lens, cu_q_lens, distribution)
    page, slot = slots_of(latent.shape[0], kv_pages.shape[2], *step)
    new = jnp.concatenate([latent, rope], axis=-1).astype(kv_pages.dtype)
    kv_pages = kv_pages.at[layer, page, slot].set(new, mode="promise_in_bounds")
    q = jnp.concatenate([q_latent, q_rope], axis=-1)
    out = attend_pages(
        q, kv_pages[:, :, None, None], layer, *step,
        value_dim=latent.shape[1], scale=scale, soft_cap=soft_cap, tree_mask=tree_mask,
    )  # fmt: skip
    return out, kv_pages


def unsupported(spec: LatentSpec, device_kind: str | None) -> str | None:
    """What keeps this backend from serving `spec`, if anything."""
    if device_kind is not None and device_kind.startswith("TPU"):
        return f"{device_kind}: XLA for TPUs would copy the whole cache to write a token (seen in its memory analysis)"
    for name in ("dtype", "kv_dtype"):
        dtype = jnp.dtype(getattr(spec, name)).name
        if dtype not in _FLOATS:
            return f"{name}={dtype} must be one of {', '.join(_FLOATS)}"
    return None


def layout(**fields) -> LatentLayout:
    return LatentLayout(**fields)
