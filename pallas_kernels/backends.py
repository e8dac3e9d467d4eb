"""Which implementation of a kernel serves: chosen once, at build time, from the device and what the model asks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

# What keeps a backend from serving a spec on a kind of device (None: simulated on a CPU), or None.
Unsupported = Callable[[Any, str | None], str | None]

_PLATFORM = {"mosaic_tpu": "tpu", "mosaic_gpu": "gpu"}
_SIMULATED_DEVICES = 8
_NATIVE = {platform: name for name, platform in _PLATFORM.items()}


@dataclass(frozen=True, kw_only=True)
class Choice:
    name: str
    simulated: bool  # runs in Pallas' interpret mode on a CPU: exact and slow
    fallback: str | None  # why the device's own kernel was not taken, where "auto" could not take it


def require_positive(spec: Any, *fields: str) -> None:
    """ValueError that names the first of these sizes that is below 1; None means not given."""
    for field in fields:
        value = getattr(spec, field)
        if value is not None and value < 1:
            raise ValueError(f"{field}={value} must be at least 1")


def choose(kernel: str, name: str, backends: Mapping[str, Unsupported], spec: Any, device: Any) -> Choice:
    """`name` is one of `backends` or "auto": the jax device's own kernel where it supports the spec, else "xla".

    A kernel asked for by name on a CPU is simulated. `kernel` is for messages. Raises ValueError with what is missing.
    """

    def missing_for(name: str, kind: str | None) -> str | None:
        return _missing_here(name, simulated=kind is None) or backends[name](spec, kind)

    fallback = None
    if name == "auto":
        name = _NATIVE.get(device.platform, "xla")
        if (missing := missing_for(name, device.device_kind)) is not None:
            name, fallback = "xla", f"{name}: {missing}"
    if name not in backends:
        raise ValueError(f"{kernel} backend {name!r} is not one of auto, {', '.join(backends)}")
    platform = _PLATFORM.get(name)
    if platform not in (None, device.platform) and device.platform != "cpu":
        raise ValueError(f"{kernel} backend {name!r} runs on {platform} (simulated on cpu), not on {device.platform}")
    simulated = platform is not None and device.platform == "cpu"
    if (missing := missing_for(name, None if simulated else device.device_kind)) is not None:
        if fallback is not None:  # what to change: the kernel's reason comes first
            raise ValueError(f"{kernel}: no backend can serve this. {fallback}; {name}: {missing}")
        raise ValueError(f"{kernel} backend {name!r}: {missing}")
    return Choice(name=name, simulated=simulated, fallback=fallback)


def _missing_here(name: str, *, simulated: bool) -> str | None:
    """What keeps a backend from running with this jax and these devices, whatever the spec."""
    if name != "mosaic_gpu":
        return None
    if jax.__version_info__ < (0, 12):  # 0.11 has no plgpu.store
        return f"Mosaic GPU kernels need jax 0.12 or newer, this is {jax.__version__}"
    if simulated and jax.local_device_count() < _SIMULATED_DEVICES:
        return (
            f"simulating a GPU needs XLA_FLAGS=--xla_force_host_platform_device_count={_SIMULATED_DEVICES}: each warp "
            "that waits occupies a thread of XLA's pool, which grows with the devices, and an empty pool hangs"
        )
    return None
