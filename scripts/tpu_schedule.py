"""How good is a TPU kernel's schedule? Read from the real TPU compiler's bundles, without a TPU.

    python -m scripts.tpu_schedule                       # every kernel, beside jax's own at the same shapes
    python -m scripts.tpu_schedule --target v6e --only llama3-8b/decode

To look at a kernel while writing it, use `schedule_of`:

    def build(pages_per_block):                          # at module level: it runs in a process of its own
        fn = functools.partial(my_kernel, ...)
        return fn, (jax.ShapeDtypeStruct(...), ...)      # and, if wanted, a third: indices of donated arguments

    if __name__ == "__main__":                           # needed: the process imports this file again
        for schedule in schedule_of(build, "v6e", 16):   # kernels of the program, the one with most bundles first
            print(describe(schedule))
        hot = schedule_of(build, "v6e", 16)[0].hot       # innermost loop with most bundles
        print(hot.bundles / tokens_per_block, hot.spills, hot.slots)
"""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from scripts.aot.bundles import DUMP_FLAGS, Schedule, read_dump
from scripts.aot.targets import TARGETS, compile_for, prepare_environment, quiet_stderr


def schedule_of(build: Callable[..., tuple], target: str, *args: Any, **kwargs: Any) -> list[Schedule]:
    """Compiles what build(*args, **kwargs) returns for the target and reads each kernel's schedule.

    build: picklable; returns (fn, arguments as ShapeDtypeStruct) or (fn, arguments, donated indices). It runs in a new
    process, because libtpu reads its dump flags once. What it or the compiler raises is raised here.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_compile_and_read, build, target, args, kwargs).result()


def _compile_and_read(build: Callable[..., tuple], target: str, args: tuple, kwargs: dict) -> list[Schedule]:
    with tempfile.TemporaryDirectory(prefix="tpu-schedule-") as folder:
        prepare_environment()
        os.environ["LIBTPU_INIT_ARGS"] = DUMP_FLAGS.format(folder=folder)
        with quiet_stderr():
            fn, arguments, *donate = build(*args, **kwargs)
            compile_for(TARGETS[target], fn, arguments, donate=donate[0] if donate else ())
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
