"""Ragged paged attention on TPUs: entry points, and the XLA around the two kernels.

    q, k, v ---XLA---> rows of one token:  q [S, K, D, R], new [S, X*K, R] ----> decode kernel ---+---> pages
                       longer rows:        q [K, tokens*G, R], each row's first token on a tile ---> mixed kernel

Rows of one token are bound by memory: a kernel of their own reads each page once, whole, and computes without masks.
The other kernel runs where the step's shape has room for longer rows (T > S); it starts where the first one ended, so
that one sees the other's writes. Both take the stacked pages of all layers in place.
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.devices import Device, MiB, device_of_kind
from pallas_kernels.interpret import tpu_params
from pallas_kernels.ragged_paged_attention.layout import KVLayout, KVPages
from pallas_kernels.ragged_paged_attention.mosaic_tpu import config
from pallas_kernels.ragged_paged_attention.mosaic_tpu.decode import decode_kernel
from pallas_kernels.ragged_paged_attention.mosaic_tpu.mixed import mixed_kernel
from pallas_kernels.ragged_paged_attention.mosaic_tpu.problem import LANES, LOG2E, LOWEST, Problem, cdiv
from pallas_kernels.ragged_paged_attention.reach import Reach
from pallas_kernels.ragged_paged_attention.spec import AttentionSpec
from quant.kv import QuantizedPages, quantize_rows

_HALF = LANES // 2


def unsupported(spec: AttentionSpec, device_kind: str | None) -> str | None:
    """What keeps this backend from serving `spec`, if anything. device_kind None: simulated."""
    size, group = jnp.dtype(spec.kv_dtype).itemsize, spec.num_heads // spec.num_kv_heads
    tile = 32 // size
    if jnp.dtype(spec.dtype).name not in ("float32", "bfloat16"):
        return f"queries of {jnp.dtype(spec.dtype).name}; it takes float32 and bfloat16"
    if jnp.dtype(spec.kv_dtype).name not in ("float32", "bfloat16", "int8", "float8_e4m3fn"):
        return f"pages of {jnp.dtype(spec.kv_dtype).name}; it takes float32, bfloat16, int8 and float8_e4m3fn"
    page, least = spec.page_size, LANES if size == 1 else tile
    if page & (page - 1) or not least <= page <= 512:
        why = "a page's scales fill whole lanes" if size == 1 else "rows of a memory tile"
        return (f"page_size={page} with {jnp.dtype(spec.kv_dtype).name} pages; it takes powers of two from {least} "
                f"({why}) to 512, such as {_nearest_page(page, least)}")  # fmt: skip
    if group > 32:
        return f"num_heads / num_kv_heads = {group}; it takes up to 32"
    if size == 1 and 2 * spec.num_kv_heads > LANES:
        return f"num_kv_heads={spec.num_kv_heads} with 8-bit pages; it takes up to {LANES // 2}"
    if spec.head_dim > 256:
        return f"head_dim={spec.head_dim}; it takes up to 256"
    if device_kind is not None:
        try:
            device = device_of_kind(device_kind)
        except KeyError as error:
            return str(error.args[0])
        problem = _problem(spec)
        try:
            config.decode_for(problem, 256, device)
            config.mixed_for(problem, device)
        except ValueError as error:
            return str(error)
    return None


def _nearest_page(page: int, least: int) -> int:
    return min(max(1 << (page - 1).bit_length() if page > 1 else 1, least), 512)


def layout(**fields) -> KVLayout:
    """Rows of whole lanes: heads of up to 64 hold K and V side by side, larger ones are padded to 128 or 256."""
    head_dim = fields["head_dim"]
    if head_dim <= _HALF:
        return KVLayout(**fields, row_dim=_HALF, side_by_side=True)
    return KVLayout(**fields, row_dim=cdiv(head_dim, LANES) * LANES)


def _problem(spec: AttentionSpec, **features) -> Problem:
    side_by_side = spec.head_dim <= _HALF
    return Problem(
        num_kv_heads=spec.num_kv_heads, group=spec.num_heads // spec.num_kv_heads, page_size=spec.page_size,
        row_lanes=cdiv(spec.head_dim, LANES) * LANES, planes=1 if side_by_side else 2,
        compute_dtype=jnp.dtype(spec.dtype), kv_dtype=jnp.dtype(spec.kv_dtype),
        **({"scale": 1.0, "quantized": jnp.dtype(spec.kv_dtype).itemsize == 1} | features),
    )  # fmt: skip


def ragged_paged_attention(
    q, k, v, kv_pages: KVPages, layer, page_table, kv_lens, cu_q_lens, distribution, *,
    scale, window=None, chunk=None, soft_cap=None, sinks=None, kv_bias=None, tree_mask=None, interpret: bool = False,
):  # fmt: skip
    """See `api.AttentionFn`. ValueError where the blocks or the page table do not fit."""
    values, scales = kv_pages if isinstance(kv_pages, QuantizedPages) else (kv_pages, None)
    num_tokens, num_heads, head_dim = q.shape
    spec = AttentionSpec(
        num_heads=num_heads, num_kv_heads=values.shape[3], head_dim=head_dim, page_size=values.shape[4],
        dtype=q.dtype, kv_dtype=values.dtype,
    )  # fmt: skip
    if (missing := unsupported(spec, None)) is not None:
        raise ValueError(f"ragged_paged_attention: {missing}")
    problem = _problem(
        spec, scale=scale, reach=Reach(window, chunk), soft_cap=soft_cap, quantized=scales is not None,
        biased=kv_bias is not None, sinks=sinks is not None, tree_words=0 if tree_mask is None else tree_mask.shape[1],
    )  # fmt: skip
    num_rows = kv_lens.shape[0]
    with jax.named_scope("ragged_paged_attention"):
        new = _new_rows(k, v, problem)
        queries = (q.astype(jnp.float32) * problem.query_factor).astype(q.dtype)
        queries = queries.reshape(num_tokens, problem.num_kv_heads, problem.group, head_dim)
        queries = jnp.pad(queries, ((0, 0),) * 3 + ((0, problem.row_lanes - head_dim),))
        scalars = [jnp.asarray(layer, jnp.int32).reshape(1), page_table.reshape(-1), kv_lens, distribution]
        extras = _Extras(scales, kv_bias, sinks, page_table.shape[1], interpret)

        out, values, extras.scales = _decode(queries[:num_rows], new[:num_rows], values, scalars, extras, problem)
        if num_tokens > num_rows:
            rows = _Rows.of(cu_q_lens, distribution, num_tokens, problem.group)
            scalars += [cu_q_lens, rows.starts]
            mixed, values, extras.scales = _mixed(queries, new, values, scalars, rows, tree_mask, extras, problem)
            decoded = (jnp.arange(num_rows) < distribution[0])[:, None, None, None]
            out = mixed.at[:num_rows].set(jnp.where(decoded, out, mixed[:num_rows]))
        if extras.scales is not None:
            values = QuantizedPages(values, extras.scales)
        first = _HALF if problem.planes == 1 else 0  # V's half of a row
        out = out[..., first : first + head_dim].reshape(q.shape)
    return out, values


def _new_rows(k, v, problem: Problem):
    """[T, X * K, R] f32, which holds every format exactly and can be shifted by single rows. Quantized: one row more,
    with the scales in lanes 0 .. 2K - 1."""
    new, scales = jnp.stack([k, v], axis=1), None  # [T, 2, K, H]
    if problem.quantized:
        new, scales = quantize_rows(new, problem.kv_dtype)
    else:
        new = new.astype(problem.kv_dtype)
    new = new.astype(jnp.float32)
    num_tokens, _, heads, head_dim = new.shape
    if problem.planes == 1:
        new = jnp.pad(new, ((0, 0),) * 3 + ((0, _HALF - head_dim),))
        new = jnp.concatenate([new[:, 0], new[:, 1]], axis=-1)
    else:
        new = jnp.pad(new, ((0, 0),) * 3 + ((0, problem.row_lanes - head_dim),))
        new = new.reshape(num_tokens, 2 * heads, problem.row_lanes)
    if scales is None:
        return new
    row = jnp.pad(scales.reshape(num_tokens, 1, -1), ((0, 0), (0, 0), (0, problem.row_lanes - 2 * heads)))
    return jnp.concatenate([new, row], axis=1)


class _Extras(SimpleNamespace):
    """Operands that not every problem has."""

    def __init__(self, scales, bias, sinks, max_pages, interpret):
        super().__init__(scales=scales, bias=bias, sinks=sinks, max_pages=max_pages, interpret=interpret)

    def paged(self, problem: Problem, blocks):
        """(name, array) in HBM, and (name, scratch) for them."""
        heads, size = problem.num_kv_heads, problem.page_size
        ring = (blocks.slots, blocks.fetch_pages)
        page = (problem.planes, heads, size, problem.row_lanes)
        inputs, scratch = [], [("values", pltpu.VMEM((*ring, *page), problem.kv_dtype))]
        if problem.quantized:
            inputs.append(("scales_in", self.scales))
            scratch.append(("scales", pltpu.VMEM((*ring, 2, heads, size), jnp.float32)))
        if problem.biased:
            inputs.append(("bias_hbm", self.bias))
            scratch.append(("bias", pltpu.VMEM((*ring, heads, size), jnp.float32)))
        return inputs, scratch

    def sink_rows(self, problem: Problem, num_rows: int):
        """[K, rows, 128]: row n is that of query head n % G; rows beyond are not used."""
        sinks = jnp.maximum(self.sinks.astype(jnp.float32) * LOG2E, LOWEST).reshape(problem.num_kv_heads, problem.group)
        sinks = jnp.tile(sinks, (1, cdiv(num_rows, problem.group)))[:, :num_rows]
        return jnp.broadcast_to(sinks[:, :, None], (*sinks.shape, LANES))


class _Rows(SimpleNamespace):
    """The step's rows beside those of one token, and where the mixed kernel's queries are."""

    @staticmethod
    def of(cu_q_lens, distribution, num_tokens: int, group: int) -> "_Rows":
        num_rows = cu_q_lens.shape[0] - 1
        step = config.aligned_tokens(group)
        index = jnp.arange(num_rows)
        lengths = cu_q_lens[1:] - cu_q_lens[:-1]
        long = (index >= distribution[0]) & (index < distribution[2])
        taken = jnp.where(long, (lengths + step - 1) // step * step, 0)
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(taken).astype(jnp.int32)])
        return _Rows(
            cu_q_lens=cu_q_lens, starts=starts, num_tokens=num_tokens, num_rows=num_rows,
            num_aligned=cdiv(num_tokens + min(num_rows, num_tokens // 2) * (step - 1), step) * step,
        )  # fmt: skip

    def _row_of(self, ends, index):
        return jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), self.num_rows - 1)

    def sources(self):
        """Aligned place -> token."""
        place = jnp.arange(self.num_aligned)
        row = self._row_of(self.starts[1:], place)
        return jnp.clip(self.cu_q_lens[row] + place - self.starts[row], 0, self.num_tokens - 1)

    def places(self):
        """Token -> aligned place; anything for tokens of no long row."""
        token = jnp.arange(self.num_tokens)
        row = self._row_of(self.cu_q_lens[1:], token)
        return jnp.clip(self.starts[row] + token - self.cu_q_lens[row], 0, self.num_aligned - 1)


def _decode(queries, new, values, scalars, extras: _Extras, problem: Problem):
    num_rows = queries.shape[0]
    if extras.interpret:
        blocks = config.small(config.decode_blocks(problem, num_rows), problem)
    else:
        blocks = config.decode_for(problem, num_rows, _device())
    heads, lanes, size = problem.num_kv_heads, problem.row_lanes, blocks.query_rows
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, size - problem.group), (0, 0)))

    def by_rows(shape):
        return pl.BlockSpec((blocks.rows, *shape), lambda i, *_: (i,) + (0,) * len(shape))

    paged, ring = extras.paged(problem, blocks)
    inputs = [
        ("q", queries, by_rows((heads, size, lanes))), ("new", new, by_rows(new.shape[1:])),
        *((name, array, pl.BlockSpec(memory_space=pl.ANY)) for name, array in [("kv_in", values), *paged]),
    ]  # fmt: skip
    if problem.sinks:
        whole = pl.BlockSpec((heads, size, LANES), lambda *_: (0, 0, 0))
        inputs.insert(2, ("sinks", extras.sink_rows(problem, size), whole))
    scratch = [
        *ring, ("stage", pltpu.VMEM((2, problem.planes, heads, problem.tile, lanes), problem.kv_dtype)),
        *_softmax_scratch(heads, size, lanes),
        ("fetched", pltpu.SemaphoreType.DMA((blocks.slots,))), ("written", pltpu.SemaphoreType.DMA((2,))),
        ("cursor", pltpu.SMEM((4,), jnp.int32)),
    ]  # fmt: skip
    if problem.quantized:
        scratch.append(("stage_scales", pltpu.VMEM((2, 2, heads, problem.page_size), jnp.float32)))
    return _call(
        partial(decode_kernel, problem=problem, blocks=blocks), "ragged_paged_attention_decode",
        list(zip(("layer", "page_table", "kv_lens", "distribution"), scalars, strict=True)), inputs,
        ("out", jax.ShapeDtypeStruct(queries.shape, queries.dtype), by_rows((heads, size, lanes))), scratch,
        (cdiv(num_rows, blocks.rows),), num_rows, num_rows, blocks, extras, problem,
        lambda out: out[:, :, : problem.group],
    )  # fmt: skip


def _mixed(queries, new, values, scalars, rows: _Rows, tree_mask, extras: _Extras, problem: Problem):
    if extras.interpret:
        blocks = config.small(config.mixed_blocks(problem), problem)
    else:
        blocks = config.mixed_for(problem, _device())
    heads, lanes, group, most = problem.num_kv_heads, problem.row_lanes, problem.group, blocks.query_rows[-1]
    source = rows.sources()

    def align(array):
        """[T, ...] to aligned places, and a query block more, which may be read but is not used."""
        return jnp.pad(array[source], ((0, cdiv(most, group)),) + ((0, 0),) * (array.ndim - 1))

    aligned = align(queries).transpose(1, 0, 2, 3).reshape(heads, -1, lanes)
    size = blocks.segment_tokens
    new = new.reshape(new.shape[0], -1, LANES)
    new = jnp.pad(new, ((size, size + 16 + -new.shape[0] % 8), (0, 0), (0, 0))).transpose(1, 0, 2)
    token = np.broadcast_to((np.arange(most) // group)[:, None], (most, LANES)).astype(np.int32)

    in_hbm, in_vmem = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)
    paged, ring = extras.paged(problem, blocks)
    inputs = [("q", aligned, in_hbm), ("new", new, in_hbm), ("token", jnp.asarray(token), in_vmem)]
    if problem.sinks:
        inputs.append(("sinks", extras.sink_rows(problem, most), in_vmem))
    if problem.tree_words:
        words = jnp.repeat(align(jax.lax.bitcast_convert_type(tree_mask, jnp.int32)), group, axis=0)
        inputs.append(("words", jnp.pad(words, ((0, 0), (0, LANES - words.shape[1]))), in_hbm))
        ring = [*ring, ("words_in", pltpu.VMEM((blocks.slots, most, LANES), jnp.int32))]
    inputs += [(name, array, in_hbm) for name, array in [("kv_in", values), *paged]]
    scratch = [
        *ring, ("queries", pltpu.VMEM((blocks.slots, heads, most, lanes), queries.dtype)),
        ("segments", pltpu.VMEM((blocks.segment_slots, problem.planes, heads, size, lanes), problem.kv_dtype)),
        ("incoming", pltpu.VMEM((blocks.segment_slots, new.shape[0], size + 8, LANES), jnp.float32)),
        *_softmax_scratch(heads, most, lanes), ("leaving", pltpu.VMEM((heads, most, lanes), queries.dtype)),
        ("fetched", pltpu.SemaphoreType.DMA((blocks.slots,))), ("arrived", pltpu.SemaphoreType.DMA((blocks.slots,))),
        ("segment_read", pltpu.SemaphoreType.DMA((blocks.segment_slots,))),
        ("segment_written", pltpu.SemaphoreType.DMA((blocks.segment_slots,))), ("left", pltpu.SemaphoreType.DMA(())),
        ("cursor", pltpu.SMEM((8,), jnp.int32)),
    ]  # fmt: skip
    if problem.quantized:
        scratch.append(("segment_scales", pltpu.VMEM((blocks.segment_slots, 2, heads, size), jnp.float32)))
    names = ("layer", "page_table", "kv_lens", "distribution", "cu_q_lens", "starts")
    place = rows.places()
    return _call(
        partial(mixed_kernel, problem=problem, blocks=blocks), "ragged_paged_attention_mixed",
        list(zip(names, scalars, strict=True)), inputs,
        ("out", jax.ShapeDtypeStruct(aligned.shape, queries.dtype), in_hbm), scratch, (1,),
        queries.shape[0], rows.num_rows, blocks, extras, problem,
        lambda out: out.reshape(heads, -1, group, lanes).transpose(1, 0, 2, 3)[place],
    )  # fmt: skip


def _softmax_scratch(heads: int, rows: int, lanes: int):
    return [
        ("maximum", pltpu.VMEM((heads, rows, LANES), jnp.float32)),
        ("total", pltpu.VMEM((heads, rows, LANES), jnp.float32)),
        ("output", pltpu.VMEM((heads, rows, lanes), jnp.float32)),
    ]


def _call(kernel, name, scalars, inputs, out, scratch, grid, num_queries, num_rows, blocks, extras, problem, finish):
    """One pallas_call whose refs reach the kernel by name. Pages and their scales are updated in place."""
    in_place = {"kv_in": "kv", "scales_in": "scales_hbm"}
    aliased = [i for i, (n, *_) in enumerate(inputs) if n in in_place]
    names = [*(n for n, *_ in scalars), *(n for n, *_ in inputs), "out", *(in_place[inputs[i][0]] for i in aliased),
             *(n for n, _ in scratch)]  # fmt: skip

    def body(*refs):
        kernel(SimpleNamespace(max_pages=extras.max_pages, **dict(zip(names, refs, strict=True))))

    params = None
    if not extras.interpret:
        device = _device()
        table = sum(array.size for _, array in scalars) * 4
        if table > device.smem_bytes - (64 << 10):
            raise ValueError(
                f"ragged_paged_attention: page_table, lengths and offsets are {table:,} bytes of scalar memory, which "
                f"has {device.smem_bytes:,}; fewer rows, or larger pages than {problem.page_size}, fit"
            )
        limit = min(blocks.vmem_bytes(problem) + 24 * MiB, device.vmem_bytes)
        params = pltpu.CompilerParams(
            vmem_limit_bytes=limit, disable_bounds_checks=True, dimension_semantics=("arbitrary",)
        )
    # Rows half as long as the page table: lengths are not known here.
    keys = extras.max_pages * problem.page_size / 2
    cost = pl.CostEstimate(
        flops=int(4 * num_queries * problem.num_kv_heads * problem.group * problem.row_lanes * keys),
        bytes_accessed=int(num_rows * keys * problem.token_bytes),
        transcendentals=int(num_queries * problem.num_kv_heads * problem.group * keys),
    )
    result, values, *scales = pl.pallas_call(
        body, out_shape=[out[1], *(jax.ShapeDtypeStruct(inputs[i][1].shape, inputs[i][1].dtype) for i in aliased)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=grid, in_specs=[spec for *_, spec in inputs],
            out_specs=[out[2], *(pl.BlockSpec(memory_space=pl.ANY) for _ in aliased)],
            scratch_shapes=[shape for _, shape in scratch],
        ),
        input_output_aliases={len(scalars) + i: n + 1 for n, i in enumerate(aliased)}, cost_estimate=cost, name=name,
        interpret=tpu_params() if extras.interpret else False, compiler_params=params,
    )(*(array for _, array in scalars), *(array for _, array, _ in inputs))  # fmt: skip
    return finish(result), values, scales[0] if scales else None


def _device() -> Device:
    """The TPU that is compiled for: in a deviceless compilation, that of the abstract mesh."""
    version = str(pltpu.get_tpu_info().chip_version)
    return device_of_kind({"7x": "v7x"}.get(version, version))
