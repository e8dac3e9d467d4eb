"""Ring attention on TPU: a kernel that sends KV around the ring by remote DMA and attends meanwhile.

    own pages --remote DMA, page by page--> right neighbour's buffer --> its right neighbour's other buffer --> ...
        |                                        |
        +-- blocks of W tokens to VMEM           +-- blocks to VMEM: flash attention, query tile by query tile

The buffers (two of R blocks) are in HBM, as are the accumulators of tiles that a later step will go on with. In VMEM
whatever moves has two buffers: while a block is attended the next one arrives, also across tiles; while a tile is
worked on the next tile's queries and accumulators arrive and the last one's leave.

Scores are made transposed, keys down and queries across: maxima and sums over keys are then plain vector operations
between registers, and a tile's maxima and sums are dense rows.

Flow control. Each device has two credits at the start, one for each buffer of its right neighbour, and gets one more
whenever that is done with a buffer: attended, and sent on. A send takes one credit, so nothing arrives in a buffer in
use, however far one device runs ahead. A send's number decides its buffer on both sides. Whether a source's blocks
travel at all in a step follows from plan.hops, which all devices know; nobody waits for what nobody sends. Devices meet
at a barrier first, so that no neighbour writes into a buffer that still belongs to an earlier operation.

A small kernel before it writes the new tokens, in place. It is one of its own because XLA gives a kernel with a
barrier outputs at addresses that are the same on all devices, which a donated argument does not have: with the cache
as an output of the ring kernel the compiler copies it whole, in and out (seen in its memory analysis for v6e). As an
input that is only read it stays where it is.

Axis letters: K kv heads, G query heads for each of them, H numbers in a row of the cache, B page tokens; D devices;
J tiles of Q tokens; U rounds of R blocks, C blocks in all, W tokens of a block; Y 2 (K and V) or 1 (side by side).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.devices import device_of_kind
from pallas_kernels.interpret import tpu_params
from pallas_kernels.ragged_paged_attention.spec import AttentionSpec
from pallas_kernels.ring_attention import pages
from pallas_kernels.ring_attention.config import LANES, Problem, check_fit, vmem_bytes
from pallas_kernels.ring_attention.plan import Items, RingPlan
from pallas_kernels.ring_attention.xla import Partial, merge_over, nothing, output_of
from quant.kv import QuantizedPages

_MASKED = -1e30
_LOWEST = -1e29
_LOG2_E = 1.4426950408889634
_PIECE = 128  # queries (times heads of a group) at a time: scores of 512 keys fill the registers
_WRITE_TILES = 32  # at a time: 2 MiB of VMEM for 8 kv heads of 128
_COLLECTIVE_ID = 11  # kernels with another pattern of communication must use another one


class _Scalars(NamedTuple):
    """Refs in SMEM."""

    sizes: Any  # [2]: layer, rounds
    block_page: Any  # [C * W / B]
    block_valid: Any  # [D * C]
    round_blocks: Any  # [D * U]
    hops: Any  # [D * U]
    count: Any  # [U * D]
    items: Items  # [U * D * J] each


class _Hbm(NamedTuple):
    queries: Any  # [J, K, H, Q G]
    query_positions: Any  # [J, 1, Q G]
    key_positions: Any  # [D * C, 1, W]
    kv_pages: Any  # [L, P, Y, K, B, H]
    ring: Any  # [2, R, W / B, Y, K, B, H]
    acc: Any  # [J, K, H, Q G] float32
    maximum: Any  # [J, K, 1, Q G] float32
    total: Any  # [J, K, 1, Q G] float32
    out: Any  # [J, K, H, Q G]


class _Vmem(NamedTuple):
    queries: Any  # [2, K, H, Q G]
    query_positions: Any  # [2, 1, Q G]
    acc: Any  # [2, K, H, Q G]
    maximum: Any  # [2, K, 1, Q G]
    total: Any  # [2, K, 1, Q G]
    out: Any  # [K, H, Q G]
    kv: Any  # [2, W / B, Y, K, B, H]
    key_positions: Any  # [2, 1, W]
    key_column: Any  # [W, 128]


class _Semaphores(NamedTuple):
    tile: Any  # DMA [2]
    store: Any  # DMA
    kv: Any  # DMA [2]
    send: Any  # DMA
    receive: Any  # DMA [2], one for each buffer of the ring
    credit: Any  # REGULAR


class _Static(NamedTuple):
    axis_name: str
    devices: int
    tiles: int
    rounds: int
    round_blocks: int
    blocks: int
    block_pages: int
    page_size: int
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    piece: int


class _Step(NamedTuple):
    """Where a device is in the ring; all traced int32."""

    at: jax.Array  # round * D + step
    own: jax.Array  # step == 0: the resident blocks are this device's own pages
    first_block: jax.Array  # round * R
    source: jax.Array  # whose blocks are here
    buffer: jax.Array  # in which of the two they are, unless own


class _Kernel:
    """The refs of one launch, and what is done with them. No state beside."""

    def __init__(self, static: _Static, smem: _Scalars, hbm: _Hbm, vmem: _Vmem, sem: _Semaphores, sinks, visited):
        self.static, self.smem, self.hbm, self.vmem, self.sem = static, smem, hbm, vmem, sem
        self.sinks, self.visited = sinks, visited
        self.me = lax.axis_index(static.axis_name)
        self.right = {static.axis_name: lax.rem(self.me + 1, static.devices)}
        self.left = {static.axis_name: lax.rem(self.me + static.devices - 1, static.devices)}

    # The ring.

    def _pages_of(self, step: _Step, block) -> jax.Array:
        """How many pages of the resident block (counted in the round) hold a token."""
        valid = self.smem.block_valid[step.source * self.static.blocks + step.first_block + block]
        return lax.div(valid + self.static.page_size - 1, self.static.page_size)

    def _source_page(self, step: _Step, block, page, own: bool):
        if own:
            index = self.smem.block_page[(step.first_block + block) * self.static.block_pages + page]
            return self.hbm.kv_pages.at[self.smem.sizes[0], index]
        return self.hbm.ring.at[step.buffer, block, page]

    def _each_page(self, step: _Step, block, body) -> None:
        """body(page, source ref) for the pages of a resident block; from the page table or from the buffer."""
        for own in (True, False) if self.static.devices > 1 else (True,):
            @pl.when(step.own == own)
            def _(own=own):
                _for_each(
                    self._pages_of(step, block), lambda page: body(page, self._source_page(step, block, page, own)))

    def enter(self) -> None:
        if self.static.devices == 1:
            return
        barrier = pltpu.get_barrier_semaphore()
        for neighbour in (self.left, self.right):
            pl.semaphore_signal(barrier, 1, device_id=neighbour)
        pl.semaphore_wait(barrier, 2)
        pl.semaphore_signal(self.sem.credit, 2)

    def leave(self) -> None:
        """Both buffers of the right neighbour are free again: no copy of ours is under way, the semaphore is at 0."""
        if self.static.devices == 1:
            return
        pl.semaphore_wait(self.sem.credit, 2)

    def send(self, step: _Step, blocks, to_buffer, start: bool) -> None:
        """Starts sending the resident blocks to the right, or waits until they have left."""

        def one_block(block):
            def one_page(page, source):
                copy = pltpu.make_async_remote_copy(
                    source, self.hbm.ring.at[to_buffer, block, page], self.sem.send, self.sem.receive.at[to_buffer],
                    device_id=self.right)  # fmt: skip
                if start:
                    copy.start()
                else:
                    copy.wait_send()

            self._each_page(step, block, one_page)

        _for_each(blocks, one_block)

    def receive(self, step: _Step, blocks) -> None:
        def one_block(block):
            def one_page(page):
                place = self.hbm.ring.at[step.buffer, block, page]
                pltpu.make_async_copy(place, place, self.sem.receive.at[step.buffer]).wait()

            _for_each(self._pages_of(step, block), one_page)

        _for_each(blocks, one_block)

    def ring_step(self, number, carry):
        """One step of one round. carry: how often this device has sent and received."""
        sends, receives = carry
        devices, rounds = self.static.devices, self.static.rounds
        round_, place = lax.div(number, devices), lax.rem(number, devices)
        source = lax.rem(self.me + devices - place, devices)
        step = _Step(number, place == 0, round_ * self.static.round_blocks, source, lax.rem(receives, 2))
        blocks = self.smem.round_blocks[source * rounds + round_]
        hops = self.smem.hops[source * rounds + round_]
        received, forward = (place > 0) & (place <= hops), place < hops

        @pl.when(received)
        def _():
            self.receive(step, blocks)

        @pl.when(forward)
        def _():
            pl.semaphore_wait(self.sem.credit, 1)
            self.send(step, blocks, lax.rem(sends, 2), start=True)

        @pl.when(self.smem.count[number] > 0)
        def _():
            self.attend(step)

        @pl.when(forward)
        def _():
            self.send(step, blocks, lax.rem(sends, 2), start=False)

        @pl.when(received)
        def _():
            pl.semaphore_signal(self.sem.credit, 1, device_id=self.left)

        return sends + forward.astype(jnp.int32), receives + received.astype(jnp.int32)

    # Attention.

    def _kv(self, step: _Step, block, slot, start: bool) -> None:
        """Starts, or waits for, the copy of a resident block and its positions to VMEM."""
        index = step.source * self.static.blocks + step.first_block + block
        copy = pltpu.make_async_copy(
            self.hbm.key_positions.at[index], self.vmem.key_positions.at[slot], self.sem.kv.at[slot])
        copy.start() if start else copy.wait()

        if start:
            self._each_page(step, block, lambda page, source: pltpu.make_async_copy(
                source, self.vmem.kv.at[slot, page], self.sem.kv.at[slot]).start())  # fmt: skip
        else:
            def one_page(page):
                place = self.vmem.kv.at[slot, page]
                pltpu.make_async_copy(place, place, self.sem.kv.at[slot]).wait()

            _for_each(self._pages_of(step, block), one_page)

    def _tile(self, at, slot, start: bool) -> None:
        """Starts, or waits for, the copies of an item's queries and, if it goes on with a tile, of its accumulators."""
        tile, hbm, vmem = self.smem.items.tile[at], self.hbm, self.vmem

        def move(source, place) -> None:
            copy = pltpu.make_async_copy(source.at[tile], place.at[slot], self.sem.tile.at[slot])
            copy.start() if start else copy.wait()

        move(hbm.queries, vmem.queries)
        move(hbm.query_positions, vmem.query_positions)

        @pl.when(self.smem.items.is_first[at] == 0)
        def _():
            move(hbm.acc, vmem.acc)
            move(hbm.maximum, vmem.maximum)
            move(hbm.total, vmem.total)

    def _store(self, at, slot, start: bool) -> None:
        """Starts, or waits for, the copy of an item's result: the output, or accumulators for a later step."""
        tile, hbm, vmem = self.smem.items.tile[at], self.hbm, self.vmem

        def move(source, place) -> None:
            copy = pltpu.make_async_copy(source, place.at[tile], self.sem.store)
            copy.start() if start else copy.wait()

        @pl.when(self.smem.items.is_last[at] == 1)
        def _():
            move(vmem.out, hbm.out)

        @pl.when(self.smem.items.is_last[at] == 0)
        def _():
            move(vmem.acc.at[slot], hbm.acc)
            move(vmem.maximum.at[slot], hbm.maximum)
            move(vmem.total.at[slot], hbm.total)

    def attend(self, step: _Step) -> None:
        """All items of a step, none of them empty."""
        base, count, items = step.at * self.static.tiles, self.smem.count[step.at], self.smem.items

        def one_item(number, blocks_done):
            at, slot = base + number, lax.rem(number, 2)
            first, end = items.first[at], items.end[at]
            self._tile(at, slot, start=False)
            self._begin(at, slot)

            def one_block(block, blocks_done):
                kv_slot = lax.rem(blocks_done, 2)
                last = block + 1 == end

                @pl.when(~last | (number + 1 < count))
                def _():
                    following = base + jnp.minimum(number + 1, count - 1)
                    self._kv(step, jnp.where(last, items.first[following], block + 1), 1 - kv_slot, start=True)

                self._kv(step, block, kv_slot, start=False)
                clear = (block >= items.clear_from[at]) & (block < items.clear_to[at])
                for masked in (True, False):
                    @pl.when(clear != masked)
                    def _(masked=masked):
                        self._block(step, block, slot, kv_slot, masked)

                # The other slot's accumulators have had a block's time to leave.
                @pl.when((block == first) & (number > 0))
                def _():
                    self._store(at - 1, 1 - slot, start=False)

                @pl.when((block == first) & (number + 1 < count))
                def _():
                    self._tile(at + 1, 1 - slot, start=True)

                return blocks_done + 1

            blocks_done = lax.fori_loop(first, end, one_block, blocks_done)
            self._finish(at, slot)
            self._store(at, slot, start=True)
            return blocks_done

        self._tile(base, 0, start=True)
        self._kv(step, items.first[base], 0, start=True)
        lax.fori_loop(0, count, one_item, jnp.int32(0))
        self._store(base + count - 1, lax.rem(count - 1, 2), start=False)

    def _begin(self, at, slot) -> None:
        vmem = self.vmem

        @pl.when(self.smem.items.is_first[at] == 1)
        def _():
            vmem.acc[slot] = jnp.zeros(vmem.acc.shape[1:], jnp.float32)
            if self.static.has_sinks:  # a key that was seen first, with a value of zeros
                vmem.maximum[slot] = self.sinks[...]
                vmem.total[slot] = jnp.ones(vmem.total.shape[1:], jnp.float32)
            else:
                vmem.maximum[slot] = jnp.full(vmem.maximum.shape[1:], _LOWEST, jnp.float32)
                vmem.total[slot] = jnp.zeros(vmem.total.shape[1:], jnp.float32)

    def _block(self, step: _Step, block, slot, kv_slot, masked: bool) -> None:
        """One tile against one block, head by head. Without `masked` every query sees every key of the block."""
        vmem, static = self.vmem, self.static
        self.visited[2 * lax.rem(step.at, static.devices) + masked] += 1
        valid = self.smem.block_valid[step.source * static.blocks + step.first_block + block]
        size = vmem.key_column.shape[0]
        if masked:  # positions come as a dense row, and the mask wants them down a column
            vmem.key_column[...] = jnp.broadcast_to(vmem.key_positions[kv_slot], (LANES, size)).T

        def one_head(head):
            key, value = (
                vmem.kv[kv_slot, :, part, head].reshape(size, -1).astype(vmem.queries.dtype)
                for part in (0, vmem.kv.shape[2] - 1)
            )
            if masked:  # zeroed where no token is: 0 * NaN left there by an earlier owner would be NaN
                present = lax.broadcasted_iota(jnp.int32, value.shape, 0) < valid
                value = jnp.where(present, value, jnp.zeros_like(value))
            value = value.T
            pieces = [pl.ds(start, static.piece) for start in range(0, vmem.acc.shape[3], static.piece)]
            coming = _dot(key, vmem.queries[slot, head, :, pieces[0]])
            for i, rows in enumerate(pieces):  # the next piece's scores are made while this one's are weighed
                scores = coming
                if i + 1 < len(pieces):
                    coming = _dot(key, vmem.queries[slot, head, :, pieces[i + 1]])
                self._piece(scores, value, slot, head, rows, masked)

        _for_each(vmem.acc.shape[1], one_head)

    def _piece(self, scores, value, slot, head, rows, masked: bool) -> None:
        """Some queries of a tile's head against a block: scores [W, rows], value [H, W]."""
        vmem, static = self.vmem, self.static
        if static.soft_cap is not None:
            scores = static.soft_cap * jnp.tanh(scores / static.soft_cap)
        if masked:
            keys, queries = vmem.key_column[:, :1], vmem.query_positions[slot, :, rows]  # [W, 1], [1, Q G]
            visible = keys <= queries
            if static.window is not None:
                visible &= keys > queries - static.window
            scores = jnp.where(visible, scores, _MASKED)
        old = vmem.maximum[slot, head, :, rows]
        maximum = jnp.maximum(old, scores.max(0, keepdims=True))
        weights, keep = jnp.exp2(scores - maximum), jnp.exp2(old - maximum)
        vmem.maximum[slot, head, :, rows] = maximum
        vmem.total[slot, head, :, rows] = vmem.total[slot, head, :, rows] * keep + weights.sum(0, keepdims=True)
        vmem.acc[slot, head, :, rows] = (
            vmem.acc[slot, head, :, rows] * keep + _dot(value, weights.astype(value.dtype)))

    def _finish(self, at, slot) -> None:
        vmem = self.vmem

        @pl.when(self.smem.items.is_last[at] == 1)
        def _():
            def one_head(head):
                total = jnp.maximum(vmem.total[slot, head], 1e-30)
                vmem.out[head] = (vmem.acc[slot, head] / total).astype(vmem.out.dtype)

            _for_each(vmem.acc.shape[1], one_head)


def _for_each(count, body) -> None:
    def step(i, carry):
        body(i)
        return carry

    lax.fori_loop(0, count, step, 0)


def _dot(a, b) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _kernel(*refs, static: _Static):
    refs = iter(refs)

    def take(number: int):
        return [next(refs) for _ in range(number)]

    smem = _Scalars(*take(6), items=Items(*take(7)))
    inputs, (sinks,), outputs, (visited,) = take(4), take(1), take(5), take(1)
    kernel = _Kernel(static, smem, _Hbm(*(inputs + outputs)), _Vmem(*take(9)), _Semaphores(*take(6)), sinks, visited)
    for place in range(2 * static.devices):
        visited[place] = 0
    kernel.enter()
    zero = jnp.int32(0)
    lax.fori_loop(0, smem.sizes[1] * static.devices, kernel.ring_step, (zero, zero))
    kernel.leave()


class _Writes(NamedTuple):
    """Refs in SMEM."""

    sizes: Any  # [2]: layer, tiles in use
    page: Any  # [X]
    place: Any  # [X]
    first: Any  # [X]
    end: Any  # [X]


def _write_kernel(*refs):
    """new [X, Y, K, Z, H] to tiles of kv_pages [L, P, Y, K, B, H], both in HBM; old and fresh [W, Y, K, Z, H] in VMEM.

    Many tiles at a time, so that it is the memory's bandwidth that counts and not its latency: all are fetched, merged
    with what they held, and stored.
    """
    smem, (new, _, kv_pages, old, fresh, semaphores) = _Writes(*refs[:5]), refs[5:]
    most, size = old.shape[0], old.shape[3]

    def tile(at):
        return kv_pages.at[smem.sizes[0], smem.page[at], :, :, pl.ds(pl.multiple_of(smem.place[at] * size, size), size)]

    def some(group):
        base = group * most
        count = jnp.minimum(smem.sizes[1] - base, most)

        def fetch(i, start: bool) -> None:
            for source, place in ((tile(base + i), old.at[i]), (new.at[base + i], fresh.at[i])):
                copy = pltpu.make_async_copy(source, place, semaphores.at[0])
                copy.start() if start else copy.wait()

        def merge(i) -> None:
            slot = lax.broadcasted_iota(jnp.int32, old.shape[1:], 2)
            is_new = (slot >= smem.first[base + i]) & (slot < smem.end[base + i])
            wide = [ref[i].astype(jnp.float32) for ref in (fresh, old)]  # masks are of 32 bits
            old[i] = jnp.where(is_new, *wide).astype(old.dtype)
            pltpu.make_async_copy(old.at[i], tile(base + i), semaphores.at[1]).start()

        _for_each(count, partial(fetch, start=True))
        _for_each(count, partial(fetch, start=False))
        _for_each(count, merge)
        _for_each(count, lambda i: pltpu.make_async_copy(old.at[i], tile(base + i), semaphores.at[1]).wait())

    _for_each(pl.cdiv(smem.sizes[1], most), some)


def write_tiles(new, kv_pages, layer, plan: RingPlan, *, interpret: bool = False) -> jax.Array:
    """kv_pages, in place, with the new tokens of a layer; new: from `pages.new_tiles`."""
    writes, hbm = plan.writes, pl.BlockSpec(memory_space=pltpu.HBM)
    group = pltpu.VMEM((min(_WRITE_TILES, new.shape[0]), *new.shape[1:]), kv_pages.dtype)
    scalars = (_integers(layer, writes.num_tiles), writes.page, writes.place, writes.first, writes.end)
    return pl.pallas_call(
        _write_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5, grid=(1,), in_specs=[pl.BlockSpec(memory_space=pl.ANY), hbm], out_specs=hbm,
            scratch_shapes=[group, group, pltpu.SemaphoreType.DMA((2,))],
        ),
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        input_output_aliases={6: 0},
        name="ring_attention_write",
        interpret=tpu_params() if interpret else False,
    )(*(a.astype(jnp.int32) for a in scalars), new, kv_pages)  # fmt: skip


def _piece(rows: int) -> int:
    return _PIECE if rows % _PIECE == 0 else rows


def _integers(*values) -> jax.Array:
    return jnp.stack([jnp.asarray(value, jnp.int32) for value in values])


def unsupported(spec: AttentionSpec, kind: str | None) -> str | None:
    """Why the kernel cannot serve a spec on a device of this kind (None: simulated), or None."""
    if spec.kv_dtype not in (jnp.bfloat16, jnp.float32):
        return f"kv_dtype {jnp.dtype(spec.kv_dtype).name} is not bfloat16 or float32"
    if kind is None:
        return None
    sublanes = 32 // jnp.dtype(spec.kv_dtype).itemsize
    if spec.page_size % sublanes:
        return (f"page_size={spec.page_size} is not a multiple of {sublanes}, the rows of a tile of "
                f"{jnp.dtype(spec.kv_dtype).name}")  # fmt: skip
    try:
        device_of_kind(kind)
    except KeyError as error:
        return str(error.args[0])
    return None


def problem_of(q, kv_pages, plan: RingPlan) -> Problem:
    """What `config` needs to know of a call."""
    how = pages.stored(kv_pages, q.shape[2])
    blocks, block_pages = plan.block_page.shape
    return Problem(
        num_tokens=q.shape[0], num_rows=1, row_pages=blocks * block_pages, num_heads=q.shape[1],
        num_kv_heads=how.num_kv_heads, row_dim=how.row_dim, page_size=kv_pages.shape[4], devices=plan.count.shape[1],
        dtype=q.dtype.name, kv_dtype=kv_pages.dtype.name, side_by_side=how.side_by_side,
    )  # fmt: skip


def _check(problem: Problem, plan: RingPlan) -> int:
    """The VMEM limit for the compiler. ValueError for what the hardware cannot do or hold."""
    if problem.lanes != (2 if problem.side_by_side else 1) * problem.row_dim:
        raise ValueError(f"rows of the cache must be a multiple of {LANES} numbers, not {problem.row_dim}: for head "
                         f"size 64 keep K and V side by side, [L, P, 1, K, B, 128]; else pad a head")  # fmt: skip
    if plan.config.query_tokens * problem.group % LANES or plan.config.kv_tokens % LANES:
        raise ValueError(f"query_tokens={plan.config.query_tokens} times {problem.group} heads of a group and "
                         f"kv_tokens={plan.config.kv_tokens} must be multiples of {LANES}")  # fmt: skip
    # "v6e", "7x": of the chip that is compiled for, which may not be here.
    version = str(pltpu.get_tpu_info().chip_version.value)  # pyright: ignore[reportAttributeAccessIssue]
    check_fit(plan.config, problem, device_of_kind(version if version.startswith("v") else f"v{version}"))
    return sum(vmem_bytes(plan.config, problem).values())


def ring_attention(q, k, v, kv_pages, layer, plan: RingPlan, *, scale, soft_cap=None, sinks=None, interpret=False):
    """See `api.RingFn`. Returns (out, kv_pages, visited): visited [2 D] counts the blocks computed in each step of the
    ring, those without a mask and those with one."""
    out, _, kv_pages, visited = _launch(q, k, v, kv_pages, layer, plan, scale, soft_cap, sinks, interpret)
    how = pages.stored(kv_pages, q.shape[2])
    return pages.from_tiles(out.swapaxes(2, 3), q.shape, how, plan), kv_pages, visited


def shared_attention(q, k, v, kv_pages, layer, plan: RingPlan, *, scale, soft_cap=None, sinks=None, interpret=False):
    """See `xla.shared_attention`: a ring of one gives each device's partial softmaxes."""
    _, acc, kv_pages, _ = _launch(q, k, v, kv_pages, layer, plan, scale, soft_cap, None, interpret)
    attended = plan.items.tile[0, 0], jnp.arange(plan.tile_token.shape[0]) < plan.count[0, 0]
    seen = jnp.zeros(plan.tile_token.shape[0], bool).at[attended[0]].set(attended[1] & (plan.num_rounds > 0))
    acc = Partial(*(jnp.where(seen.reshape(-1, *(1,) * (a.ndim - 1)), a, b)
                    for a, b in zip(acc, nothing(acc.maximum.shape, acc.output.shape[-1]), strict=True)))
    return output_of(merge_over(plan.axis_name, acc), q, kv_pages, plan, sinks), kv_pages


def _launch(q, k, v, kv_pages, layer, plan: RingPlan, scale, soft_cap, sinks, interpret: bool):
    """(output [J, K, H, Q G], accumulators of tiles that go on as a `Partial`, kv_pages, visited)."""
    if isinstance(kv_pages, QuantizedPages):
        raise ValueError("mosaic_tpu's ring attention has no quantized KV; backend 'xla' has")
    how, problem = pages.stored(kv_pages, q.shape[2]), problem_of(q, kv_pages, plan)
    vmem_limit = None if interpret else _check(problem, plan)
    width, num_kv_heads = how.width, how.num_kv_heads
    rounds, devices = plan.count.shape
    blocks, block_pages = plan.block_page.shape
    # Scores in base 2, so that exp2, which is what the hardware has, needs no product before it.
    queries = pages.query_tiles(q, kv_pages, scale * _LOG2_E, plan).swapaxes(2, 3)
    tiles, rows = queries.shape[0], queries.shape[3]
    static = _Static(plan.axis_name, devices, tiles, rounds, blocks // rounds, blocks, block_pages, kv_pages.shape[4],
                     plan.window, soft_cap and soft_cap * _LOG2_E, sinks is not None, _piece(rows))  # fmt: skip
    sink = jnp.zeros((num_kv_heads, 1, rows)) if sinks is None else (
        pages.sink_rows(sinks * _LOG2_E, num_kv_heads, plan.config.query_tokens)[:, None])
    kv_pages = write_tiles(pages.new_tiles(k, v, kv_pages, plan), kv_pages, layer, plan, interpret=interpret)
    scalars = _Scalars(
        _integers(layer, plan.num_rounds), plan.block_page, plan.block_valid, plan.round_blocks, plan.hops, plan.count,
        plan.items)  # fmt: skip
    prefetch = [a.astype(jnp.int32).reshape(-1) for a in jax.tree.leaves(scalars)]
    operands = [
        queries, pages.rows_of_tile(plan.tile_position, problem.group)[:, None],
        plan.block_position.reshape(-1, 1, plan.config.kv_tokens), kv_pages, sink,
    ]  # fmt: skip
    struct = jax.ShapeDtypeStruct
    ring = (2, blocks // rounds if devices > 1 else 1, block_pages, *kv_pages.shape[2:])
    # HBM where ANY would let the compiler move a small cache, or the ring's buffers, to VMEM and back.
    any_memory, hbm = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.HBM)
    dma = pltpu.SemaphoreType.DMA
    vmem = _Vmem(
        queries=pltpu.VMEM((2, num_kv_heads, width, rows), q.dtype),
        query_positions=pltpu.VMEM((2, 1, rows), jnp.int32),
        acc=pltpu.VMEM((2, num_kv_heads, width, rows), jnp.float32),
        maximum=pltpu.VMEM((2, num_kv_heads, 1, rows), jnp.float32),
        total=pltpu.VMEM((2, num_kv_heads, 1, rows), jnp.float32),
        out=pltpu.VMEM((num_kv_heads, width, rows), q.dtype),
        kv=pltpu.VMEM((2, *ring[2:]), kv_pages.dtype),
        key_positions=pltpu.VMEM((2, 1, plan.config.kv_tokens), jnp.int32),
        key_column=pltpu.VMEM((plan.config.kv_tokens, LANES), jnp.int32),
    )
    semaphores = _Semaphores(dma((2,)), dma, dma((2,)), dma, dma((2,)), pltpu.SemaphoreType.REGULAR)
    _, acc, maximum, total, out, visited = pl.pallas_call(
        partial(_kernel, static=static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch), grid=(1,),
            in_specs=[any_memory] * 3 + [hbm, pl.BlockSpec(memory_space=pltpu.VMEM)],
            out_specs=[hbm] * 4 + [any_memory, pl.BlockSpec(memory_space=pltpu.SMEM)],
            scratch_shapes=[*vmem, *semaphores],
        ),
        out_shape=[
            struct(ring, kv_pages.dtype), struct(queries.shape, jnp.float32),
            struct((tiles, num_kv_heads, 1, rows), jnp.float32), struct((tiles, num_kv_heads, 1, rows), jnp.float32),
            struct(queries.shape, q.dtype), struct((2 * devices,), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(
            collective_id=_COLLECTIVE_ID if devices > 1 else None, has_side_effects=True,
            vmem_limit_bytes=vmem_limit),
        name="ring_attention",
        interpret=tpu_params() if interpret else False,
    )(*prefetch, *operands)  # fmt: skip
    going_on = Partial(maximum[:, :, 0] / _LOG2_E, total[:, :, 0], acc.swapaxes(2, 3))
    return out, going_on, kv_pages, visited
