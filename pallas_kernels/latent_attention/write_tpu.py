"""Stores new rows in their pages on a TPU: reads each page that gets some, merges, writes it back.

A page is two tiles of a ring: while one is merged, the next is read and the one before written. New rows lie at any
offset in their array, and only whole tiles of 16 can be copied: a window of the rows is fetched from the tile before,
and turned.

Axis letters: B tokens of a page, C numbers of a row, T tokens.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.interpret import tpu_params
from pallas_kernels.latent_attention.config import SUBLANES, round_up
from pallas_kernels.latent_attention.worklist import PageWrites


def write_pages(writes: PageWrites, layer, new, kv_pages, *, interpret=False):
    """kv_pages [L, P, B, C] with `new` [T, C] in place, donated. layer [1]."""
    (num_tokens, row_dim), page_size = new.shape, kv_pages.shape[2]
    # The window of a page that starts before the new rows, or ends after them, lies in the array all the same.
    new = jnp.pad(new, ((page_size, round_up(num_tokens, SUBLANES) - num_tokens + page_size + SUBLANES), (0, 0)))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    scalars = [layer, *writes]
    return pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM((2, page_size, row_dim), kv_pages.dtype),
                pltpu.VMEM((2, page_size + SUBLANES, row_dim), kv_pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=tpu_params() if interpret is True else interpret,
        name="latent_write_pages",
    )(*scalars, new, kv_pages)


def _kernel(layer, page, first, end, source, count, new_hbm, _, pages, old, window, read_sem, write_sem):
    page_size = old.shape[1]
    size = window.shape[1]

    def reads(i):
        slot = lax.rem(i, 2)
        at = pl.multiple_of((source[i] + page_size) // SUBLANES * SUBLANES, SUBLANES)
        yield pltpu.make_async_copy(pages.at[layer[0], page[i]], old.at[slot], read_sem.at[slot])
        yield pltpu.make_async_copy(new_hbm.at[pl.ds(at, size)], window.at[slot], read_sem.at[slot])

    def write(i):
        slot = lax.rem(i, 2)
        return pltpu.make_async_copy(old.at[slot], pages.at[layer[0], page[i]], write_sem.at[slot])

    def start(i):
        for copy in reads(i):
            copy.start()

    def body(i, _):
        slot = lax.rem(i, 2)
        pl.when(i >= 1)(lambda: write(i - 1).wait())  # its buffer is the next page's
        pl.when(i + 1 < count[0])(lambda: start(i + 1))
        for copy in reads(i):
            copy.wait()
        # Only 32-bit rows can be turned by any number; the way there and back is exact.
        ahead = lax.rem(source[i] + page_size, SUBLANES)
        turned = pltpu.roll(window[slot].astype(jnp.float32), lax.rem(size - ahead, size), 0)[:page_size]
        index = lax.broadcasted_iota(jnp.int32, turned.shape, 0)
        fresh = (index >= first[i]) & (index < end[i])
        old[slot] = jnp.where(fresh, turned, old[slot].astype(jnp.float32)).astype(old.dtype)
        write(i).start()

    pl.when(count[0] > 0)(lambda: start(0))
    lax.fori_loop(0, count[0], body, None)
    pl.when(count[0] > 0)(lambda: write(count[0] - 1).wait())
