"""Compiles every kernel and the whole serving step for chips that are not there.

    python -m scripts.aot_check                          # every target whose compiler is installed
    python -m scripts.aot_check --target v6e --only llama3
    python -m scripts.aot_check --families --target v6e  # every family on a mesh for each way to divide it
    .venv-gpu/bin/python -m scripts.aot_check --target h200

Prints a table and exits with 1 when anything fails: a kernel that does not compile, VMEM or shared memory beyond the
chip's, a KV cache that is copied. TPU targets need libtpu (extra `tpu`, part of `test`); the GPU target needs the
extra `cuda` (4.4 GB), best in an environment of its own: `scripts/check --kernels` uses .venv-gpu where it exists.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tqdm import tqdm

from scripts.aot.targets import (
    TARGETS,
    Target,
    TargetUnavailable,
    compile_on,
    devices_of,
    prepare_environment,
    quiet_stderr,
)

# With --quick, these targets are compiled for what is marked quick, and the others for one shape of it.
QUICK, QUICK_SHAPE = ("v6e", "h200"), "attention llama3-8b "


@dataclass(frozen=True, kw_only=True)
class Result:
    """block_bytes: VMEM or shared memory of a kernel, None where unknown. problem: None when all is well."""

    name: str
    block_bytes: int | None = None
    temporaries: int | None = None
    seconds: float = 0.0
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the table; run() compiles."""

    name: str
    quick: bool
    run: Callable[[], Result]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.aot_check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", choices=(*TARGETS, "all"), default="all")
    parser.add_argument("--only", default="", metavar="TEXT", help="lines whose name has TEXT in it")
    parser.add_argument("--quick", action="store_true", help="a subset of the shapes, as CI runs it")
    parser.add_argument("--families", action="store_true", help="steps of every family, divided in every way, instead")
    parser.add_argument("--list", action="store_true", help="names only")
    args = parser.parse_args(argv)
    prepare_environment()
    failed, ran = 0, 0
    for target in TARGETS.values() if args.target == "all" else [TARGETS[args.target]]:
        all_checks = family_checks(target) if args.families else checks_for(target)
        checks = [check for check in all_checks if args.only in check.name]
        if args.quick:
            checks = [check for check in checks if check.quick and (target.name in QUICK or QUICK_SHAPE in check.name)]
        if args.list:
            print(*(f"{target.name}: {check.name}" for check in checks), sep="\n")
            continue
        try:
            devices_of(target)
        except TargetUnavailable as error:
            print(f"{target.name}: left out: {error}", file=sys.stderr if args.target == "all" else sys.stdout)
            if args.target != "all":
                return 2
            continue
        results = run_all(target, checks)
        print_table(target, results)
        ran += len(results)
        failed += sum(result.problem is not None for result in results)
    if not args.list:
        print(f"{ran} compiled, {failed} failed" if ran else "nothing was checked")
    return int(failed > 0 or (ran == 0 and not args.list))


def run_all(target: Target, checks: list[Check]) -> list[Result]:
    results = []
    with tqdm(checks, desc=target.name, unit="program", leave=False) as bar:
        for check in bar:
            bar.set_postfix_str(check.name)
            results.append(run_one(check))
    return results


def run_one(check: Check) -> Result:
    started = time.perf_counter()
    try:
        with quiet_stderr():
            return check.run()
    except Exception as error:  # whatever a compiler raises is this line's result
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        problem = f"{type(error).__name__}: {first[:300]}"
        return Result(name=check.name, seconds=time.perf_counter() - started, problem=problem)


def checks_for(target: Target) -> Iterator[Check]:
    from scripts.aot.cases import CASES, KIND
    from scripts.aot.experts import LAYERS
    from scripts.aot.models import STEPS
    from scripts.aot.step import verifying_shape
    from serving.runner.shapes import StepShape

    for case in CASES:
        if case.platform == target.device.platform:
            yield Check(name=case.name, quick=case.quick, run=lambda case=case: check_kernel(target, case))
    for layer in LAYERS.values():
        name = f"experts {layer.name} {layer.mesh} T={layer.num_tokens}"
        yield Check(name=name, quick=False, run=lambda layer=layer, name=name: check_experts(target, layer, name))
    for step in STEPS.values():
        native, latent = KIND[target.device.platform], "kv_lora_rank" in step.hf
        if "context" in step.mesh:
            yield from context_checks(target, step)
            continue
        if step.speculation is not None:
            shape = verifying_shape(step)
            yield Check(name=f"step {step.name} {shape} ({native})", quick=False,
                        run=partial(check_step, target, step, native, shape))  # fmt: skip
            continue
        # XLA refuses latent attention on TPUs. --quick leaves steps in XLA out, which may copy the cache on TPUs.
        for backend in (native,) if latent and target.device.platform == "tpu" else (native, "xla"):
            for tokens in (step.max_num_seqs, step.num_tokens):
                shape = StepShape(tokens, step.max_num_seqs)
                quick = tokens > step.max_num_seqs and backend == native
                yield Check(
                    name=f"step {step.name} {shape} ({backend})", quick=quick,
                    run=lambda step=step, backend=backend, shape=shape: check_step(target, step, backend, shape),
                )


def context_checks(target: Target, step) -> Iterator[Check]:
    """Decoding, a chunk that all devices have whole, and one that is spread over the context axis."""
    from serving.runner.shapes import Spreading, StepShape, step_shapes
    from sharding.mesh import parse_mesh

    rows, spreading = step.max_num_seqs, Spreading(context=parse_mesh(step.mesh).context, threshold=step.num_tokens)
    spread = next(shape for shape in step_shapes(rows, step.num_tokens, spreading) if shape.context > 1)
    for shape in (StepShape(rows, rows), StepShape(step.num_tokens, rows), spread):
        yield Check(name=f"step {step.name} {shape} (auto)", quick=False,
                    run=partial(check_step, target, step, "auto", shape))  # fmt: skip


def family_checks(target: Target) -> Iterator[Check]:
    from scripts.aot.cases import KIND
    from scripts.aot.families import FAMILIES, WAYS, refused, step_of
    from serving.runner.shapes import StepShape

    for family in FAMILIES:
        for way in WAYS.values():
            if refused(family, way) is None:
                step = step_of(family, way)
                shape = StepShape(step.num_tokens, step.max_num_seqs)
                yield Check(name=f"{family} {way.name} ({step.mesh})", quick=False, run=partial(
                    check_step, target, step, "auto" if way.name == "context" else KIND[target.device.platform], shape))


def check_kernel(target: Target, case) -> Result:
    import jax

    from scripts.aot.memory import block_bytes, kv_problem, temporaries

    started = time.perf_counter()
    devices = devices_of(target)
    program = case.build(devices)
    mesh, jitted, shapes = program.on(devices)
    block = program.block_bytes
    if block is None and target.device.platform == "tpu":
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            block = block_bytes(jitted.trace(*shapes).jaxpr)
    compiled = compile_on(mesh, jitted, *shapes)
    limit = target.device.block_memory_bytes
    problem = f"{block:,} bytes of {limit:,}" if block is not None and block > limit else None
    if problem is None and program.kv_bytes:
        problem = kv_problem(compiled, program.kv_bytes, program.layer_bytes)
    return Result(name=case.name, block_bytes=block, temporaries=temporaries(compiled),
                  seconds=time.perf_counter() - started, problem=problem)


def check_experts(target: Target, layer, name: str) -> Result:
    from scripts.aot.experts import compile_layer
    from scripts.aot.memory import temporaries

    started = time.perf_counter()
    return Result(name=name, temporaries=temporaries(compile_layer(target, layer)),
                  seconds=time.perf_counter() - started)


def check_step(target: Target, step, backend: str, shape) -> Result:
    from scripts.aot.memory import kv_problem, temporaries
    from scripts.aot.step import compile_step

    started = time.perf_counter()
    compiled, kv_bytes, layer_bytes = compile_step(target, step, backend, shape)
    return Result(name=f"step {step.name} {shape} ({backend})", temporaries=temporaries(compiled),
                  seconds=time.perf_counter() - started, problem=kv_problem(compiled, kv_bytes, layer_bytes))


def print_table(target: Target, results: list[Result]) -> None:
    memory = "VMEM" if target.device.platform == "tpu" else "SMEM"
    width = max((len(result.name) for result in results), default=0)
    print(f"\n{target.name} ({target.device.kinds[0]}, {target.topology}, {memory} "
          f"{target.device.block_memory_bytes / 2**20:.1f} MiB)")
    print(f"{'program':{width}}  {memory + ' MiB':>9}  {'temporaries':>12}  {'seconds':>7}  ok")
    for result in results:
        block = "" if result.block_bytes is None else f"{result.block_bytes / 2**20:.2f}"
        temporary = "" if result.temporaries is None else f"{result.temporaries:,}"
        ok = "yes" if result.problem is None else f"NO: {result.problem}"
        print(f"{result.name:{width}}  {block:>9}  {temporary:>12}  {result.seconds:7.1f}  {ok}")


if __name__ == "__main__":
    sys.exit(main())
