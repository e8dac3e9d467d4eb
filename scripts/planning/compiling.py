"""Compiles the engine's own step for a topology, without weights, and counts what the compiler made of it."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from scripts.aot.targets import (
    H200_CONFIG,
    Target,
    TargetUnavailable,
    compile_on,
    quiet_stderr,
)
from scripts.aot.targets import devices_of as target_devices
from scripts.planning.counting import count
from scripts.planning.placement import Placement, place
from scripts.planning.plan import Compiled, estimated_temporaries, memory_of
from scripts.planning.topology import PlanError, Topology
from serving.runner.compiler import compile_step, compiler_options
from serving.runner.shapes import StepShape, step_shapes


def compiler_devices(topology: Topology) -> list[Any]:
    """Devices to compile for. PlanError where this environment has no compiler for them."""
    if topology.platform == "cpu":
        return list(jax.devices("cpu")[: topology.num_devices])
    config = H200_CONFIG if topology.platform == "gpu" else None
    try:
        return target_devices(Target(device=topology.device, topology=topology.description, config=config))
    except TargetUnavailable as error:
        raise PlanError(f"--topology {topology.name}: {error}; --compile 0 plans by formula alone") from error


def compile_plan(p: Placement, devices: list[Any], done: Callable[[], None] = lambda: None) -> Compiled:
    """Compiles the largest decode step and the largest step there is. done: called after each."""
    started = time.perf_counter()
    real = place(p.config, p.topology, p.layout, p.sizes, devices)
    shapes = step_shapes(p.sizes.max_num_seqs, p.sizes.max_num_batched_tokens)
    decode = max(shape for shape in shapes if shape.num_tokens == shape.num_rows)
    counted, temporaries = [], 0
    for shape in (decode, shapes[-1]):
        with contextlib.nullcontext() if p.topology.platform == "cpu" else quiet_stderr():
            compiled = compile_for(real, shape)
        text, analysis = compiled.as_text(), compiled.memory_analysis()
        assert text is not None and analysis is not None, "this backend says nothing of its programs"
        counted.append(count(text))
        temporaries = analysis.temp_size_in_bytes
        done()
    return Compiled(decode=counted[0], prefill=counted[1], decode_tokens=decode.num_tokens,
                    prefill_tokens=shapes[-1].num_tokens, temporaries=temporaries,
                    seconds=time.perf_counter() - started)  # fmt: skip


def compile_for(p: Placement, shape: StepShape) -> jax.stages.Compiled:
    # A pool as large as the service would have: one of few pages would be kept in VMEM, and moved there and back.
    pages = max(memory_of(p, estimated_temporaries(p)).num_pages, 8)
    jitted, arguments = p.program.step(shape, p.program.state_shapes(pages), p.row_pages)
    if p.topology.platform == "cpu":
        return compile_step(jitted.lower(*arguments), shape)
    return compile_on(p.rules.mesh, jitted, *arguments, options=compiler_options(p.topology.platform, shape))


@contextlib.contextmanager
def progress_bar(total: int, show: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that says what is being compiled and counts it."""
    from tqdm import tqdm

    with tqdm(total=total, desc="Compiling", unit="step", disable=not show, leave=False) as bar:

        def step(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        yield step
