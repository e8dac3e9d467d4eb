"""Every grouped-matmul backend against the float32 reference, which a hand-worked case pins."""

from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import interpret
from pallas_kernels.devices import DEVICES
from pallas_kernels.grouped_matmul import config, reference
from pallas_kernels.grouped_matmul.api import ExpertsSpec, GpuBlocks, TpuBlocks, choose_backend
from pallas_kernels.grouped_matmul.spec import Problem
from pallas_kernels.grouped_matmul.tiles import group_tiles
from quant.experts import QuantizedExperts, dequantize_experts, quantize_experts
from tests.tolerances import GROUPED_MATMUL

gpu = pytest.param("mosaic_gpu", marks=pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason=f"Mosaic GPU kernels need jax 0.12; this is {jax.__version__}"))  # fmt: skip
BACKENDS = ["xla", "mosaic_tpu", gpu]
BLOCKS = {"mosaic_tpu": TpuBlocks(tile_rows=32, piece_rows=16, block_f=256, step_f=128),
          "mosaic_gpu": GpuBlocks(tile_rows=64, block_f=128, stages=2), "xla": None}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of each expert, and how many rows belong to none. held: (first, number) of the experts held."""

    sizes: tuple[int, ...]
    past: int = 0
    depth: int = 64
    columns: int = 128
    held: tuple[int, int] | None = None
    weights: str | None = None
    group: int | None = None
    seed: int = 0
    options: dict = field(default_factory=dict)


def operands(case: Case, dtype):
    """(lhs, rhs, sizes, offset). What must not be read is NaN: rows past the sum, weights of experts without rows."""
    rng = np.random.default_rng(case.seed)
    first, count = case.held or (0, len(case.sizes))
    lhs = rng.standard_normal((sum(case.sizes) + case.past, case.depth), np.float32)
    lhs[sum(case.sizes) :] = np.nan
    rhs = rng.standard_normal((count, case.depth, case.columns), np.float32)
    empty = [e for e in range(count) if case.sizes[first + e] == 0]
    if case.weights is None:
        rhs[empty] = np.nan
        weights = jnp.asarray(rhs, dtype)
    else:
        weights = quantize_experts(jnp.asarray(rhs), case.weights, case.group)
        weights = QuantizedExperts(values=weights.values, scales=weights.scales.at[np.array(empty, int)].set(np.nan))
    return jnp.asarray(lhs, dtype), weights, np.array(case.sizes, np.int32), np.int32(first)


@cache
def compiled(name: str, spec: ExpertsSpec, out_dtype: str | None, default_blocks: bool):
    backend = choose_backend(name, spec, jax.devices()[0])
    blocks = None if default_blocks else BLOCKS[name]
    return jax.jit(partial(backend.matmul, preferred_element_type=out_dtype, blocks=blocks))


def check(case: Case, name: str, dtype: str = "float32", out_dtype: str | None = None) -> None:
    lhs, rhs, sizes, offset = operands(case, dtype)
    quantized = isinstance(rhs, QuantizedExperts)
    values, scales = (rhs.values, np.asarray(rhs.scales)) if quantized else (rhs, None)
    spec = ExpertsSpec(num_experts=values.shape[0], dtype=lhs.dtype, weight_dtype=values.dtype, scale_group=case.group)
    run = compiled(name, spec, out_dtype, bool(case.options.get("default_blocks")))
    out = np.asarray(run(lhs, rhs, sizes, group_offset=offset).astype(jnp.float32))
    again = np.asarray(run(lhs, rhs, sizes, group_offset=offset).astype(jnp.float32))
    np.testing.assert_array_equal(out, again)
    want = reference.grouped_matmul(np.asarray(lhs.astype(jnp.float32)), np.asarray(values.astype(jnp.float32)), sizes,
                                    scales=scales, group_offset=offset)  # fmt: skip
    # Relative to the size of a sum of D products of normal numbers.
    tolerance = GROUPED_MATMUL[out_dtype or dtype] if scales is None else GROUPED_MATMUL[f"quantized {dtype}"]
    np.testing.assert_allclose(out, want, rtol=tolerance, atol=tolerance * case.depth**0.5)
    np.testing.assert_array_equal(out[sum(case.sizes) :], 0)
    if name == "mosaic_tpu":
        assert not interpret.races_found()


def kernel_dtype(name: str) -> str:
    return "bfloat16" if name == "mosaic_gpu" else "float32"


def test_reference_by_hand():
    """Rows 0 and 1 are expert 0's (twice, and swapped), row 2 is expert 2's, row 3 nobody's. Expert 1 has no rows."""
    lhs = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)
    rhs = np.array([[[0, 2], [2, 0]], [[np.nan] * 2] * 2, [[1, 0], [10, 100]]], np.float32)
    want = [[4, 2], [8, 6], [65, 600], [0, 0]]
    np.testing.assert_array_equal(reference.grouped_matmul(lhs, rhs, [2, 0, 1]), want)
    # Only experts 1 and 2 are here.
    np.testing.assert_array_equal(reference.grouped_matmul(lhs, rhs[1:], [2, 0, 1], group_offset=1),
                                  [[0, 0], [0, 0], [65, 600], [0, 0]])  # fmt: skip
    # One scale for each element and column: the second column of expert 2 counts half of its second element.
    scales = np.ones((3, 2, 2), np.float32)
    scales[2, 1, 1] = 0.5
    np.testing.assert_array_equal(reference.grouped_matmul(lhs, rhs, [2, 0, 1], scales=scales)[2], [65, 300])


CASES = {
    "ragged": Case(sizes=(3, 17, 1, 40), past=2),
    "empty groups": Case(sizes=(0, 5, 0, 0, 30, 0), past=1),
    "all in one group": Case(sizes=(0, 70, 0)),
    "no rows at all": Case(sizes=(0, 0), past=5),
    "one row": Case(sizes=(0, 1)),
    "one expert": Case(sizes=(33,)),
    "whole tiles": Case(sizes=(64, 32, 64)),
    "odd D and F": Case(sizes=(20, 13), depth=72, columns=200, past=4),
    "columns over several blocks": Case(sizes=(9, 30), columns=520),
    "experts of another device": Case(sizes=(11, 20, 0, 7, 9), held=(1, 2), past=3),
    "no rows for the experts held": Case(sizes=(30, 0, 0, 9), held=(1, 2)),
    "default blocks": Case(sizes=(3, 17, 1, 40), past=2, options={"default_blocks": True}),
}


@pytest.mark.parametrize("backend", ["xla", "mosaic_tpu"])
@pytest.mark.parametrize("name", CASES)
def test_named(name: str, backend: str):
    check(CASES[name], backend, kernel_dtype(backend))


@gpu.marks[0]
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("odd D and F", "columns over several blocks")])
def test_named_on_a_gpu(name: str):
    """Whose weights come in tiles of 64: test_what_a_gpu_cannot_cut_is_said has the others."""
    check(CASES[name], "mosaic_gpu", kernel_dtype("mosaic_gpu"))


@gpu.marks[0]
def test_columns_over_several_blocks_on_a_gpu():
    check(Case(sizes=(9, 30), depth=192, columns=320), "mosaic_gpu", "bfloat16")
    check(Case(sizes=(9, 30), depth=192, columns=320, weights="int8"), "mosaic_gpu", "bfloat16")


@gpu.marks[0]
@pytest.mark.parametrize("depth, columns", [(72, 128), (64, 520)])
def test_what_a_gpu_cannot_cut_is_said(depth, columns):
    with pytest.raises(ValueError, match=f"D={depth} and F={columns} must be multiples of 64 and 64"):
        check(Case(sizes=(9, 30), depth=depth, columns=columns), "mosaic_gpu", "bfloat16")


@pytest.mark.parametrize("backend", ["xla", "mosaic_tpu"])
def test_bfloat16(backend: str):
    check(CASES["ragged"], backend, "bfloat16")


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_results_of_bfloat16_rows(backend: str):
    """Sums are float32, so the only rounding is of the operands, which the reference shares."""
    check(CASES["ragged"], backend, "bfloat16", out_dtype="float32")


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("weights", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_quantized(backend: str, weights: str, group: int | None):
    check(Case(sizes=(3, 0, 40), past=2, depth=256, weights=weights, group=group), backend, "bfloat16")


@pytest.mark.parametrize("weights, group", [(None, None), ("int8", None), ("int8", 128)])
def test_a_long_d_is_summed_in_chunks_on_tpu(weights, group):
    case = Case(sizes=(3, 20), depth=6144, weights=weights, group=group)
    assert config.depth_chunk(6144, group or 6144) in (2048, 3072)
    check(case, "mosaic_tpu", "bfloat16")


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.one_of(st.just(0), st.integers(1, 6), st.integers(7, 40)), min_size=4, max_size=4),
       seed=st.integers(0, 99), held=st.sampled_from([(0, 4), (1, 2), (3, 1)]))  # fmt: skip
def test_random_sizes(backend: str, sizes, seed, held):
    """61 rows always, so that few programs are compiled."""
    while sum(sizes) > 61:
        sizes[sizes.index(max(sizes))] //= 2
    check(Case(sizes=tuple(sizes), past=61 - sum(sizes), seed=seed, held=held), backend, kernel_dtype(backend))


@cache
def compiled_tiles(**static):
    return jax.jit(partial(group_tiles, **static))


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 20), min_size=5, max_size=5), first=st.integers(0, 4), data=st.data(),
       tile_rows=st.sampled_from([8, 16]), aligned=st.booleans())  # fmt: skip
def test_visits_cover_every_row_once(sizes, first, data, tile_rows, aligned):
    """Each held expert's rows are visited once with its weights, all others become zeros, and none else is named."""
    num_rows, count = 61, data.draw(st.sampled_from([n for n in (1, 3, 5) if first + n <= 5]))
    while sum(sizes) > num_rows:
        sizes[sizes.index(max(sizes))] //= 2
    align = tile_rows if aligned else 4
    run = compiled_tiles(num_rows=num_rows, tile_rows=tile_rows, align=align, num_experts=count)
    tiles = jax.tree.map(np.asarray, run(jnp.array(sizes, jnp.int32), group_offset=first))
    visits = int(tiles.count)
    assert visits <= tiles.row.shape[0]
    owner = np.repeat(np.arange(5) - first, sizes)
    owner = np.where((owner >= 0) & (owner < count), owner, -1)
    owner = np.concatenate([owner, np.full(num_rows - len(owner), -1)])
    seen = np.zeros(num_rows, int)
    for visit in range(visits):
        row, start, end = (int(a[visit]) for a in (tiles.row, tiles.start, tiles.end))
        assert row % align == 0 and row <= start < end <= min(row + tile_rows, num_rows)
        if tiles.weights[visit]:
            assert (owner[start:end] == int(tiles.expert[visit])).all()
            seen[start:end] += 1
        elif not aligned:
            assert (owner[start:end] == -1).all()
            seen[start:end] += 1
    if aligned:  # a block's first visit writes zeros to the rows of nobody
        rows = tiles.row[:visits].tolist()
        assert sorted(set(rows)) == list(range(0, num_rows, tile_rows)) and rows == sorted(rows)
        seen[owner == -1] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("backend", ["xla", "mosaic_tpu"])
def test_a_layer_of_stacked_weights(backend: str, native: bool):
    """The weights of all layers and a number are as good as that layer's; the other layers' are not looked at."""
    case = Case(sizes=(9, 0, 20, 3), held=(1, 2))
    lhs, rhs, sizes, offset = operands(case, "float32")
    stacked = jnp.full((3, *rhs.shape), np.nan).at[1].set(jnp.nan_to_num(rhs))
    spec = ExpertsSpec(num_experts=2, dtype=lhs.dtype, weight_dtype=rhs.dtype)
    chosen = replace(choose_backend(backend, spec, jax.devices()[0]), native=native and backend == "xla")
    tiles = chosen.tiles(sizes, len(lhs), offset)
    run = jax.jit(partial(chosen.matmul, tiles=tiles, group_offset=offset))
    want = run(lhs, stacked[1], sizes)
    assert np.abs(np.asarray(want)).max() > 1
    np.testing.assert_array_equal(run(lhs, stacked, sizes, layer=jnp.int32(1)), want)
    with pytest.raises(ValueError, match="must be .E=2, D=64, F."):
        run(lhs, stacked[:, :1], sizes, layer=jnp.int32(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_tiles_are_shared_by_products_of_other_shapes(backend: str):
    """Up and down projections, whose D and F change places, with one list of visits."""
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(kernel_dtype(backend))
    x = jnp.asarray(rng.standard_normal((40, 128)), dtype)
    up, down = (jnp.asarray(rng.standard_normal(s), dtype) / 8 for s in ((3, 128, 256), (3, 256, 128)))
    sizes = jnp.array([7, 0, 30], jnp.int32)
    experts = choose_backend(backend, ExpertsSpec(num_experts=3, dtype=dtype, weight_dtype=dtype), jax.devices()[0])

    @jax.jit
    def layer(x, up, down, sizes):
        tiles = experts.tiles(sizes, 40)
        hidden = experts.matmul(x, up, sizes, tiles=tiles, preferred_element_type=jnp.float32)
        out = experts.matmul(hidden.astype(dtype), down, sizes, tiles=tiles, preferred_element_type=jnp.float32)
        return out, hidden

    out, hidden = layer(x, up, down, sizes)
    want = reference.grouped_matmul(np.asarray(hidden.astype(dtype).astype(jnp.float32)),
                                    np.asarray(down.astype(jnp.float32)), sizes)  # fmt: skip
    np.testing.assert_allclose(out, want, atol=1e-3)


def test_ragged_dot_of_a_gpu_or_tpu_without_a_kernel():
    """Not what a CPU takes, but it runs on one."""
    from pallas_kernels.grouped_matmul import xla

    case = Case(sizes=(11, 20, 4, 7, 9), held=(1, 2), past=3)
    lhs, rhs, sizes, offset = operands(case, jnp.float32)
    want = reference.grouped_matmul(np.asarray(lhs), np.asarray(rhs), sizes, group_offset=offset)
    out = xla.ragged_dot(lhs, rhs, jnp.asarray(sizes), out_dtype=jnp.float32, group_offset=offset)
    np.testing.assert_allclose(out, want, atol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantized_experts_are_close_and_scale_by_group(dtype: str):
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((2, 64, 8)), jnp.float32)
    weights = weights.at[:, 32:].multiply(100.0).at[1, :, 3].set(0.0)
    experts = quantize_experts(weights, dtype, 32)
    assert experts.scales.shape == (2, 2, 8) and experts.group_size == 32
    error = jnp.abs(dequantize_experts(experts) - weights)
    largest = jnp.abs(weights.reshape(2, 2, 32, 8)).max(2, keepdims=True)
    step = {"int8": 0.5 / 127, "float8_e4m3fn": 1 / 16}[dtype]  # half a step of int8; 3 bits of mantissa
    assert (error.reshape(2, 2, 32, 8) <= 1.001 * step * largest).all()
    with pytest.raises(ValueError, match="group_size=48 must divide"):
        quantize_experts(weights, dtype, 48)


SPEC = ExpertsSpec(num_experts=8, dtype=jnp.dtype("bfloat16"), weight_dtype=jnp.dtype("bfloat16"))


@dataclass(frozen=True)
class FakeDevice:
    platform: str
    device_kind: str


def test_choice_of_a_backend():
    assert choose_backend("auto", SPEC, FakeDevice("cpu", "cpu")).name == "xla"
    assert choose_backend("auto", SPEC, FakeDevice("tpu", "TPU v6 lite")).name == "mosaic_tpu"
    old = choose_backend("auto", SPEC, FakeDevice("tpu", "TPU v3"))
    assert (old.name, old.native) == ("xla", True) and "TPU v3" in (old.fallback or "")
    assert old.tiles(jnp.zeros(8, jnp.int32), 16) is None
    with pytest.raises(ValueError, match="runs on tpu .simulated on cpu., not on gpu"):
        choose_backend("mosaic_tpu", SPEC, FakeDevice("gpu", "NVIDIA H200"))
    with pytest.raises(ValueError, match="'mosaik' is not one of"):
        choose_backend("mosaik", SPEC, FakeDevice("cpu", "cpu"))


@pytest.mark.parametrize("change, message", [
    ({"dtype": jnp.dtype("float16")}, "rows of float16"),
    ({"weight_dtype": jnp.dtype("float32")}, "weights of float32 with rows of bfloat16"),
    ({"weight_dtype": jnp.dtype("int8"), "scale_group": 32}, "scales of 32 elements .it takes multiples of 128"),
])  # fmt: skip
def test_what_the_tpu_kernel_lacks_is_said_at_build(change, message):
    fields = {"num_experts": 8, "dtype": SPEC.dtype, "weight_dtype": SPEC.weight_dtype} | change
    with pytest.raises(ValueError, match=message):
        choose_backend("mosaic_tpu", ExpertsSpec(**fields), jax.devices()[0])


def test_blocks_that_do_not_fit_raise_with_numbers_and_the_nearest_that_fits():
    problem = Problem(rows=8192, depth=14336, columns=4096, experts=8)
    with pytest.raises(ValueError, match=r"needs [\d,]+ bytes and v7x has 67,108,864 .* that fits is tile_rows"):
        config.require_tpu_fit(TpuBlocks(tile_rows=512, piece_rows=128, block_f=2048, step_f=256), problem,
                               DEVICES["v7x"])  # fmt: skip
    with pytest.raises(ValueError, match=r"needs [\d,]+ bytes and h200 has 232,448 .* nearest that fits is tile_rows"):
        config.require_gpu_fit(GpuBlocks(tile_rows=128, block_f=256, stages=6), problem, DEVICES["h200"])


@pytest.mark.parametrize("device", ["v5e", "v6e", "v7x"])
@pytest.mark.parametrize("rows", [1, 64, 8192])
def test_chosen_tpu_blocks_fit(device: str, rows: int):
    for depth, columns in ((4096, 14336), (14336, 4096), (7168, 2048), (2048, 768)):
        problem = Problem(rows=rows, depth=depth, columns=columns, experts=8)
        blocks = config.tpu_blocks(problem, config.tpu_tile_rows(rows), DEVICES[device])
        assert config.tpu_estimate(blocks, problem, DEVICES[device]).block_bytes <= DEVICES[device].vmem_bytes


@pytest.mark.parametrize("blocks, message", [
    (lambda: TpuBlocks(tile_rows=24, piece_rows=16, block_f=128, step_f=128), "tile_rows=24 must be a positive"),
    (lambda: TpuBlocks(tile_rows=32, piece_rows=48, block_f=128, step_f=128), "piece_rows=48 must not exceed"),
    (lambda: TpuBlocks(tile_rows=32, piece_rows=16, block_f=384, step_f=256), "block_f=384 must be a positive"),
    (lambda: GpuBlocks(tile_rows=32, block_f=128, stages=2), "tile_rows=32 must be a positive multiple of 64"),
    (lambda: GpuBlocks(tile_rows=256, block_f=256, stages=2), "do not fit the registers"),
    (lambda: GpuBlocks(tile_rows=64, block_f=128, stages=1), "stages=1 must be at least 2"),
])  # fmt: skip
def test_blocks_are_checked_at_birth(blocks, message):
    with pytest.raises(ValueError, match=message):
        blocks()


@pytest.mark.parametrize("change, message", [
    ({"rhs": jnp.zeros((8, 32, 128), jnp.bfloat16)}, r"must be \[E=8, D=64, F\]"),
    ({"rhs": jnp.zeros((8, 64, 128), jnp.float32)}, "for a spec of bfloat16"),
    ({"blocks": GpuBlocks(tile_rows=64, block_f=128, stages=2)}, "GpuBlocks are not blocks of"),
    ({"tiles": group_tiles(jnp.zeros(8, jnp.int32), num_rows=16, tile_rows=16, align=8)}, "multiples of 8"),
    ({"tiles": group_tiles(jnp.zeros(8, jnp.int32), num_rows=24, tile_rows=16, align=16)}, "tiles for 24 rows"),
])  # fmt: skip
def test_operands_are_checked(change, message):
    experts = choose_backend("mosaic_tpu", SPEC, jax.devices()[0])
    arguments = {"lhs": jnp.zeros((16, 64), jnp.bfloat16), "rhs": jnp.zeros((8, 64, 128), jnp.bfloat16),
                 "group_sizes": jnp.zeros(8, jnp.int32)} | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        experts.matmul(**arguments)


def test_sizes_that_are_known_decide_the_backend(monkeypatch):
    """On a GPU the kernel's TMA takes multiples of 64; XLA takes over before anything is traced."""
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    h200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    spec = ExpertsSpec(num_experts=8, dtype=jnp.dtype("bfloat16"), weight_dtype=jnp.dtype("bfloat16"), sizes=(2048, 96))
    odd = choose_backend("auto", spec, h200)
    assert odd.name == "xla" and "D or F of 96" in str(odd.fallback)
    assert choose_backend("auto", replace(spec, sizes=(2048, 768)), h200).name == "mosaic_gpu"


def test_scales_without_quantized_weights_are_refused():
    with pytest.raises(ValueError, match="scale_group=64 is for 8-bit weights, not bfloat16"):
        ExpertsSpec(num_experts=8, dtype=jnp.dtype("bfloat16"), weight_dtype=jnp.dtype("bfloat16"), scale_group=64)
