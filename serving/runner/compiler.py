"""Compiles the closed shape set before serving, in parallel, and counts what compiles afterwards: nothing may."""

import ctypes
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import jax
from tqdm import tqdm

from serving.errors import ConfigError
from serving.runner.shapes import StepShape

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def use_persistent_cache(folder: str | None) -> str:
    """Turns on jax's compilation cache (None: the user's cache folder, "": off); returns the folder in use."""
    if folder == "":
        return ""
    path = Path(folder) if folder else Path.home() / ".cache" / "pageloom" / "xla"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--compilation-cache-dir {path}: {error.strerror}; name another, or '' for none") from error
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return str(path)


def compile_step(lowered: jax.stages.Lowered, shape: StepShape) -> jax.stages.Compiled:
    """Compiles one shape for the devices of this process."""
    return lowered.compile(compiler_options=compiler_options(jax.default_backend(), shape))


def compiler_options(platform: str, shape: StepShape) -> dict[str, int | bool | str]:
    """What helps a step of this shape; docs/performance.md says by how much."""
    if platform == "cpu" and shape.num_tokens > shape.num_rows:
        # XLA prefers 256-bit vectors; with 512 a long prefill is 10-15% faster where the CPU has them, decoding is not.
        return {"xla_cpu_prefer_vector_width": 512}
    if platform == "gpu":
        # Products in Triton, and products merged into one, want each layer's weights copied out of the stacked ones.
        # Beside a page pool that fills the memory XLA would compute things twice, to save what is not short.
        return {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0,
                "xla_disable_hlo_passes": "rematerialization"}  # fmt: skip
    return {}


def compile_all(
    make: Mapping[StepShape, Callable[[], jax.stages.Compiled]], *, progress: bool
) -> dict[StepShape, jax.stages.Compiled]:
    """Makes every executable, on as many threads as there are cores."""
    compiled = {}
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        futures = {pool.submit(one): shape for shape, one in make.items()}
        with tqdm(total=len(futures), desc="Compiling step shapes", unit="shape", disable=not progress) as bar:
            for future in as_completed(futures):
                compiled[futures[future]] = future.result()
                bar.update()
    return_freed_memory()
    return compiled


def return_freed_memory() -> None:
    """To the system. glibc keeps what was freed: a gigabyte and more after XLA compiled for a CPU."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class CompileCounter:
    """Counts XLA compilations of this process from `start` on."""

    def __init__(self) -> None:
        self.count, self._on = 0, False
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def start(self) -> None:
        self._on = True

    def _record(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if self._on and event == _COMPILE_EVENT:
            self.count += 1
