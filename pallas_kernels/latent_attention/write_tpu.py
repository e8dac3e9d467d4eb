"""Stores new tokens in their pages on a TPU: reads each page that gets some, merges, writes it back.

While one page is merged, the next is read and the one before written. A page is rows of two tokens each. The new tokens
are given as such rows twice, paired from an even and from an odd token, so that one of them fits a page's pairs. A
page's part lies at any row of it, but only whole tiles of 16 rows can be copied: a window from the tile before is
fetched, and turned.

Axis letters: B tokens of a page, C numbers of a row of two tokens, T tokens.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.latent_attention.config import SUBLANES, round_up
from pallas_kernels.latent_attention.layout import pair_rows
from pallas_kernels.latent_attention.worklist import PageWrites


def write_pages(writes: PageWrites, new, kv_pages, *, latent_dim: int, interpret=False):
    """kv_pages [P, B / 2, C] with the tokens `new` [T, R + E] in place, donated."""
    num_tokens, (page_rows, row_dim) = new.shape[0], kv_pages.shape[1:]
    # The window of a page that starts before the new tokens, or ends after them, lies in the array all the same.
    before, after = 2 * page_rows, round_up(num_tokens, 2 * SUBLANES) - num_tokens + 2 * (page_rows + SUBLANES)
    new = jnp.pad(new, ((before, after + 1), (0, 0)))
    pairs = jnp.stack([pair_rows(new[:-1], latent_dim), pair_rows(new[1:], latent_dim)])  # [2, rows, C]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    scalars = list(writes)
    return pl.pallas_call(
        functools.partial(_kernel, latent_dim=latent_dim),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM((2, page_rows, row_dim), kv_pages.dtype),
                pltpu.VMEM((2, page_rows + SUBLANES, row_dim), kv_pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=interpret,
        name="latent_write_pages",
    )(*scalars, pairs, kv_pages)


def token_in_row(shape: tuple[int, ...], latent_dim: int):
    """Which of its row's two tokens a number belongs to, 0 or 1: int32 [rows, C]."""
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    middle = latent_dim + shape[1] // 2  # of the rotated keys
    second = ((lane >= latent_dim) & (lane < 2 * latent_dim)) | (lane >= middle)
    return jnp.where(second, 1, 0)


def _kernel(page, first, end, source, count, pairs, _, pages, old, window, read_sem, write_sem, *, latent_dim):
    page_rows, size = old.shape[1], window.shape[1]

    def at(i):  # the row of `pairs` that the page's first would be
        return (source[i] + 2 * page_rows) // 2

    def reads(i):
        slot = lax.rem(i, 2)
        rows = pl.ds(pl.multiple_of(at(i) // SUBLANES * SUBLANES, SUBLANES), size)
        parity = lax.rem(source[i] + 2 * page_rows, 2)
        yield pltpu.make_async_copy(pages.at[page[i]], old.at[slot], read_sem.at[slot])
        yield pltpu.make_async_copy(pairs.at[parity, rows], window.at[slot], read_sem.at[slot])

    def write(i):
        slot = lax.rem(i, 2)
        return pltpu.make_async_copy(old.at[slot], pages.at[page[i]], write_sem.at[slot])

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
        turn = lax.rem(size - lax.rem(at(i), SUBLANES), size)
        turned = pltpu.roll(window[slot].astype(jnp.float32), turn, 0)[:page_rows]
        token = 2 * lax.broadcasted_iota(jnp.int32, turned.shape, 0) + token_in_row(turned.shape, latent_dim)
        fresh = (token >= first[i]) & (token < end[i])
        old[slot] = jnp.where(fresh, turned, old[slot].astype(jnp.float32)).astype(old.dtype)
        write(i).start()

    pl.when(count[0] > 0)(lambda: start(0))
    lax.fori_loop(0, count[0], body, None)
    pl.when(count[0] > 0)(lambda: write(count[0] - 1).wait())
