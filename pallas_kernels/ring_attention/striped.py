"""Steps over the striped layout: token t of a sequence is on device t mod D, and every device has the same page table.

Then lengths say all: each device works out everybody's part of a step by itself, nothing is exchanged and no position
is stored. A step's rows of one token (decoding) come first and go through `context_decode_attention`; the others, the
chunks of prompts, attend in one of two ways:
- `spread_plan`: the step's tokens are spread over the devices and KV goes around the ring. For long chunks.
- `shared_plan`: all devices have all tokens, each attends to its own KV, and the partial softmaxes merge. For short
  ones: a long prompt's KV is more than what a few tokens make of it (pass-Q and pass-KV in arXiv 2411.01783). On TPUs
  rows of one token go the same way, because XLA's own would copy the cache there.

Axis letters: D devices, T tokens of a step on one device, S rows, M pages of the longest row, R chunks, B page tokens
(of one device).
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.ring_attention.config import RingConfig
from pallas_kernels.ring_attention.plan import (
    RingPlan,
    StripedPositions,
    blocks_of,
    plan_of,
    round_size,
    tiles_of,
    writes_of,
)

MAX_CHUNKS = 8  # of a spread step, over all devices: the ring's plan must fit a TPU's scalar memory


class Rows(NamedTuple):
    """A step's rows, as `ragged_paged_attention` has them, of all devices together."""

    page_table: Int[Array, "S M"]
    kv_lens: Int[Array, " S"]
    cu_q_lens: Int[Array, " S+1"]
    distribution: Int[Array, " 3"]


class Order(NamedTuple):
    """Where the tokens of a spread step are. Device d has places d T .. d T + T - 1."""

    source: Int[Array, " D*T"]  # the token at each place, D T where none is
    place: Int[Array, " D*T"]  # of each token; of padding, anything within bounds

    def spread(self, of_tokens: Array) -> Array:
        """Zeros where no token is."""
        return of_tokens.at[self.source].get(mode="fill", fill_value=0)


def tokens_needed(devices: int, num_decode: int, chunks: list[int]) -> int:
    """D T that surely holds a step of so many decode rows and chunks of these lengths, wherever they start."""
    return devices * (-(-num_decode // devices) + sum(-(-length // devices) for length in chunks))


def spread_order(rows: Rows, devices: int, num_tokens: int) -> Order:
    """Decode rows go round the devices; a chunk's token goes where its KV will be. num_tokens: D T.

    `tokens_needed` must not be more than num_tokens."""
    _, kv_lens, cu_q_lens, (num_decode, _, count) = rows
    index = jnp.arange(kv_lens.shape[0])
    new = cu_q_lens[1:] - cu_q_lens[:-1]
    chunk = (index >= num_decode) & (index < count)
    stripes = StripedPositions(devices, jnp.arange(devices)[:, None])
    before = stripes.held(kv_lens - new)  # [D, S]
    counts = jnp.where(chunk, stripes.held(kv_lens) - before, 0)
    starts = stripes.held(num_decode) + jnp.cumsum(counts, 1) - counts

    token = jnp.arange(num_tokens)
    row = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], token, side="right"), index[-1])
    position = kv_lens[row] - cu_q_lens[row + 1] + token
    device = jnp.where(row < num_decode, row, position) % devices
    place = jnp.where(row < num_decode, row // devices, starts[device, row] + position // devices - before[device, row])
    place = jnp.clip(device * (num_tokens // devices) + place, 0, num_tokens - 1)
    real = token < cu_q_lens[-1]
    source = jnp.full(num_tokens, num_tokens).at[jnp.where(real, place, num_tokens)].set(token, mode="drop")
    return Order(source, place)


class _Selected(NamedTuple):
    """Some of the rows, R at most. first: of them; new: their tokens of this step."""

    first: jax.Array
    page_table: jax.Array  # [R, M]
    kv_lens: jax.Array  # [R]
    new: jax.Array  # [R]


def _select(rows: Rows, first, end, most: int) -> _Selected:
    index = first + jnp.arange(most)
    used, index = index < end, jnp.minimum(index, rows.kv_lens.shape[0] - 1)
    new = rows.cu_q_lens[index + 1] - rows.cu_q_lens[index]
    return _Selected(
        jnp.int32(first), rows.page_table[index], jnp.where(used, rows.kv_lens[index], 0), jnp.where(used, new, 0))


def decode_rows(rows: Rows) -> _Selected:
    return _select(rows, 0, rows.distribution[0], rows.kv_lens.shape[0])


def chunks(rows: Rows, most: int | None = None) -> _Selected:
    """The rows of more than one token. most: of them; by default all rows may be such."""
    return _select(rows, rows.distribution[0], rows.distribution[2], most or rows.kv_lens.shape[0])


def _ends(first, lengths) -> jax.Array:
    return first + jnp.concatenate([jnp.zeros(1, lengths.dtype), jnp.cumsum(lengths)]).astype(jnp.int32)


def _index_in_row(kv_lens, cu_q_lens, num_tokens: int):
    """The row of each token and which of the row's kv_lens it is. Nonsense for tokens of no row."""
    token = jnp.arange(num_tokens)
    row = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], token, side="right"), kv_lens.shape[0] - 1)
    return row, kv_lens[row] - cu_q_lens[row + 1] + token


def spread_plan(rows: Rows, device: jax.Array, *, devices: int, num_tokens: int, num_chunks: int, page_size: int,
                axis_name: str, config: RingConfig, window: int | None) -> RingPlan:  # fmt: skip
    """Of the chunks, for `device`, with its num_tokens (T) of a step in `spread_order`. num_chunks: the most (R)."""
    config.check_page_size(page_size)
    some = chunks(rows, num_chunks)

    def part(device):
        stripes = StripedPositions(devices, device)
        kv_lens = stripes.held(some.kv_lens)
        cu_q_lens = _ends(stripes.held(some.first), kv_lens - stripes.held(some.kv_lens - some.new))
        _, index = _index_in_row(kv_lens, cu_q_lens, num_tokens)
        tiles = tiles_of(cu_q_lens, stripes.of(index, index), config.query_tokens)
        return kv_lens, cu_q_lens, tiles, blocks_of(stripes, some.page_table, kv_lens, page_size, config)

    kv_lens, cu_q_lens, tiles, _ = part(device)
    _, _, everyone, blocks = jax.vmap(part)(jnp.arange(devices))
    writes = writes_of(some.page_table, kv_lens, cu_q_lens, num_tokens, page_size)
    size = round_size(config, some.page_table, page_size)
    return plan_of(device, tiles, everyone.bounds, blocks, writes, size, axis_name, config, window)


def shared_plan(some: _Selected, device: jax.Array, *, devices: int, num_tokens: int, page_size: int, axis_name: str,
                config: RingConfig, window: int | None) -> RingPlan:  # fmt: skip
    """Of `decode_rows` or `chunks`, for `device`, which has all num_tokens tokens: a ring of one, whose tiles are never
    done. For `shared_attention`."""
    config.check_page_size(page_size)
    num_rows, stripes = some.kv_lens.shape[0], StripedPositions(devices, device)
    cu_q_lens, held = _ends(some.first, some.new), stripes.held(some.kv_lens)
    _, position = _index_in_row(some.kv_lens, cu_q_lens, num_tokens)
    tiles = tiles_of(cu_q_lens, position, config.query_tokens)
    blocks = blocks_of(stripes, some.page_table, held, page_size, config)

    # The device's own new tokens, in order, and which of all they are.
    mine = _ends(0, held - stripes.held(some.kv_lens - some.new))
    most = min(-(-num_tokens // devices) + num_rows, num_tokens)
    row, index = _index_in_row(held, mine, most)
    token = cu_q_lens[row + 1] - some.kv_lens[row] + stripes.of(index, index)
    token = jnp.where(jnp.arange(most) < mine[-1], token, num_tokens)
    writes = writes_of(some.page_table, held, mine, most, page_size)
    page, offset = (jnp.zeros(num_tokens, jnp.int32).at[token].set(a, mode="drop") for a in writes.slot)
    of_all = token.at[writes.token].get(mode="fill", fill_value=num_tokens)
    writes = writes._replace(slot=(page, offset), token=of_all)
    bounds, blocks = jax.tree.map(lambda a: a[None], (tiles.bounds, blocks))
    size = round_size(config, some.page_table, page_size)
    plan = plan_of(jnp.int32(0), tiles, bounds, blocks, writes, size, axis_name, config, window)
    return replace(plan, items=plan.items._replace(is_last=jnp.zeros_like(plan.items.is_last)))
