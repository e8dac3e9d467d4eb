"""Ring attention on TPU: a kernel that sends KV around the ring by remote DMA and attends meanwhile.

    own pages --remote DMA, page by page--> right neighbour's buffer --> its right neighbour's other buffer --> ...
        |                                        |
        +-- blocks of W tokens to VMEM           +-- blocks to VMEM: flash attention, query tile by query tile

The buffers (two of R blocks) are in HBM, as are the accumulators of tiles that a later step will go on with; in VMEM
everything that moves has two buffers: while a block is attended the next one arrives, also across tiles, and while a tile is
worked on the next tile's queries and accumulators arrive and the last one's leave.

Flow control. Each device grants its left neighbour two credits at the start, one for each buffer, and one more whenever it is
done with a buffer: attended, and sent on. A send takes one credit, so nothing arrives in a buffer in use, however far
one device runs ahead. A send's number decides its buffer on both sides. Whether a source's blocks travel at all
in a step follows from plan.hops, which all devices know; nobody waits for what nobody sends. Devices meet at a barrier
first, so that no neighbour writes into a buffer that still belongs to an earlier operation.

A small kernel before it writes the new tokens' pages, in place. It is one of its own because XLA gives a kernel with a barrier
outputs at addresses that are the same on all devices, which a donated argument does not have: with the cache as output of
the ring kernel, the compiler copies it whole in and out (seen in the memory analysis for v5e, v6e and v7x). As an input that is
only read it stays where it is.

Axis letters: N query heads, K kv heads, G = N / K, H lanes of a row of the cache, B page tokens; D devices; J tiles of
Q tokens, U rounds, R blocks of a round, C blocks in all, W tokens of a block, Y 2 (K and V) or 1 (packed).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.interpret import tpu_params
from pallas_kernels.ring_attention import pages
from pallas_kernels.ring_attention.config import MiB, RingShape, check_fit, vmem_bytes
from pallas_kernels.ring_attention.plan import Items, RingPlan

_MASKED = -1e30
_LOWEST = -1e29
_LANES = 128
_COLLECTIVE_ID = 11  # kernels with another pattern of communication must use another one
_VMEM_SLACK = 4 * MiB  # for what the compiler keeps beside our buffers


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
    queries: Any  # [J, K, Q G, H]
    query_positions: Any  # [J, 1, Q G]
    key_positions: Any  # [D * C, 1, W]
    kv_pages: Any  # [L, P, Y, K, B, H]
    ring: Any  # [2, R, W / B, Y, K, B, H]
    acc: Any  # [J, K, Q G, H] float32
    stat: Any  # [J, K, Q G, 128] float32: the maximum in the first half of the lanes, the sum in the second
    out: Any  # [J, K, Q G, H]


class _Vmem(NamedTuple):
    queries: Any  # [2, K, Q G, H]
    query_positions: Any  # [2, 1, Q G]
    query_column: Any  # [Q G, 128]
    acc: Any  # [2, K, Q G, H]
    stat: Any  # [2, K, Q G, 128]
    out: Any  # [K, Q G, H]
    kv: Any  # [2, W / B, Y, K, B, H]
    key_positions: Any  # [2, 1, W]


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
        for own in (True, False):
            @pl.when(step.own == own)
            def _(own=own):
                _for_each(self._pages_of(step, block), lambda page: body(page, self._source_page(step, block, page, own)))

    def enter(self) -> None:
        barrier = pltpu.get_barrier_semaphore()
        for neighbour in (self.left, self.right):
            pl.semaphore_signal(barrier, 1, device_id=neighbour)
        pl.semaphore_wait(barrier, 2)
        pl.semaphore_signal(self.sem.credit, 2)

    def leave(self) -> None:
        """Both buffers of the right neighbour are free again: no copy of ours is under way, the semaphore is at 0."""
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
            move(hbm.stat, vmem.stat)

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
            move(vmem.stat.at[slot], hbm.stat)

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
        rows = vmem.query_column.shape[0]
        # Positions come as a dense row; masks want them down a column.
        vmem.query_column[...] = jnp.broadcast_to(vmem.query_positions[slot], (_LANES, rows)).T

        @pl.when(self.smem.items.is_first[at] == 1)
        def _():
            vmem.acc[slot] = jnp.zeros(vmem.acc.shape[1:], jnp.float32)

            def one_head(head):
                if self.static.has_sinks:  # a key that was seen first, with a value of zeros
                    maximum, total = jnp.broadcast_to(self.sinks[head], (_LANES, rows)).T, 1.0
                else:
                    maximum, total = jnp.full((rows, _LANES), _LOWEST, jnp.float32), 0.0
                vmem.stat[slot, head] = jnp.where(_in_first_half((rows, _LANES)), maximum, total)

            _for_each(vmem.acc.shape[1], one_head)

    def _block(self, step: _Step, block, slot, kv_slot, masked: bool) -> None:
        """One tile against one block, head by head. Without `masked` all queries see all keys of the block."""
        vmem, static = self.vmem, self.static
        place = lax.rem(step.at, static.devices)
        self.visited[2 * place + masked] += 1
        if masked:
            keys, queries = vmem.key_positions[kv_slot], vmem.query_column[:, :1]  # [1, W], [Q G, 1]
            visible = keys <= queries
            if static.window is not None:
                visible &= keys > queries - static.window
            valid = self.smem.block_valid[step.source * static.blocks + step.first_block + block]

        def one_head(head):
            query = vmem.queries[slot, head]
            key, value = (
                vmem.kv[kv_slot, :, part, head].reshape(-1, query.shape[1]).astype(query.dtype)
                for part in (0, vmem.kv.shape[2] - 1)
            )
            scores = _dot(query, key, 1)
            if static.soft_cap is not None:
                scores = static.soft_cap * jnp.tanh(scores / static.soft_cap)
            if masked:
                scores = jnp.where(visible, scores, _MASKED)
                # Zeroed where no token is: 0 * NaN left there by an earlier owner would be NaN.
                value = jnp.where(lax.broadcasted_iota(jnp.int32, value.shape, 0) < valid, value, jnp.zeros_like(value))
            stat = vmem.stat[slot, head]
            old, total = stat[:, :1], stat[:, _LANES // 2 : _LANES // 2 + 1]
            maximum = jnp.maximum(old, scores.max(-1, keepdims=True))
            weights, keep = jnp.exp(scores - maximum), jnp.exp(old - maximum)
            total = total * keep + weights.sum(-1, keepdims=True)
            vmem.stat[slot, head] = jnp.where(_in_first_half(stat.shape), maximum, total)
            vmem.acc[slot, head] = vmem.acc[slot, head] * keep + _dot(weights.astype(value.dtype), value, 0)

        _for_each(vmem.acc.shape[1], one_head)

    def _finish(self, at, slot) -> None:
        vmem = self.vmem

        @pl.when(self.smem.items.is_last[at] == 1)
        def _():
            def one_head(head):
                total = vmem.stat[slot, head][:, _LANES // 2 : _LANES // 2 + 1]
                vmem.out[head] = (vmem.acc[slot, head] / jnp.maximum(total, 1e-30)).astype(vmem.out.dtype)

            _for_each(vmem.acc.shape[1], one_head)


def _for_each(count, body) -> None:
    def step(i, carry):
        body(i)
        return carry

    lax.fori_loop(0, count, step, 0)


def _in_first_half(shape) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, 1) < _LANES // 2


def _dot(a, b, contract_b: int) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contract_b,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _kernel(*refs, static: _Static):
    refs = iter(refs)

    def take(number: int):
        return [next(refs) for _ in range(number)]

    smem = _Scalars(*take(6), Items(*take(7)))
    inputs, (sinks,), outputs, (visited,) = take(4), take(1), take(4), take(1)
    kernel = _Kernel(static, smem, _Hbm(*inputs, *outputs), _Vmem(*take(8)), _Semaphores(*take(6)), sinks, visited)
    for place in range(2 * static.devices):
        visited[place] = 0
    kernel.enter()
    zero = jnp.int32(0)
    lax.fori_loop(0, smem.sizes[1] * static.devices, kernel.ring_step, (zero, zero))
    kernel.leave()


def _write_kernel(sizes, write_page, written, _, kv_pages, semaphore):
    """written [Wp, Y, K, B, H] to the pages write_page [Wp] of kv_pages [L, P, Y, K, B, H], all in HBM; sizes: layer, Wp used."""

    def copy(i):
        return pltpu.make_async_copy(written.at[i], kv_pages.at[sizes[0], write_page[i]], semaphore)

    _for_each(sizes[1], lambda i: copy(i).start())
    _for_each(sizes[1], lambda i: copy(i).wait())


def write_pages(written, kv_pages, layer, plan: RingPlan, *, interpret: bool = False) -> jax.Array:
    """kv_pages, in place, with the pages plan.write_page of a layer replaced."""
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        _write_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(1,), in_specs=[pl.BlockSpec(memory_space=pl.ANY), hbm], out_specs=hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        input_output_aliases={3: 0},
        name="ring_attention_write",
        interpret=tpu_params() if interpret else False,
    )(_integers(layer, plan.num_writes), plan.write_page.astype(jnp.int32), written, kv_pages)  # fmt: skip


def _integers(*values) -> jax.Array:
    return jnp.stack([jnp.asarray(value, jnp.int32) for value in values])


def shape_of(q, kv_pages, plan: RingPlan) -> RingShape:
    """What `config` needs to know, from the arrays of a call."""
    blocks = plan.block_page.shape[0]
    return RingShape(
        num_tokens=q.shape[0], num_rows=1, row_pages=blocks * plan.block_page.shape[1], num_heads=q.shape[1],
        num_kv_heads=kv_pages.shape[3], head_dim=q.shape[2], page_size=kv_pages.shape[4], devices=plan.count.shape[1],
        dtype=q.dtype, kv_dtype=kv_pages.dtype, packed=pages.is_packed(kv_pages, q.shape[2]),
    )  # fmt: skip


def _check(shape: RingShape, plan: RingPlan) -> int:
    """The VMEM limit for the compiler. ValueError for what the hardware cannot do or hold."""
    device = pltpu.get_tpu_info()
    sublanes = 32 // jnp.dtype(shape.kv_dtype).itemsize
    if shape.lanes % _LANES:
        raise ValueError(f"rows of the cache have {shape.lanes} numbers and must be a multiple of {_LANES}: for head "
                         f"size 64 use pages [L, P, 1, K, B, 128]")  # fmt: skip
    if shape.page_size % sublanes:
        raise ValueError(f"page_size={shape.page_size} must be a multiple of {sublanes} for {shape.kv_dtype}")
    if plan.config.query_tokens * shape.group % _LANES:
        raise ValueError(f"query_tokens={plan.config.query_tokens} times {shape.group} heads of a group must be a "
                         f"multiple of {_LANES}")  # fmt: skip
    check_fit(plan.config, shape, device.vmem_capacity_bytes - _VMEM_SLACK, device.smem_capacity_bytes)
    return min(device.vmem_capacity_bytes, vmem_bytes(plan.config, shape)["total"] + _VMEM_SLACK)


def ring_attention(q, k, v, kv_pages, layer, plan: RingPlan, *, scale, soft_cap=None, sinks=None, interpret=False):
    """See `api.ring_attention`. Returns (out, kv_pages, visited): visited [2 D] counts the blocks computed in each step
    of the ring, those without a mask and those with one."""
    shape = shape_of(q, kv_pages, plan)
    vmem_limit = None if interpret else _check(shape, plan)
    width, num_kv_heads = kv_pages.shape[5], kv_pages.shape[3]
    rounds, devices = plan.count.shape
    blocks, block_pages = plan.block_page.shape
    queries = pages.query_tiles(q, kv_pages, scale, plan)
    tiles, _, rows, _ = queries.shape
    static = _Static(plan.axis_name, devices, tiles, rounds, blocks // rounds, blocks, block_pages, kv_pages.shape[4],
                     plan.window, soft_cap, sinks is not None)  # fmt: skip
    sink = jnp.zeros((num_kv_heads, 1, rows)) if sinks is None else (
        pages.sink_rows(sinks, num_kv_heads, plan.config.query_tokens)[:, None])
    kv_pages = write_pages(pages.pages_to_write(k, v, kv_pages, layer, plan), kv_pages, layer, plan, interpret=interpret)
    scalars = _Scalars(
        _integers(layer, plan.num_rounds), plan.block_page, plan.block_valid, plan.round_blocks, plan.hops, plan.count,
        plan.items)  # fmt: skip
    prefetch = [a.astype(jnp.int32).reshape(-1) for a in jax.tree.leaves(scalars)]
    operands = [
        queries, pages.rows_of_tile(plan.tile_position, shape.group)[:, None],
        plan.block_position.reshape(-1, 1, plan.config.kv_tokens), kv_pages, sink,
    ]  # fmt: skip
    struct, tile = jax.ShapeDtypeStruct, (num_kv_heads, rows)
    ring = (2, blocks // rounds, block_pages, *kv_pages.shape[2:])
    # HBM where ANY would let the compiler move a small cache, or the ring's buffers, to VMEM and back.
    any_memory, hbm = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.HBM)
    dma = pltpu.SemaphoreType.DMA
    vmem = _Vmem(
        pltpu.VMEM((2, *tile, width), q.dtype), pltpu.VMEM((2, 1, rows), jnp.int32), pltpu.VMEM((rows, _LANES), jnp.int32),
        pltpu.VMEM((2, *tile, width), jnp.float32), pltpu.VMEM((2, *tile, _LANES), jnp.float32),
        pltpu.VMEM((*tile, width), q.dtype), pltpu.VMEM((2, *ring[2:]), kv_pages.dtype),
        pltpu.VMEM((2, 1, plan.config.kv_tokens), jnp.int32))  # fmt: skip
    semaphores = _Semaphores(dma((2,)), dma, dma((2,)), dma, dma((2,)), pltpu.SemaphoreType.REGULAR)
    _, _, _, out, visited = pl.pallas_call(
        partial(_kernel, static=static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch), grid=(1,),
            in_specs=[any_memory] * 3 + [hbm, pl.BlockSpec(memory_space=pltpu.VMEM)],
            out_specs=[hbm] * 3 + [any_memory, pl.BlockSpec(memory_space=pltpu.SMEM)],
            scratch_shapes=[*vmem, *semaphores],
        ),
        out_shape=[
            struct(ring, kv_pages.dtype), struct((tiles, *tile, width), jnp.float32),
            struct((tiles, *tile, _LANES), jnp.float32), struct(queries.shape, q.dtype),
            struct((2 * devices,), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(
            collective_id=_COLLECTIVE_ID, has_side_effects=True, vmem_limit_bytes=vmem_limit),
        name="ring_attention",
        interpret=tpu_params() if interpret else False,
    )(*prefetch, *operands)  # fmt: skip
    return pages.from_tiles(out, q.shape, shape.packed, plan), kv_pages, visited
