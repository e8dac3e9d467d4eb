"""The plan of a ring: which query tile needs which KV block in which step. Made once a step, used by every layer.

Queries are cut into tiles of Q tokens of one row, a device's KV into blocks of W tokens of one row, blocks into rounds
of R. In a round every device's R blocks travel once around the ring. A device's work in a step of it is a list of
items: a tile and a range of the resident blocks. What is masked for all of a tile is in no range, a tile without a
range is in no list, and blocks that nobody further on needs are not sent on. Positions decide, not places, so every
layout of the tokens is right; ascending positions within a row and device make the ranges tight.

Axis letters: T tokens, S rows, M pages of the longest row, P pages, B page tokens (all of one device); D devices;
J query tiles of Q tokens; C KV blocks (a multiple of R) of W tokens; U = C / R rounds.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.ring_attention.config import RingConfig, num_tiles

NOWHERE = np.iinfo(np.int32).max  # the position of a KV slot that holds nothing: after every query


class StoredPositions(NamedTuple):
    """Any layout: the position of the token in each slot of this device's pages."""

    slots: jax.Array  # [P, B]

    def of(self, index: jax.Array, pages: jax.Array) -> jax.Array:
        """Positions of a row's tokens `index` [X, W] of this device, which are in whole `pages` [X, W / B]."""
        return self.slots[pages].reshape(index.shape)


class StripedPositions(NamedTuple):
    """Token t of a sequence is on device t mod D: where a slot is in its row says all."""

    devices: int
    device: jax.Array | int

    def of(self, index: jax.Array, pages: jax.Array) -> jax.Array:
        return index * self.devices + self.device

    def held(self, lengths: jax.Array) -> jax.Array:
        """How many of a sequence's first `lengths` tokens this device keeps."""
        return jnp.maximum(lengths + self.devices - 1 - self.device, 0) // self.devices


Positions = StoredPositions | StripedPositions


class Items(NamedTuple):
    """A device's work: item i < count[u, s] of round u, step s. [U, D, J] each; blocks are counted within the round."""

    tile: jax.Array
    first: jax.Array  # blocks first .. end - 1; of these, clear_from .. clear_to - 1 need no mask
    end: jax.Array
    clear_from: jax.Array
    clear_to: jax.Array
    is_first: jax.Array  # 1: nothing was attended for this tile before
    is_last: jax.Array  # 1: nothing will be


class Writes(NamedTuple):
    """Where new tokens go: token by token, and by tiles, parts of pages, of `write_size` tokens (Z)."""

    slot: tuple[jax.Array, jax.Array]  # [T] page and place in it of each new token, page 0 for padding
    page: jax.Array  # [X] page of each tile that gets new tokens
    place: jax.Array  # [X] which tile of the page
    first: jax.Array  # [X] new tokens go to slots first .. end - 1 of the tile
    end: jax.Array  # [X]
    token: jax.Array  # [X, Z] the new token of each of them, T for the other slots
    num_tiles: jax.Array  # []


@partial(jax.tree_util.register_dataclass, meta_fields=("axis_name", "config", "window"), data_fields=(
    "tile_token", "tile_position", "token_place", "block_page", "block_valid", "block_position", "round_blocks", "hops",
    "num_rounds", "count", "items", "writes"))
@dataclass(frozen=True, kw_only=True)
class RingPlan:
    """Arrays of one device. block_valid, block_position, round_blocks and hops are of all devices, by the source."""

    axis_name: str
    config: RingConfig
    window: int | None
    tile_token: jax.Array  # [J, Q] token of each place of a tile, T where none is
    tile_position: jax.Array  # [J, Q] its position, -1 where none is
    token_place: jax.Array  # [T] tile * Q + place of each token, -1 for padding
    block_page: jax.Array  # [C, W / B] this device's pages
    block_valid: jax.Array  # [D, C] tokens in each block
    block_position: jax.Array  # [D, C, W] their positions, then NOWHERE
    round_blocks: jax.Array  # [D, U] blocks of a round
    hops: jax.Array  # [D, U] how many places to the right somebody needs them
    num_rounds: jax.Array  # []
    count: jax.Array  # [U, D] items of each step
    items: Items
    writes: Writes


def prefill_slots(page_table, kv_lens, cu_q_lens, num_tokens: int, page_size: int) -> tuple[jax.Array, jax.Array]:
    """(page [T], offset [T]) of each new token; padding gets page 0."""
    token = jnp.arange(num_tokens)
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right")
    real = (row < kv_lens.shape[0]) & (token >= cu_q_lens[0])
    row = jnp.minimum(row, kv_lens.shape[0] - 1)
    index = jnp.where(real, kv_lens[row] - cu_q_lens[row + 1] + token, 0)
    return jnp.where(real, page_table[row, index // page_size], 0), index % page_size


def write_positions(
    slot_positions: Int[Array, "P B"],
    page_table: Int[Array, "S M"],
    kv_lens: Int[Array, " S"],
    cu_q_lens: Int[Array, " S+1"],
    positions: Int[Array, " T"],
) -> Int[Array, "P B"]:
    """Records the true positions of the new tokens in the slots they get. Once a step, before the plan is made."""
    page, offset = prefill_slots(page_table, kv_lens, cu_q_lens, positions.shape[0], slot_positions.shape[1])
    return slot_positions.at[page, offset].set(positions, mode="promise_in_bounds")


def ring_plan(
    stored: StoredPositions,
    page_table: Int[Array, "S M"],
    kv_lens: Int[Array, " S"],
    cu_q_lens: Int[Array, " S+1"],
    positions: Int[Array, " T"],
    *,
    axis_name: str,
    config: RingConfig,
    window: int | None = None,
) -> RingPlan:
    """Called inside `shard_map` over `axis_name`; all arrays are the device's own. Gathers a few integers a token.

    stored: with the new tokens' positions (`write_positions`). page_table[s]: this device's pages of row s in order.
    kv_lens[s]: this device's tokens of the row, the new ones included. cu_q_lens: of this device's new tokens.
    positions: their true positions. Layers with different windows need one plan a window.
    """
    page_size = stored.slots.shape[1]
    config.check_page_size(page_size)
    tiles = tiles_of(cu_q_lens, positions, config.query_tokens)
    blocks = blocks_of(stored, page_table, kv_lens, page_size, config)
    everyone, held = (jax.tree.map(lambda a: lax.all_gather(a, axis_name), x) for x in (tiles.bounds, blocks))
    writes = writes_of(page_table, kv_lens, cu_q_lens, positions.shape[0], page_size)
    size = round_size(config, page_table, page_size)
    return plan_of(lax.axis_index(axis_name), tiles, everyone, held, writes, size, axis_name, config, window)


def round_size(config: RingConfig, page_table, page_size: int) -> int:
    """R."""
    return config.blocks_of_round(page_table.shape[0], page_table.shape[1], page_size)


def plan_of(me, tiles: "Tiles", everyone, held: "Blocks", writes: Writes, size: int, axis_name: str,
            config: RingConfig, window: int | None) -> RingPlan:  # fmt: skip
    """everyone: all devices' tiles' bounds, [D, J] each. held: all devices' blocks. The rest is this device's.

    tiles, everyone, held: from `tiles_of` and `blocks_of`. size: blocks of a round (R)."""
    _, valid, position, block_row = held
    devices = valid.shape[0]

    # Arrays [D, C], or [J, D, C] and [D', J, D, C] against tiles.
    lowest, highest = position.min(-1), jnp.where(position == NOWHERE, -1, position).max(-1)
    rounds = valid.shape[1] // size

    def visible(row, first, last):
        seen = (row[..., None, None] == block_row) & (valid > 0) & (lowest <= last[..., None, None])
        return seen if window is None else seen & (highest > first[..., None, None] - window)

    def clear(row, first, last):
        whole = (row[..., None, None] == block_row) & (valid == config.kv_tokens) & (highest <= first[..., None, None])
        return whole if window is None else whole & (lowest > last[..., None, None] - window)

    num_blocks = (valid > 0).sum(1)
    needed = visible(*everyone).any(1).reshape(devices, devices, rounds, size).any(-1)  # [D', D, U]
    distance = (jnp.arange(devices)[:, None] - jnp.arange(devices)) % devices
    source = (me - jnp.arange(devices)) % devices  # in step s the blocks of device me - s are here

    def by_step(a):  # [J, D, C] to [U, D, J, R]
        return a.reshape(-1, devices, rounds, size)[:, source].transpose(2, 1, 0, 3)

    count, items = _items(by_step(visible(*tiles.bounds)), by_step(clear(*tiles.bounds)))
    return RingPlan(
        axis_name=axis_name, config=config, window=window,
        tile_token=tiles.token, tile_position=tiles.position, token_place=tiles.place,
        block_page=held.page[me], block_valid=valid, block_position=position,
        round_blocks=jnp.clip(num_blocks[:, None] - jnp.arange(rounds) * size, 0, size),
        hops=jnp.where(needed, distance[:, :, None], 0).max(0),
        num_rounds=(-(-num_blocks // size)).max(), count=count, items=items,
        writes=writes,
    )  # fmt: skip


class Tiles(NamedTuple):
    token: jax.Array
    position: jax.Array
    place: jax.Array
    bounds: tuple[jax.Array, jax.Array, jax.Array]  # [J] row, least and greatest position; (_, NOWHERE, -1) if unused


def _parts(lengths, size: int, most: int):
    """Rows cut into parts of `size`, at most J: row [J], number of the part within its row [J], if it is in use [J]."""
    parts = -(-lengths // size)
    end = jnp.cumsum(parts)
    part = jnp.arange(most)
    row = jnp.minimum(jnp.searchsorted(end, part, side="right"), lengths.shape[0] - 1)
    used = part < end[-1]
    return row, jnp.where(used, part - end[row] + parts[row], 0), used


def tiles_of(cu_q_lens, positions, size: int) -> Tiles:
    num_tokens, num_rows = positions.shape[0], cu_q_lens.shape[0] - 1
    lengths = cu_q_lens[1:] - cu_q_lens[:-1]
    row, number, used = _parts(lengths, size, num_tiles(num_tokens, num_rows, size))
    place = number[:, None] * size + jnp.arange(size)
    real = used[:, None] & (place < lengths[row][:, None])
    token = jnp.where(real, cu_q_lens[row][:, None] + place, num_tokens)
    position = positions.at[token].get(mode="fill", fill_value=-1)
    least = jnp.where(real, position, NOWHERE).min(1)
    place_of = jnp.full(num_tokens, -1).at[token.reshape(-1)].set(jnp.arange(token.size), mode="drop")
    return Tiles(token, position, place_of, (row, least, position.max(1)))


class Blocks(NamedTuple):
    """A device's KV in blocks; a device axis in front where they are all devices'."""

    page: jax.Array  # [C, W / B]
    valid: jax.Array  # [C]
    position: jax.Array  # [C, W]
    row: jax.Array  # [C]


def blocks_of(positions: Positions, page_table, kv_lens, page_size: int, config: RingConfig) -> Blocks:
    num_rows, row_pages = page_table.shape
    size = config.kv_tokens
    most = num_rows * -(-row_pages * page_size // size)
    most += -most % round_size(config, page_table, page_size)
    row, number, used = _parts(kv_lens, size, most)
    valid = jnp.where(used, jnp.clip(kv_lens[row] - number * size, 0, size), 0)
    index = number[:, None] * (size // page_size) + jnp.arange(size // page_size)
    present = jnp.arange(size // page_size) * page_size < valid[:, None]
    page = jnp.where(present, page_table[row[:, None], jnp.minimum(index, row_pages - 1)], 0)
    place = positions.of(number[:, None] * size + jnp.arange(size), page)
    return Blocks(page, valid, jnp.where(jnp.arange(size) < valid[:, None], place, NOWHERE), row)


def _items(visible, clear) -> tuple[jax.Array, Items]:
    """From bool [U, D, J, R]. Each tile's visible blocks become one range, which may hold invisible ones."""
    rounds, devices, tiles, size = visible.shape
    active = visible.any(-1)
    first, end = visible.argmax(-1), size - visible[..., ::-1].argmax(-1)
    clear_from = jnp.where(clear.any(-1), clear.argmax(-1), end)
    unclear = ~clear & (jnp.arange(size) > clear_from[..., None])
    clear_to = jnp.where(unclear.any(-1), unclear.argmax(-1), size)
    clear_to = jnp.maximum(jnp.minimum(clear_to, end), clear_from)
    visits = active.reshape(-1, tiles).astype(jnp.int32).cumsum(0)
    is_first = (visits == 1).reshape(active.shape) & active
    is_last = (visits == visits[-1]).reshape(active.shape) & active
    order = jnp.argsort(~active, axis=-1, stable=True)
    fields = (first, end, clear_from, clear_to, is_first, is_last)
    items = Items(order, *(jnp.take_along_axis(a, order, -1).astype(jnp.int32) for a in fields))
    return active.sum(-1), items


def write_size(page_size: int) -> int:
    """Z: whole rows of registers, of 16 or 32 bits, that divide a page."""
    return math.gcd(page_size, 16)


def writes_of(page_table, kv_lens, cu_q_lens, num_tokens: int, page_size: int) -> Writes:
    """Of `num_tokens` new tokens in the rows' order, the newest of each row."""
    (num_rows, row_pages), size = page_table.shape, write_size(page_size)
    lengths = cu_q_lens[1:] - cu_q_lens[:-1]
    start = kv_lens - lengths
    tiles = jnp.where(lengths > 0, (kv_lens + size - 1) // size - start // size, 0)
    row, number, used = _parts(tiles, 1, num_write_tiles(num_tokens, num_rows, size))
    number += start[row] // size
    per_page = page_size // size
    page = jnp.where(used, page_table[row, jnp.minimum(number // per_page, row_pages - 1)], 0)
    first, end = (jnp.where(used, jnp.clip(a[row] - number * size, 0, size), 0) for a in (start, kv_lens))
    place = jnp.arange(size)
    new = (place >= first[:, None]) & (place < end[:, None])
    token = cu_q_lens[row][:, None] + number[:, None] * size + place - start[row][:, None]
    slot = prefill_slots(page_table, kv_lens, cu_q_lens, num_tokens, page_size)
    return Writes(slot, page, number % per_page, first, end, jnp.where(new, token, num_tokens), tiles.sum())


def num_write_tiles(num_tokens: int, num_rows: int, size: int) -> int:
    """The most tiles that T new tokens of S rows touch; a row's first and last one partly."""
    return min((num_tokens + num_rows * (2 * size - 2)) // size, num_tokens)
