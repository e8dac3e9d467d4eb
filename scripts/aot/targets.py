"""Compiling for a chip that is not there: libtpu and the CUDA plugin compile on any machine for a described one."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pallas_kernels.devices import DEVICES, Device

# What XLA must know of an H200 (GpuTargetConfig as text): limits of sm_90, bandwidth, clock and memory of the card.
H200_CONFIG = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560
  clock_rate_ghz: 1.98 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """topology: the slice that is described to the compiler; config: a GpuTargetConfig for GPUs."""

    device: Device
    topology: str
    config: str | None = None

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def platform(self) -> str:
        return {"tpu": "tpu", "gpu": "cuda"}[self.device.platform]


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(device=DEVICES["v5e"], topology="v5e:2x4"),
        Target(device=DEVICES["v6e"], topology="v6e:2x4"),
        Target(device=DEVICES["v7x"], topology="tpu7x:2x2x1"),
        Target(device=DEVICES["h200"], topology="1x1x8", config=H200_CONFIG),
    )
}


class TargetUnavailable(RuntimeError):
    """This environment has no compiler for the target; the message says what to install."""


def prepare_environment() -> None:
    """Before jax's first use in the process: CPU as the backend, no search for a real TPU or GPU."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # else a second process that compiles is refused
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"


@contextlib.contextmanager
def quiet_stderr() -> Iterator[Callable[[], str]]:
    """Compilers write warnings about host names straight to descriptor 2; yields a function that returns them."""
    with tempfile.TemporaryFile() as log:
        saved = os.dup(2)
        os.dup2(log.fileno(), 2)

        def text() -> str:
            log.seek(0)
            return log.read().decode(errors="replace")

        try:
            yield text
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def devices_of(target: Target) -> list[Any]:
    """The devices of the target's slice, to compile for. TargetUnavailable where this environment cannot."""
    from jax.experimental import topologies

    if target.config:
        options = {"topology_name": "", "topology": target.topology, "target_config": target.config}
    else:
        options = {"topology_name": target.topology}
    with quiet_stderr():
        try:
            return list(topologies.get_topology_desc(platform=target.platform, **options).devices)
        except Exception as error:  # jax raises whatever the plugin's absence leads to
            extra = "tpu" if target.platform == "tpu" else "cuda"
            raise TargetUnavailable(
                f"no compiler for {target.name} in this environment ({str(error).splitlines()[0][:200]}); "
                f"install the project's extra {extra!r}: pip install -e '.[{extra}]'"
            ) from error


def compile_for(target: Target, fn: Callable, args: Sequence[Any], *, donate: Sequence[int] = ()) -> Any:
    """Compiles fn(*args) for one device of the target; args: pytrees of ShapeDtypeStruct. Returns jax's Compiled.

    Lowering and compiling raise what a real device's compiler raises.
    """
    import jax
    import numpy as np

    mesh = jax.sharding.Mesh(np.array(devices_of(target)[:1]), ("one",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)

    return compile_on(mesh, jax.jit(fn, donate_argnums=tuple(donate)), *jax.tree.map(place, tuple(args)))


def compile_on(mesh: Any, jitted: Any, *args: Any, options: dict[str, Any] | None = None) -> Any:
    """Compiles a jitted function for arguments (ShapeDtypeStruct) whose shardings are on the mesh of a target. options:
    of XLA."""
    import jax

    # Pallas reads the chip's generation from the mesh.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), _without_persistent_cache():
        return jitted.lower(*args).compile(compiler_options=options)


@contextlib.contextmanager
def _without_persistent_cache() -> Iterator[None]:
    """What is compiled for an absent chip can be stored in jax's cache but not read again: that needs the chip."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax looks at the setting once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
