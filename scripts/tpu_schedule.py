"""How good is a TPU kernel's schedule? Read from the real TPU compiler's bundles, without a TPU.

    python -m scripts.tpu_schedule                       # ragged paged attention, beside jax's own at the same shapes
    python -m scripts.tpu_schedule --target v6e --only llama3-8b --no-jax
    python -m scripts.tpu_schedule --loops latent        # the loops of every kernel whose case has that in its name

To look at a kernel while writing it, use `schedule_of`:

    def build(pages_per_block):                          # at module level: it runs in a process of its own
        fn = functools.partial(my_kernel, ...)
        return fn, (jax.ShapeDtypeStruct(...), ...)      # and, if wanted, a third: indices of donated arguments

    if __name__ == "__main__":                           # needed: the process imports this file again
        for schedule in schedule_of(build, "v6e", 16):   # kernels of the program, the one with most bundles first
            print(describe(schedule))
        hot = schedule_of(build, "v6e", 16)[0].hot       # innermost loop with most bundles
        print(hot.bundles / tokens_per_block, hot.spills, hot.slots)

A case of scripts/aot/cases.py is built with the target's devices and gives a Program: schedule_of(case.build, "v6e").
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

from scripts.aot.bundles import DUMP_FLAGS, Schedule, read_dump
from scripts.aot.targets import (
    TARGETS,
    Target,
    TargetUnavailable,
    compile_for,
    compile_on,
    devices_of,
    prepare_environment,
    quiet_stderr,
)

# Head sizes 128, 64 and 256; the first is the one that public figures exist for.
SHAPES = ("llama3-8b", "llama3-70b/8", "smollm2-135m", "gpt-oss-20b", "gemma2-9b")
UNITS = ("MATMUL", "MATPUSH", "VALU", "EUP", "VLOAD", "VSTORE")
# Block sizes of jax's kernel (pages of 128 tokens, queries) to search.
JAX_DECODE = ((8, 8), (16, 8), (8, 16), (16, 32))
JAX_CHUNK = ((4, 32), (8, 32), (16, 32), (4, 64), (4, 128))


def schedule_of(build: Callable[..., Any], target: str, *args: Any, **kwargs: Any) -> list[Schedule]:
    """Compiles what build(*args, **kwargs) returns for the target and reads each kernel's schedule.

    build: picklable; returns (fn, arguments as ShapeDtypeStruct) or (fn, arguments, donated indices). Without arguments
    it gets the target's devices and returns a Program. It runs in a new process, because libtpu reads its dump flags
    once. What it or the compiler raises is raised here.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_compile_and_read, build, target, args, kwargs).result()


def _compile_and_read(build: Callable[..., Any], target: str, args: tuple, kwargs: dict) -> list[Schedule]:
    with tempfile.TemporaryDirectory(prefix="tpu-schedule-") as folder:
        prepare_environment()
        os.environ["LIBTPU_INIT_ARGS"] = DUMP_FLAGS.format(folder=folder)
        with quiet_stderr():
            if args or kwargs:
                fn, arguments, *donate = build(*args, **kwargs)
                compile_for(TARGETS[target], fn, arguments, donate=donate[0] if donate else ())
            else:
                devices = devices_of(TARGETS[target])
                mesh, jitted, shapes = build(devices).on(devices)
                compile_on(mesh, jitted, *shapes)
        return read_dump(Path(folder))


def describe(schedule: Schedule) -> str:
    """A kernel's loops as text: bundles with and without inner loops, spills, and the use of each unit in percent."""
    units = [unit for unit in schedule.capacity if ":" not in unit]
    lines = [f"{schedule.kernel}: {schedule.bundles} bundles, {schedule.spills} vector spills and fills"]
    for loop in schedule.loops:
        use = " ".join(f"{unit} {100 * loop.use(unit):.0f}%" for unit in units)
        lines.append(
            f"  {'  ' * (loop.depth - 1)}loop at {loop.start:#x}: {loop.bundles} bundles ({loop.own_bundles} without "
            f"inner loops), {loop.spills} spills and fills; {use}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.tpu_schedule", description=(__doc__ or "").split("\n")[0])
    tpus = [name for name, target in TARGETS.items() if target.device.platform == "tpu"]
    parser.add_argument("--target", choices=tpus, action="append", help="default: v6e and v7x; may be given twice")
    parser.add_argument("--only", default="", metavar="TEXT", help="shapes whose name has TEXT in it")
    parser.add_argument("--no-jax", action="store_true", help="without jax's own kernel, whose search takes minutes")
    parser.add_argument("--loops", metavar="TEXT", help="every loop of the cases whose name has TEXT in it, instead")
    args = parser.parse_args(argv)
    prepare_environment()
    shapes, cases = [shape for shape in SHAPES if args.only in shape], []
    if args.loops is None and not shapes:
        parser.error(f"--only {args.only}: the shapes are {', '.join(SHAPES)}")
    if args.loops is not None:
        from scripts.aot.cases import CASES

        cases = [case for case in CASES if case.platform == "tpu" and args.loops in case.name]
        if not cases:
            parser.error(f"--loops {args.loops}: no such case; `python -m scripts.aot_check --list` has them all")
    for name in args.target or ["v6e", "v7x"]:
        target = TARGETS[name]
        try:
            devices_of(target)
        except TargetUnavailable as error:
            print(error, file=sys.stderr)
            return 2
        if args.loops is not None:
            print_loops(target, cases)
        else:
            print_report(target, shapes, with_jax=not args.no_jax)
    return 0


def print_loops(target: Target, cases: list[Any]) -> None:
    for case in cases:
        print(f"\n{target.name}: {case.name}")
        for schedule in schedule_of(case.build, target.name):
            if schedule.loops:
                print(describe(schedule), flush=True)


def print_report(target: Target, shapes: list[str], *, with_jax: bool) -> None:
    device = target.device
    clock, bandwidth = device.clock_hz / 1e9, device.hbm_bandwidth / 1e12
    print(f"\n{target.name} ({device.kinds[0]}, {clock:.2f} GHz, {bandwidth:.2f} TB/s)")
    print("bundles: of the loop that computes, without masks; masked: of the loop at an edge; spills: vector\n"
          "registers to memory and back; DMA: the block's bytes at full bandwidth, in bundles; units: slots used")
    for step in ("decode", "chunk"):
        unit = "bundles a KV token" if step == "decode" else "bundles a (query, key, head) pair, chunk of 512"
        print(f"\n  {step}: {unit}")
        print(f"  {'shape':14} {'kernel':6} {'blocks':46} {'bundles':>8} {'of':>10} {'each':>9} {'masked':>7} "
              f"{'spills':>7} {'DMA':>6}  {'bound by':18} {' '.join(UNITS)}")
        for shape in shapes:
            for kernel, measure in measures(target, shape, step, with_jax=with_jax):
                print_line(target, shape, kernel, measure, step)


def measures(target: Target, name: str, step: str, *, with_jax: bool):
    """(kernel, Measure or the reason why there is none): ours, then jax's best."""
    from scripts.aot.cases import DECODE, MIXED, jax_ragged_paged, ragged_paged
    from scripts.aot.measures import chunk_measure, decode_measure, jax_measure
    from scripts.aot.models import ATTENTION
    from serving.runner.memory import PAGE_SIZE

    shape, rows, page_size = ATTENTION[name], DECODE if step == "decode" else MIXED, PAGE_SIZE["tpu"]
    try:
        schedules = schedule_of(partial(ragged_paged, shape, rows, "mosaic_tpu"), target.name)
        if step == "decode":
            yield "ours", decode_measure(schedules, shape, page_size, rows.num_rows, target.device)
        else:
            yield "ours", chunk_measure(schedules, shape, page_size, target.device)
    except Exception as error:  # a compiler's refusal is a result
        yield "ours", _reason(error)
    if not with_jax:
        return
    found, reason = [], "no block sizes were tried"
    for pages, queries in tqdm(JAX_DECODE if step == "decode" else JAX_CHUNK, desc=f"jax {name} {step}", leave=False):
        try:
            schedules = schedule_of(partial(jax_ragged_paged, shape, rows, pages, queries), target.name)
            found.append(jax_measure(schedules, shape, pages, queries, page_size))
        except Exception as error:
            reason = _reason(error)
    cost = (lambda m: m.per_token()) if step == "decode" else (lambda m: m.per_pair())
    yield "jax", min(found, key=cost) if found else reason


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:150]}"


def print_line(target: Target, shape: str, kernel: str, measure: Any, step: str) -> None:
    if isinstance(measure, str):
        print(f"  {shape:14} {kernel:6} {measure}", flush=True)
        return
    if step == "decode":
        of, each = f"{measure.tokens:,}", f"{measure.per_token():.2f}"
    else:
        of, each = f"{measure.tokens * measure.queries:,}", f"{measure.per_pair():.2e}"
    masked = "" if measure.edge is None else f"{measure.edge:,}"
    units = " ".join(f"{measure.use(unit):>{len(unit)}.0%}" for unit in UNITS)
    dma = target.device.dma_cycles(measure.hbm_bytes)
    print(f"  {shape:14} {kernel:6} {measure.blocks:46} {measure.bundles:8,} {of:>10} {each:>9} {masked:>7} "
          f"{measure.spills:7,} {dma:6,.0f}  {measure.bound(target.device):18} {units}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
