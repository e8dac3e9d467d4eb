"""Interpret mode: kernels of a TPU or a GPU run on the CPU, with their DMAs, semaphores and races.

The one file that touches what jax keeps private or moves between versions.
"""

from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

Params = Any  # what `pallas_call(interpret=...)` and `plgpu.kernel(interpret=...)` take


def tpu_params() -> Params:
    """Copies happen as late as the semaphores allow, buffers start as NaN, and reads out of bounds raise.

    Two accesses of which one writes and that nothing orders raise; jax 0.10 only prints them, so tests ask
    `races_found()` as well. After an exception in a kernel the interpreter's state is stale: call `reset()`.
    """
    return pltpu.InterpretParams(
        detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan", out_of_bounds_reads="raise",
    )  # fmt: skip


def gpu_params() -> Params:
    """As tpu_params, for kernels of Mosaic GPU. NotImplementedError where this jax has no such interpreter."""
    try:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    except ImportError as error:
        raise NotImplementedError(
            f"jax {jax.__version__} has no interpret mode for Mosaic GPU kernels; jax 0.10.2 and newer have"
        ) from error
    return InterpretGPUParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")


def reset() -> None:
    """Forgets the state of both interpreters: needed after a kernel raised, before the next one runs."""
    pltpu.reset_tpu_interpret_mode_state()
    try:
        from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import reset_gpu_interpret_mode_state
    except ImportError:
        return
    reset_gpu_interpret_mode_state()


def races_found() -> bool:
    """Whether the last TPU kernel that was interpreted with race detection had a race (read it before `reset()`)."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    races = interpret_pallas_call.races
    return races is not None and races.races_found
