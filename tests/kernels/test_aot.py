"""Compiling for chips that are not there, and reading what the TPU's compiler says of a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from scripts import aot_check, tpu_schedule, tune
from scripts.aot import memory
from scripts.aot.bundles import parse, read_dump
from scripts.aot.cases import CASES, MIXED, paged_metadata
from scripts.aot.program import Case, Program
from scripts.aot.targets import TARGETS, compile_for, devices_of, prepare_environment, quiet_stderr

# A kernel of 11 bundles: a loop at 1..8 with two loops inside, at 3..4 and 6..7 (5 holds nothing and prints no depth).
BUNDLES = """= control target key start
LH: loop header
LB: loop body
= control target key end

     0   :  { %s0 = smov.u32 1 }
   0x1 LB: > { %s1 = sadd.s32 1, %s0  ;;  %v1 = vld [vmem:[%s0] sm:$0xff] }
   0x2   : > { %s2 = sadd.s32 1, %s1 }
   0x3 LB: >> { %v2 = vmatmul.bf16 %v1 }
   0x4   : >> { %v3 = vadd.f32 %v2, %v2
text of a comment
 */ }
   0x5   :  {}
   0x6 LB:  >> { %v4 = vmul.f32 %v2, %v2 }
   0x7   : >> { %v5 = vadd.f32 %v4, %v2 }
   0x8 PF: > { %s3 = sadd.s32 1, %s2 }
   0x9   :  { %s4 = sadd.s32 1, %s3 }
   0xa   :  { %s5 = sadd.s32 1, %s4 }
"""
USAGE = """== CAPACTIY:
MATMUL, VALU, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    2     4     3     3     2     2     2
== UTILIZATION:
0 0 0 0 0 0 1
0 0 1 0 0 0 1
0 0 0 0 0 0 1
1 0 2 1 1 1 0
0 3 0 0 0 0 0
0 0 0 0 0 0 0
0 2 0 0 0 0 0
0 1 0 0 1 1 0
0 0 0 0 0 0 1
0 0 0 0 0 0 1
0 0 0 0 0 0 1
"""


def test_loops_of_a_schedule_by_hand():
    schedule = parse("kernel", BUNDLES, USAGE)
    (outer,) = schedule.roots
    first, second = outer.children
    assert (schedule.bundles, outer.start, outer.end, outer.depth) == (11, 1, 9, 1)
    assert [(loop.start, loop.end, loop.depth) for loop in (first, second)] == [(3, 6, 2), (6, 8, 2)]
    assert (outer.bundles, outer.own_bundles) == (8, 3)
    assert (first.spills, second.spills, outer.spills) == (2, 1, 3)
    assert schedule.hot is first and first.slots["VALU"] == 3
    assert first.use("VALU") == 3 / (4 * 3)
    assert outer.total({3: 10, 6: 2}) == 3 + 10 * 3 + 2 * 2
    assert [loop.start for loop in schedule.loops] == [1, 3, 6]
    assert "8 bundles (3 without inner loops), 3 spills" in tpu_schedule.describe(schedule)


def test_a_dump_is_found_by_the_compiler_s_file_names(tmp_path):
    for number, kernel in (("17", "my-kernel.1"), ("18", "fusion.2")):
        (tmp_path / f"{number}-{kernel}-03-final_bundles.txt").write_text(BUNDLES)
        (tmp_path / f"{number}-{kernel}-02-schedule-analysis_final_bundles.txt").write_text("")
        (tmp_path / f"{number}-{kernel}-01-final_hlo-static-per-bundle-utilization.txt").write_text(USAGE)
    (tmp_path / "19-TLP-03-final_bundles.txt").write_text(BUNDLES)
    assert sorted(schedule.kernel for schedule in read_dump(tmp_path)) == ["fusion.2", "my-kernel.1"]


def test_a_damaged_dump_is_refused():
    with pytest.raises(ValueError, match="not a utilization dump"):
        parse("kernel", BUNDLES, "nothing")


def double(x_ref, o_ref, scratch):
    scratch[...] = x_ref[...]
    o_ref[...] = scratch[...] * 2


def doubled(x):
    block = pl.BlockSpec((16, 128), lambda i: (i, 0))
    return pl.pallas_call(
        double, grid=(4,), in_specs=[block], out_specs=block, out_shape=jax.ShapeDtypeStruct((64, 128), jnp.bfloat16),
        scratch_shapes=[pltpu.VMEM((16, 128), jnp.bfloat16)],
    )(x)


def test_vmem_of_a_kernel_is_counted_inside_loops_too():
    def looped(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: jax.jit(doubled)(y), x)

    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    tile = 16 * 128 * 2
    assert memory.block_bytes(jax.make_jaxpr(looped)(x)) == tile + 2 * 2 * tile, "scratch, two windows of each block"
    assert memory.block_bytes(jax.make_jaxpr(lambda x: x + 1)(x)) is None


class Analysis:
    def __init__(self, alias: int, temp: int):
        self.alias_size_in_bytes, self.temp_size_in_bytes = alias, temp

    def memory_analysis(self):
        return self


def test_a_copied_cache_is_a_failure():
    assert memory.kv_problem(Analysis(1000, 99), 1000, 100) is None
    assert "copied: only 999 bytes are aliased" in (memory.kv_problem(Analysis(999, 0), 1000, 100) or "")
    assert "could hold a copy of a layer" in (memory.kv_problem(Analysis(1000, 100), 1000, 100) or "")


def test_rows_of_the_cases_are_what_the_contract_says():
    (table, lengths, cu_q_lens, distribution), num_pages = paged_metadata(MIXED, 128)
    assert table.shape == (64, 32) and sorted(table.ravel()) == list(range(1, num_pages)), "each page once, none is 0"
    assert cu_q_lens[-1] == 63 + 512 and (lengths == 4096).all() and tuple(distribution) == (63, 63, 64)


def test_every_named_model_is_a_case():
    names = {case.name for case in CASES}
    for model in ("smollm2", "llama3-8b", "llama3-70b/8", "qwen3-32b/8", "gemma3-27b/8", "deepseek-v3/8", "mixtral"):
        for platform in ("tpu", "gpu"):
            assert any(model in case.shape and case.platform == platform for case in CASES), model
    assert len(names) > 20 and any(case.quick for case in CASES)


def test_failures_exit_with_1(monkeypatch, capsys):
    checks = [
        aot_check.Check(name="good", quick=True, run=lambda: aot_check.Result(name="good", temporaries=0)),
        aot_check.Check(name="bad", quick=True, run=lambda: 1 / 0),
    ]
    monkeypatch.setattr(aot_check, "checks_for", lambda target: iter(checks))
    monkeypatch.setattr(aot_check, "devices_of", lambda target: [])
    monkeypatch.setattr(aot_check, "prepare_environment", lambda: None)
    assert aot_check.main(["--target", "v6e"]) == 1
    printed = capsys.readouterr().out
    assert "NO: ZeroDivisionError: division by zero" in printed and "2 compiled, 1 failed" in printed
    assert aot_check.main(["--target", "v6e", "--only", "good"]) == 0
    assert aot_check.main(["--target", "v6e", "--only", "neither"]) == 1, "nothing checked is no success"


@pytest.mark.parametrize("flags", [("--only", "llama9"), ("--loops", "llama9")])
def test_a_schedule_of_nothing_is_an_error(flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        tpu_schedule.main(list(flags))
    assert f"{flags[0]} llama9: " in capsys.readouterr().err


def test_tune_needs_a_device(capsys):
    assert tune.main([]) == 2
    assert "measures on a TPU or GPU; this process has cpu only" in capsys.readouterr().err


tpu_compiler = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("libtpu"), reason="libtpu is not installed")  # fmt: skip


@pytest.fixture
def tpu():
    prepare_environment()
    return TARGETS["v6e"]


@tpu_compiler
def test_compiles_for_a_tpu_that_is_not_there(tpu):
    compiled = compile_for(tpu, doubled, (jax.ShapeDtypeStruct((64, 128), jnp.bfloat16),))
    assert memory.temporaries(compiled) == 0
    assert compiled.memory_analysis().argument_size_in_bytes == 64 * 128 * 2


@tpu_compiler
def test_a_kernel_beyond_vmem_fails_the_check(tpu):
    def too_large(x):
        return pl.pallas_call(
            lambda x_ref, o_ref, scratch: o_ref.__setitem__(..., x_ref[...]), out_shape=x,
            scratch_shapes=[pltpu.VMEM((40_000, 1024), jnp.float32)],
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=127 << 20),
        )(x)

    case = Case(kernel="k", shape="s", step="", platform="tpu", build=lambda devices: Program(
        fn=too_large, inputs=lambda: (jnp.zeros((8, 128), jnp.float32),)))  # fmt: skip
    check = aot_check.Check(name=case.name, quick=True, run=lambda: aot_check.check_kernel(tpu, case))
    assert aot_check.run_one(check).problem is not None


@tpu_compiler
@pytest.mark.parametrize("how, problem", [("in place", None), ("not donated", "copied"), ("sorted", "could hold")])
def test_a_copied_cache_is_seen_by_the_compiler(tpu, how: str, problem: str | None):
    shape = (2, 512, 2, 2, 128, 128)
    kv_bytes = 2 * int(np.prod(shape))

    def fn(pages, new):
        pages = jnp.sort(pages, axis=1) if how == "sorted" else pages
        return pages.at[1, 5, 0, 0, :8].set(new)

    def inputs() -> tuple:
        return jnp.zeros(shape, jnp.bfloat16), jnp.zeros((8, 128), jnp.bfloat16)

    program = Program(fn=fn, inputs=inputs, donate=() if how == "not donated" else (0,), kv_bytes=kv_bytes,
                      layer_bytes=kv_bytes // 2)  # fmt: skip
    case = Case(kernel="k", shape="s", step="", platform="tpu", build=lambda devices: program)
    found = aot_check.check_kernel(tpu, case).problem
    assert (found is None) if problem is None else (problem in (found or "")), found


@tpu_compiler
def test_devices_and_noise(tpu, capfd):
    assert len(devices_of(tpu)) == 8
    with quiet_stderr() as text:
        __import__("os").write(2, b"warning of a compiler\n")
        assert "warning of a compiler" in text()
    assert capfd.readouterr().err == ""


def build_double() -> tuple:
    return doubled, (jax.ShapeDtypeStruct((64, 128), jnp.bfloat16),)


@tpu_compiler
@pytest.mark.slow
def test_the_real_compiler_s_schedule_has_the_grid_s_loop():
    (schedule, *_) = tpu_schedule.schedule_of(build_double_of, "v6e", 4)
    assert len(schedule.roots) == 1 and schedule.spills == 0
    assert 0 < schedule.hot.bundles < schedule.bundles and schedule.hot.slots["VLOAD"] >= 1


def build_double_of(_: int) -> tuple:
    return build_double()
