"""What is counted in compiled programs: texts as TPU and GPU compilers print them, shortened, and programs of known
size compiled for simulated devices."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.planning.counting import Collective, Kernel, count, group
from scripts.planning.hlo import parse

# A loop whose bound is only in its condition, a weight sliced inside a fusion, S(1) for VMEM, a kernel with an
# estimate, and a conditional whose first branch does nothing.
TPU = """HloModule jit_step, is_scheduled=true

%add.clone (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[]{:T(256)} parameter(0)
  %y = bf16[]{:T(256)} parameter(1)
  ROOT %add.1 = bf16[]{:T(256)} add(%x, %y)
}

%fused_computation.1 (param_0: bf16[6,32,64], param_1: s32[], param_2: bf16[8,32]) -> bf16[8,64] {
  %param_2 = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  %param_0 = bf16[6,32,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %slice = bf16[1,32,64]{2,1,0:T(8,128)(2,1)} dynamic-slice(%param_0, %param_1, %zero, %zero), dynamic_slice_sizes={1,32,64}
  %flat = bf16[32,64]{1,0:T(8,128)(2,1)} bitcast(%slice)
  ROOT %product = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} convolution(%param_2, %flat), dim_labels=bf_io->bf
}

%body (arg: (s32[], bf16[6,32,64], bf16[8,32], bf16[4,16])) -> (s32[], bf16[6,32,64], bf16[8,32], bf16[4,16]) {
  %arg = (s32[]{:T(128)}, bf16[6,32,64]{2,1,0:T(8,128)(2,1)}, bf16[8,32]{1,0:T(8,128)(2,1)S(1)}, /*index=3*/bf16[4,16]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %w = bf16[6,32,64]{2,1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=1
  %h = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%arg), index=2
  %pages = bf16[4,16]{1,0} get-tuple-element(%arg), index=3
  %fusion.1 = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} fusion(%w, %i, %h), kind=kOutput, calls=%fused_computation.1
  %all-reduce.1 = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.1), channel_id=1, replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}, to_apply=%add.clone
  %attention.3 = (bf16[8,32]{1,0:T(8,128)(2,1)S(1)}, bf16[4,16]{1,0}) custom-call(%all-reduce.1, /*index=1*/%pages), custom_call_target="tpu_custom_call", output_to_operand_aliasing={{1}: (1, {})}, metadata={op_name="jit(step)/while/body/decode_attention/pallas_call"}, backend_config={"custom_call_config":{"body":"x","cost_estimate":{"flops":"500","transcendentals":"1","bytes_accessed":"300"}}}
  %out = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%attention.3), index=0
  %kept = bf16[4,16]{1,0} get-tuple-element(%attention.3), index=1
  ROOT %tuple.2 = (s32[]{:T(128)}, bf16[6,32,64]{2,1,0:T(8,128)(2,1)}, bf16[8,32]{1,0:T(8,128)(2,1)S(1)}, bf16[4,16]{1,0}) tuple(%next, %w, %out, %kept)
}

%condition (arg: (s32[], bf16[6,32,64], bf16[8,32], bf16[4,16])) -> pred[] {
  %arg = (s32[]{:T(128)}, bf16[6,32,64]{2,1,0:T(8,128)(2,1)}, bf16[8,32]{1,0:T(8,128)(2,1)S(1)}, bf16[4,16]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %layers = s32[]{:T(128)} constant(6)
  ROOT %less = pred[]{:T(512)} compare(%i, %layers), direction=LT
}

%greedy (x: bf16[8,32]) -> bf16[8,32] {
  ROOT %x = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} parameter(0)
}

%sampled (x: bf16[8,32]) -> bf16[8,32] {
  %x = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %all-reduce.9 = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add.clone
}

ENTRY %main (p0: bf16[6,32,64], p1: bf16[8,32], p2: bf16[4,16], p3: s32[]) -> bf16[8,32] {
  %p0 = bf16[6,32,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[8,32]{1,0:T(8,128)(2,1)} parameter(1)
  %p2 = bf16[4,16]{1,0} parameter(2)
  %p3 = s32[]{:T(128)} parameter(3)
  %start = s32[]{:T(128)} constant(0)
  %begin = s32[]{:T(128)} copy(%start)
  %copy-start = (bf16[8,32]{1,0:T(8,128)(2,1)S(1)}, bf16[8,32]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%p1)
  %copy-done = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %tuple.1 = (s32[]{:T(128)}, bf16[6,32,64]{2,1,0:T(8,128)(2,1)}, bf16[8,32]{1,0:T(8,128)(2,1)S(1)}, bf16[4,16]{1,0}) tuple(%begin, %p0, %copy-done, %p2)
  %while.1 = (s32[]{:T(128)}, bf16[6,32,64]{2,1,0:T(8,128)(2,1)}, bf16[8,32]{1,0:T(8,128)(2,1)S(1)}, bf16[4,16]{1,0}) while(%tuple.1), condition=%condition, body=%body
  %h = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%while.1), index=2
  ROOT %conditional.1 = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} conditional(%p3, %h, %h), branch_computations={%greedy, %sampled}
}
"""  # noqa: E501

# Asynchronous starts with their operands in the result, a library's matrix product, a loop with a known trip count.
GPU = """HloModule jit_step

%fused_slice (a: bf16[4,16,16], i: s32[]) -> bf16[16,16] {
  %a = bf16[4,16,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,16,16]{2,1,0} dynamic-slice(%a, %i, %zero, %zero), dynamic_slice_sizes={1,16,16}
  ROOT %flat = bf16[16,16]{1,0} bitcast(%slice)
}

%body (arg: (s32[], bf16[4,16,16], bf16[8,16])) -> (s32[], bf16[4,16,16], bf16[8,16]) {
  %arg = (s32[], bf16[4,16,16]{2,1,0}, bf16[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %w = bf16[4,16,16]{2,1,0} get-tuple-element(%arg), index=1
  %h = bf16[8,16]{1,0} get-tuple-element(%arg), index=2
  %fusion-start = ((bf16[4,16,16]{2,1,0}, s32[]), bf16[16,16]{1,0}, u32[]) fusion-start(%w, %i), calls=%fused_slice
  %fusion-done = bf16[16,16]{1,0} fusion-done(%fusion-start)
  %gemm = (f32[8,16]{1,0}, s8[4096]{0}) custom-call(%h, %fusion-done), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %product = f32[8,16]{1,0} get-tuple-element(%gemm), index=0
  %all-reduce-start = ((f32[8,16]{1,0}), f32[8,16]{1,0}) all-reduce-start(%product), replica_groups=[1,8]<=[8], to_apply=%add
  %all-reduce-done = f32[8,16]{1,0} all-reduce-done(%all-reduce-start)
  %mpmd_map.14 = bf16[8,16]{1,0} custom-call(%all-reduce-done), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/while/body/mpmd_map"}, backend_config={cost_estimate_json = "{\\22flops\\22: 70, \\22bytes_accessed\\22: 90}"}
  ROOT %next = (s32[], bf16[4,16,16]{2,1,0}, bf16[8,16]{1,0}) tuple(%i, %w, %mpmd_map.14)
}

%condition (arg: (s32[], bf16[4,16,16], bf16[8,16])) -> pred[] {
  %arg = (s32[], bf16[4,16,16]{2,1,0}, bf16[8,16]{1,0}) parameter(0)
  ROOT %go = pred[] custom-call(%arg), custom_call_target="whatever"
}

ENTRY %main (p: (s32[], bf16[4,16,16], bf16[8,16])) -> bf16[8,16] {
  %p = (s32[], bf16[4,16,16]{2,1,0}, bf16[8,16]{1,0}) parameter(0)
  %while = (s32[], bf16[4,16,16]{2,1,0}, bf16[8,16]{1,0}) while(%p), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %h = bf16[8,16]{1,0} get-tuple-element(%while), index=2
}
"""  # noqa: E501


def test_a_tpu_program():
    counts = count(TPU)
    assert counts.flops == 6 * 2 * 8 * 32 * 64
    # The first copy to VMEM, and of the weights a slice an iteration; counters, too.
    counters = 8 + 6 * (4 + 3 * 4)
    assert counts.hbm_bytes == 8 * 32 * 2 + 6 * (32 * 64 * 2) + counters
    assert counts.collectives == {Collective("all-reduce", 8 * 64 * 2, 4): 6}
    assert counts.kernels == {Kernel("decode_attention", 500, 300): 6}
    assert counts.unknown_loops == 0


def test_a_gpu_program():
    counts = count(GPU)
    assert counts.flops == 4 * 2 * 8 * 16 * 16
    # A slice of the weights is copied: read and written, and read again by the product, with its other operands.
    product = 8 * 16 * 2 + 16 * 16 * 2 + 8 * 16 * 4 + 4096
    assert counts.hbm_bytes == 4 * (2 * 16 * 16 * 2 + 4 + product)
    assert counts.collectives == {Collective("all-reduce", 8 * 16 * 4, 8): 4}
    assert counts.kernels == {Kernel("mpmd_map", 70, 90): 4}


@pytest.mark.parametrize("old, new, loops", [
    ("constant(6)", "constant(9)", 9), ("direction=LT", "direction=LE", 7), ("%start = s32[]{:T(128)} constant(0)",
     "%start = s32[]{:T(128)} constant(2)", 4), ("%one = s32[]{:T(128)} constant(1)",
     "%one = s32[]{:T(128)} constant(4)", 2),
])  # fmt: skip
def test_loops_are_counted_from_their_condition(old: str, new: str, loops: int):
    assert old in TPU
    counts = count(TPU.replace(old, new))
    assert counts.collectives == {Collective("all-reduce", 8 * 64 * 2, 4): loops}


def test_a_loop_that_ends_where_data_says_counts_once():
    counts = count(GPU.replace(', backend_config={"known_trip_count":{"n":"4"}}', ""))
    assert (counts.unknown_loops, counts.flops) == (1, 2 * 8 * 16 * 16)


@pytest.mark.parametrize("text, first", [
    ("replica_groups={{0,1,2,3},{4,5,6,7}}, x=y", (0, 1, 2, 3)), ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)), ("replica_groups=mesh['data'=2,'tensor'=4] {'data'}", (0, 4)),
    ("replica_groups=mesh['data'=2,'tensor'=4] {'data','tensor'}", (0, 1, 2, 3, 4, 5, 6, 7)),
    ("replica_groups=mesh['data'=1,'tensor'=8] {'tensor':(1)2}", (0, 4)),
    ("replica_groups=mesh['data'=1,'tensor'=8] {'tensor':(2)2}", (0, 2)),
    ("source_target_pairs={{0,1},{1,0}}", (0, 1)),
])  # fmt: skip
def test_the_devices_of_a_group(text: str, first: tuple[int, ...]):
    assert group(text) == first


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("HloModule empty\n")


# Programs for simulated devices

LAYERS, ROWS, WIDTH = 5, 16, 64


def compiled(f, *shapes, specs, out):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tensor"))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.sharding.NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    return count(jax.jit(mapped).lower(*arguments).compile().as_text())


P = jax.sharding.PartitionSpec


def test_a_scan_of_products_with_sums():
    """Each device multiplies its quarter of the width; the sums of all layers go over `tensor`."""

    def stack(x, weights):
        def layer(x, w):
            return jax.lax.psum(jnp.tanh(x @ w[:, :WIDTH]) @ w[:, WIDTH:].T, "tensor"), None

        return jax.lax.scan(layer, x, weights)[0]

    counts = compiled(stack, (ROWS, WIDTH), (LAYERS, WIDTH, 8 * WIDTH), specs=(P("data"), P(None, None, "tensor")),
                      out=P("data"))  # fmt: skip
    rows = ROWS // 2
    assert counts.flops == LAYERS * 2 * (2 * rows * WIDTH * WIDTH)
    assert counts.collectives == {Collective("all-reduce", rows * WIDTH * 4, 4): LAYERS}
    weights = LAYERS * WIDTH * 2 * WIDTH * 4
    assert weights <= counts.hbm_bytes < 8 * weights


@pytest.mark.parametrize("kind, f, size", [
    ("all-gather", partial(jax.lax.all_gather, axis_name="tensor", tiled=True), 4 * 2),
    ("reduce-scatter", partial(jax.lax.psum_scatter, axis_name="tensor", tiled=True), 2),
    ("all-to-all", partial(jax.lax.all_to_all, axis_name="tensor", split_axis=0, concat_axis=0, tiled=True), 2),
    ("collective-permute", partial(jax.lax.ppermute, axis_name="tensor", perm=[(0, 1), (1, 2), (2, 3), (3, 0)]), 2),
])  # fmt: skip
def test_each_kind_of_collective(kind: str, f, size: int):
    """On 16 rows a device: what it holds afterwards, or brings to a reduce-scatter."""
    counts = compiled(f, (8 * ROWS, WIDTH), specs=(P(("data", "tensor")),), out=P(("data", "tensor")))
    devices = 2 if kind == "collective-permute" else 4
    assert counts.collectives == Counter({Collective(kind, size * ROWS // 2 * WIDTH * 4, devices): 1})


def test_products_by_windows():
    """A TPU's batched products are convolutions whose window meets one place of the operand and padding elsewhere."""
    text = TPU.replace("bf16[8,64]{1,0:T(8,128)(2,1)S(1)} convolution(%param_2, %flat), dim_labels=bf_io->bf",
                       "bf16[8,64]{1,0} convolution(%param_2, %flat), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f")
    lines = {
        "%param_2 = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} parameter(2)": "%param_2 = bf16[8,4,32]{2,1,0:S(1)} parameter(2)",
        "%flat = bf16[32,64]{1,0:T(8,128)(2,1)} bitcast": "%flat = bf16[3,32,64]{2,1,0} bitcast",
        "ROOT %product = bf16[8,64]{1,0}": "ROOT %product = bf16[8,4,64]{2,1,0:S(1)}",
    }
    for old, new in lines.items():
        assert old in text, old
        text = text.replace(old, new)
    # Of 3 x 4 (window, place) pairs 2 fall outside.
    assert count(text).flops == 6 * 2 * 8 * 64 * 32 * (3 * 4 - 2)
