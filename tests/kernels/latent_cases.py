"""Ragged batches for latent attention, and a check of any backend on them against the dense float32 reference."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.interpret import races_found, reset
from pallas_kernels.latent_attention import reference
from pallas_kernels.latent_attention.api import LatentSpec, choose_backend
from tests.kernels.ragged_cases import LAYERS, Case, inputs
from tests.tolerances import ATTENTION

SCALE = 0.11


def check(case: Case, backend: str = "xla", dtype: str = "float32", rope_dim: int = 64, **blocks) -> None:
    """Outputs within the table's tolerance, a second run equal in bits, and no byte changed that was not to be.

    case.heads: (N, 1); case.head_dim: R, of at least rope_dim. The ragged case's K is the latent, its V begins with the
    rotated key.
    """
    given = inputs(case, dtype)
    rng = np.random.default_rng(case.seed + 1)
    real_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    q_rope = rng.standard_normal((*given.q.shape[:2], rope_dim), np.float32).astype(real_dtype)
    latent, rope = given.k[:, 0], given.v[:, 0, :rope_dim]
    before = np.concatenate([given.values[:, :, 0, 0], given.values[:, :, 1, 0, :, :rope_dim]], axis=-1)
    spec = LatentSpec(
        num_heads=case.heads[0], latent_dim=case.head_dim, rope_dim=rope_dim, page_size=case.page_size,
        dtype=jnp.dtype(dtype), kv_dtype=jnp.dtype(before.dtype),
    )  # fmt: skip
    chosen = choose_backend(backend, spec, jax.devices()[0])
    layout = chosen.layout(LAYERS, before.shape[1])
    options = dict(case.options)
    tree = {"tree_mask": options.pop("tree_mask")} if "tree_mask" in options else {}
    if "tree_mask" in given.options:
        tree = {"tree_mask": given.options["tree_mask"]}
    run = jax.jit(partial(chosen.attend, scale=SCALE, **options, **blocks))

    def once():
        out, pages = run(given.q, q_rope, latent, rope, layout.from_canonical(jnp.asarray(before)), *given.step, **tree)
        return np.asarray(out, np.float32), np.asarray(layout.to_canonical(pages), np.float32)

    if chosen.choice.simulated:
        reset()
    out, pages = once()
    assert not chosen.choice.simulated or not races_found()
    want, want_pages = reference.latent_attention(
        given.q, q_rope, latent, rope, before, *given.step, scale=SCALE, **options, **tree
    )
    real = given.num_real_tokens
    np.testing.assert_allclose(out[:real], want[:real], atol=ATTENTION[dtype], rtol=0)
    # Only page 0, where padding goes, may differ; all else is as the reference left it, bit for bit.
    np.testing.assert_array_equal(pages[:, 1:], want_pages.astype(np.float32)[:, 1:])
    again, _ = once()
    np.testing.assert_array_equal(out[:real], again[:real])
