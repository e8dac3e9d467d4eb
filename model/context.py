"""Attention over a `context` axis: the tokens of every sequence, and their KV, are striped over its devices.

A page of B x C tokens, as the scheduler sees it, is a page of B tokens on each of the C devices: token t of a sequence
is on device t mod C. So one page table serves all, and whatever knows pages (prefix cache, preemption) need not know.

A step in which every row has one token is decoding: all devices have all queries and attend to their own KV. A step
with chunks of prompts does the same, or, under `spread_rules`, has its tokens spread over the axis too, so that the
axis shares the whole work of a long prompt; then KV goes around a ring.

Axis letters: G data groups, C devices of the context axis; T tokens, S rows, of one group; N query heads, K kv heads,
H head dim.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from model.batch import ROW_AXES, StepBatch
from pallas_kernels.ragged_paged_attention import api as paged
from pallas_kernels.ragged_paged_attention.api import KVLayout
from pallas_kernels.ring_attention import api as ring
from sharding.rules import Axes, AxisRules

AXIS = "context"


class Plans(NamedTuple):
    """Of one step and window. None: there are no such rows, or they need no plan."""

    decode: ring.RingPlan | None
    chunks: ring.RingPlan | None


_Model = TypeVar("_Model", bound=nnx.Module)
_Tree = TypeVar("_Tree")


def spread_rules(rules: AxisRules) -> AxisRules:
    """For steps whose tokens are spread over the context axis."""
    return replace(rules, rules={**rules.rules, "tokens": ("data", AXIS)})


def spread_model(model: _Model) -> _Model:
    """The same parameters under `spread_rules`; the model stays as it is."""
    model = nnx.merge(*nnx.split(model))
    for _, part in nnx.iter_graph(model):
        if isinstance(rules := getattr(part, "rules", None), AxisRules):
            part.rules = spread_rules(rules)
    return model


def is_spread(rules: AxisRules) -> bool:
    return AXIS in rules.rules["tokens"]


class WaysBack(NamedTuple):
    """From a spread step to the order of its rows; used within `map_over_shards`, where a device has one group's."""

    place: jax.Array  # [G, T] of each token

    def hidden_at(self, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        """Of some tokens, in the order of their rows: [n, D] on all devices, from hidden states [T / C, D]."""
        here = self.place[0, tokens] - lax.axis_index(AXIS) * len(hidden)
        held = (here >= 0) & (here < len(hidden))
        return lax.psum(jnp.where(held[:, None], hidden[jnp.where(held, here, 0)], 0), AXIS)

    def packed(self, tree: _Tree) -> _Tree:
        """A tree of [T / C, ...] as [T, ...], on all devices."""
        return jax.tree.map(lambda x: lax.all_gather(x, AXIS, tiled=True)[self.place[0]], tree)


class Spread(NamedTuple):
    """A step's tokens on their places."""

    batch: StepBatch
    targets: jax.Array  # [G T]
    ways_back: WaysBack


def spread_step(rules: AxisRules, batch: StepBatch, targets: jax.Array) -> Spread:
    """From a step in the order of its rows to one under `spread_rules`. targets: of its tokens."""
    devices, groups, tokens = rules.mesh.shape[AXIS], rules.num_groups, ("packed_tokens",)

    def local(of_tokens, *of_rows: jax.Array):
        rows = ring.Rows(*of_rows)
        order = ring.spread_order(rows, devices, len(of_tokens[0]))
        real = order.source < len(order.source)
        return (real, *map(order.spread, of_tokens)), WaysBack(order.place[None])

    (real, ids, positions, targets), ways_back = rules.map_over_shards(
        local, ((batch.tokens, batch.positions, targets), *batch.of_rows), (tokens, *ROW_AXES),
        (tokens, ("groups", None)), (batch.tokens.shape, (groups, len(batch.tokens) // groups)),
    )  # fmt: skip
    return Spread(batch._replace(tokens=ids, positions=positions, real=real), targets, ways_back)


@dataclass(frozen=True, kw_only=True)
class ContextAttention:
    """storage: whose pages these are; its own attention is not used. Page sizes are those of one device."""

    storage: paged.Backend
    backend: ring.Backend
    devices: int

    @property
    def choice(self) -> paged.Choice:
        chosen = self.backend
        return paged.Choice(name=chosen.name, simulated=chosen.simulated, fallback=chosen.fallback)

    def layout(self, num_layers: int, num_pages: int, num_kv_heads: int) -> KVLayout:
        """Of all devices' pages together."""
        layout = self.storage.layout(num_layers, num_pages, num_kv_heads)
        return replace(layout, page_size=layout.page_size * self.devices)

    def plans(self, rules: AxisRules, batch: StepBatch, windows: Iterable[int | None]) -> Mapping[int, Plans]:
        """What attention in all layers of a step needs to know, by the window (0: none); made once a step."""
        sizes = len(batch.tokens) // rules.num_groups, len(batch.kv_lens) // rules.num_groups
        make = partial(self._plans, *sizes, batch.page_table.shape[1], is_spread(rules))
        wanted = {window or 0: window for window in windows}

        def local(*of_rows: jax.Array):
            plans = {key: make(ring.Rows(*of_rows), window) for key, window in wanted.items()}
            return (jax.tree.map(lambda x: x[None], plans),)

        shape = (rules.num_groups * self.devices,)
        (plans,) = rules.map_over_shards(local, batch.of_rows, ROW_AXES, (_PLANS,), (shape,))
        return plans

    def _plans(self, num_tokens: int, num_rows: int, row_pages: int, spread: bool, rows: ring.Rows, window: int | None
               ) -> Plans:  # fmt: skip
        """Of one device, for T tokens and S rows."""
        spec, me = self.storage.spec, lax.axis_index(AXIS)
        stored = self.storage.layout(1, 1, spec.num_kv_heads)
        config = partial(self.backend.config, row_pages=row_pages, row_dim=stored.row_dim,
                         side_by_side=stored.side_by_side)  # fmt: skip
        shared, spread_over = (
            partial(make, device=me, devices=self.devices, page_size=spec.page_size, axis_name=AXIS, window=window)
            for make in (ring.shared_plan, ring.spread_plan)
        )
        decode = chunks = None
        if self.backend.tiles_decode:
            how = config(num_tokens=num_rows, num_rows=num_rows, devices=1)
            decode = shared(ring.decode_rows(rows), num_tokens=num_rows, config=how)
        if spread:
            most, per_device = min(ring.MAX_CHUNKS, num_rows), num_tokens // self.devices
            how = config(num_tokens=per_device, num_rows=most, devices=self.devices)
            chunks = spread_over(rows, num_tokens=per_device, num_chunks=most, config=how)
        elif num_tokens > num_rows:
            how = config(num_tokens=num_tokens, num_rows=num_rows, devices=1)
            chunks = shared(ring.chunks(rows), num_tokens=num_tokens, config=how)
        return Plans(decode, chunks)

    def __call__(self, rules: AxisRules, q: jax.Array, k: jax.Array, v: jax.Array, kv_pages: jax.Array,
                 layer: jax.Array, batch: StepBatch, *, scale: float, window: int | None, soft_cap: float | None,
                 sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """As `model.layers.Attention` has them: of all devices."""
        assert batch.plans is not None
        heads, kv_heads = ("tokens", "heads", "head_dim"), ("tokens", "kv_heads", "head_dim")
        attend = partial(self._attend_spread if is_spread(rules) else self._attend, window=window)
        options = dict(scale=scale, soft_cap=soft_cap)

        def local(q, k, v, kv_pages, layer, plans, sinks, *of_rows):
            plans = jax.tree.map(lambda x: x[0], plans)
            return attend(q, k, v, kv_pages, layer, ring.Rows(*of_rows), plans, options=dict(options, sinks=sinks))

        return rules.map_over_shards(
            local, (q, k, v, kv_pages, layer, batch.plans[window or 0], sinks, *batch.of_rows),
            (heads, kv_heads, kv_heads, KVLayout.axes, (), _PLANS, ("heads",), *ROW_AXES), (heads, KVLayout.axes),
            (q.shape, kv_pages.shape),
        )  # fmt: skip

    # On one device.

    def _attend(self, q, k, v, kv_pages, layer, rows: ring.Rows, plans: Plans, *, window, options):
        size = len(rows.kv_lens)
        of_rows, kv_pages = self._decode(q[:size], k[:size], v[:size], kv_pages, layer, rows, plans, window, options)
        if plans.chunks is None:
            return of_rows, kv_pages
        out, kv_pages = self.backend.shared(q, k, v, kv_pages, layer, plans.chunks, **options)
        return _first(out, of_rows, rows.distribution[0]), kv_pages

    def _attend_spread(self, q, k, v, kv_pages, layer, rows: ring.Rows, plans: Plans, *, window, options):
        """A row s of one token is at place s // C of device s % C; for decoding all devices get it."""
        me, size = lax.axis_index(AXIS), len(rows.kv_lens)
        count = -(-size // self.devices)
        assert plans.chunks is not None
        one = [lax.all_gather(x[:count], AXIS, axis=1).reshape(-1, *x.shape[1:])[:size] for x in (q, k, v)]
        of_rows, kv_pages = self._decode(one[0], one[1], one[2], kv_pages, layer, rows, plans, window, options)
        of_rows = jnp.pad(of_rows, ((0, count * self.devices - size), (0, 0), (0, 0)))
        mine = of_rows.reshape(count, self.devices, *of_rows.shape[1:])[:, me]
        out, kv_pages = self.backend.attend(q, k, v, kv_pages, layer, plans.chunks, **options)
        return _first(out, mine, ring.StripedPositions(self.devices, me).held(rows.distribution[0])), kv_pages

    def _decode(self, q, k, v, kv_pages, layer, rows: ring.Rows, plans: Plans, window, options):
        """The first distribution[0] rows, of one token each; q, k and v [S, ...]."""
        out, kv_pages = self._decode_rows(q, k, v, kv_pages, layer, rows, plans, window, options)
        # What is written next comes after these reads: otherwise XLA reads from a copy of the cache.
        return lax.optimization_barrier((out, kv_pages))

    def _decode_rows(self, q, k, v, kv_pages, layer, rows: ring.Rows, plans: Plans, window, options):
        if plans.decode is not None:
            return self.backend.shared(q, k, v, kv_pages, layer, plans.decode, **options)
        used = jnp.arange(len(rows.kv_lens)) < rows.distribution[0]
        stripes = ring.StripedPositions(self.devices, lax.axis_index(AXIS))
        position = rows.kv_lens - 1
        return ring.context_decode_attention(
            q, k, v, kv_pages, layer, stripes, rows.page_table, jnp.where(used, stripes.held(rows.kv_lens), 0),
            position, used & (position % self.devices == stripes.device), axis_name=AXIS, window=window, **options,
        )  # fmt: skip


_PLANS: Axes = ("plans",)


def _first(out: jax.Array, of_rows: jax.Array, count: jax.Array) -> jax.Array:
    """`out` with its first `count` tokens replaced."""
    size = len(of_rows)
    return out.at[:size].set(jnp.where((jnp.arange(size) < count)[:, None, None], of_rows, out[:size]))


def choose_context_attention(spec: paged.AttentionSpec, device, name: str, devices: int) -> ContextAttention:
    """spec: with the page size of one device. Raises ValueError with what is missing."""
    if name == "mosaic_gpu":
        raise ValueError("attention backend 'mosaic_gpu' has no ring attention: --mesh context=... takes auto or xla")
    chosen = ring.choose_backend(name, spec, device)
    return ContextAttention(storage=paged.choose_backend(chosen.name, spec, device), backend=chosen, devices=devices)
