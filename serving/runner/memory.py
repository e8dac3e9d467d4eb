"""How many KV pages fit: from the compiler's own memory analysis, not from a guessed fraction."""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from serving.errors import ConfigError

# Tokens of a KV page on one device, unless --block-size says otherwise. Short pages share more of a prefix; a copy of
# one on a GPU or TPU must be long enough to pay.
PAGE_SIZE = {"cpu": 16, "gpu": 64, "tpu": 128}
_SHARE = {"cpu": 0.1, "gpu": 0.9, "tpu": 0.9}  # of the memory: of a host other programs need some, too
_CGROUP_LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device."""

    limit: int  # memory of the device (of the host on CPU)
    share: float  # part of it that may be used; the rest is the reserve
    fixed: int  # weights and sampling state
    temporary: int  # of the largest step
    page: int

    @property
    def num_pages(self) -> int:
        """Rounded down to 1/32: a size that hardly moves from start to start keeps the compilation cache warm."""
        pages = (int(self.limit * self.share) - self.fixed - self.temporary) // self.page
        if pages < 2:
            raise ConfigError(
                f"the model does not fit: weights and state take {self.fixed / 1e9:.2f} GB and a step "
                f"{self.temporary / 1e9:.2f} GB of {self.limit * self.share / 1e9:.2f} GB "
                f"({self.share:.2%} of {self.limit / 1e9:.2f} GB); raise --gpu-memory-utilization, lower "
                "--max-num-batched-tokens or use more devices"
            )
        grid = 1 << max(pages.bit_length() - 6, 0)
        return pages // grid * grid


def device_memory(mesh: Mesh) -> int:
    """Bytes that one device of the mesh may use. Simulated CPU devices share the host's memory: those of the mesh, not
    those that it leaves idle."""
    devices = mesh.local_devices
    stats = devices[0].memory_stats() if devices[0].platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return host_memory() // len(devices)


def host_memory(limits: Sequence[Path] = _CGROUP_LIMITS) -> int:
    """Of this machine, or what a container may use of it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in limits:
        with suppress(OSError, ValueError):  # not there; "max"
            memory = min(memory, int(limit.read_text()))
    return memory


def check_pool(num_pages: int, size: int, mesh: Mesh) -> None:
    """Before anything is compiled for it. A CPU would promise the memory, and be killed when it is written."""
    if size > (limit := device_memory(mesh)):
        raise ConfigError(f"--num-pages {num_pages}: {size / 1e9:.1f} GB of a device that has {limit / 1e9:.1f}; "
                          f"at most {limit * num_pages // size} would fit, less what weights and steps take")


def memory_share(platform: str, chosen: float | None) -> float:
    return _SHARE[platform] if chosen is None else chosen


def bytes_per_device(tree) -> int:
    """Of arrays or shape structs that carry shardings."""
    return sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)
    )
