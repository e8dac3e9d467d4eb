"""Exchanges of ragged slices between the devices of mesh axes: rows to the experts that want them and back, and experts
to other places.

An exchange is `jax.lax.ragged_all_to_all` or, where that does not exist (CPU), a dense twin of the same meaning. What
is sent where is a `Slices`, made by pure functions from numbers that every device knows.

Axis letters: n devices, K slices of a device (K/n for each receiver, in the order of the receivers), M rows to send,
R rows to receive into, P places (replicas of experts; P/n on each device).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from sharding.rules import MeshAxes


class Slices(NamedTuple):
    """Of one device. Offsets in the output count on the receiver; recv_sizes are what others send to this one."""

    input_offsets: Int[Array, " K"]
    send_sizes: Int[Array, " K"]
    output_offsets: Int[Array, " K"]
    recv_sizes: Int[Array, " K"]


# (operand [M, ...], output [R, ...], Slices, mesh axes) -> output with the received slices written into it
Exchange: TypeAlias = Callable[[jax.Array, jax.Array, Slices, MeshAxes], jax.Array]


def ragged_exchange(operand: jax.Array, output: jax.Array, slices: Slices, axes: MeshAxes) -> jax.Array:
    """On TPU and GPU: what travels are the rows."""
    return lax.ragged_all_to_all(operand, output, *slices, axis_name=axes)


def dense_exchange(operand: jax.Array, output: jax.Array, slices: Slices, axes: MeshAxes) -> jax.Array:
    """The twin for CPUs: everybody sees everything and picks what is its own."""
    offsets, sizes, starts = (  # of the slices for this device, sender after sender
        lax.all_to_all(a, axes, 0, 0, tiled=True)
        for a in (slices.input_offsets, slices.send_sizes, slices.output_offsets)
    )
    everything = lax.all_gather(operand, axes)  # [n, M, ...]
    row = jnp.arange(output.shape[0])[:, None]
    inside = (row >= starts) & (row < starts + sizes)  # [R, K]
    which = jnp.argmax(inside, axis=1)
    sender = which // (len(sizes) // everything.shape[0])
    received = everything[sender, offsets[which] + row[:, 0] - starts[which]]
    mine = inside.any(1).reshape(-1, *[1] * (output.ndim - 1))
    return jnp.where(mine, received, output)


def exchange_for(device: Any) -> Exchange:
    """The one that this kind of device has."""
    return dense_exchange if device.platform == "cpu" else ragged_exchange


def row_slices(counts: Int[Array, "n P"], me: Int[Array, ""] | int) -> tuple[Slices, Slices, Int[Array, " P//n"]]:
    """(the way to the experts, the way back, rows of each place of device `me`).

    counts: how many rows each device has for each place. A device's rows are sorted by place; on the receiver they lie
    sorted by place too, and of one place those of the first device come first. So a slice is what one device has for
    one place, and nothing is sorted again.
    """
    n, num_places = counts.shape
    held = num_places // n
    total = counts.sum(0)
    sent_from = jnp.cumsum(counts, 1) - counts  # [n, P] where a sender's rows for a place begin
    first = (jnp.cumsum(total.reshape(n, held), 1) - total.reshape(n, held)).reshape(-1)
    received_at = first + jnp.cumsum(counts, 0) - counts  # [n, P] where they begin on the place's device

    def here(a: jax.Array) -> jax.Array:
        """Of this device's places, sender after sender."""
        return lax.dynamic_slice_in_dim(a, me * held, held, axis=-1).reshape(-1)

    there = Slices(sent_from[me], counts[me], received_at[me], here(counts))
    back = Slices(here(received_at), here(counts), here(sent_from), counts[me])
    return there, back, here(total)


def place_slices(sources: Int[Array, " P"], me: Int[Array, ""] | int, n: int, held_before: int) -> Slices:
    """What device `me` sends so that place p gets what lay in place sources[p], one row a place.

    held_before: places on a device before; after it there are P/n.
    """
    held = len(sources) // n
    place, row = jnp.arange(len(sources)), jnp.arange(n)[:, None]
    sends = sources // held_before == me
    mine = lax.dynamic_slice_in_dim(sources, me * held, held)
    receives = (mine // held_before == row).reshape(-1)  # [n, P/n]
    one = jnp.int32
    return Slices((sources % held_before).astype(one), sends.astype(one), (place % held).astype(one),
                  receives.astype(one))  # fmt: skip
