"""Device meshes: `--mesh 8x1` (tensor x data) or `--mesh tensor=4,data=2`.

Mesh axes: `data` (groups of sequences with page pools of their own), `pipeline` (stages of layers), `context` (the
tokens of a sequence), `tensor` (heads, ffn and vocabulary).
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

# From the outermost: tensor's collectives are the most frequent, so its devices are neighbours.
AXES = ("data", "pipeline", "context", "tensor")


_MEANT = {"tp": "tensor", "dp": "data", "pp": "pipeline", "cp": "context", "sp": "context",
          **dict.fromkeys(("ep", "expert", "experts"), "--enable-expert-parallel, which divides experts over data and "
                          "tensor")}  # fmt: skip


class MeshError(ValueError):
    """A mesh that cannot be built; the message says what would work."""


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """Sizes of the mesh axes."""

    tensor: int = 1
    data: int = 1
    context: int = 1
    pipeline: int = 1

    @property
    def num_devices(self) -> int:
        return self.tensor * self.data * self.context * self.pipeline

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    def __str__(self) -> str:
        more = "".join(f",{axis}={getattr(self, axis)}" for axis in ("context", "pipeline") if getattr(self, axis) > 1)
        return f"tensor={self.tensor},data={self.data}{more}"


def parse_mesh(text: str) -> MeshSpec:
    """`8x1` is tensor=8, data=1; `tensor=4,data=2` names the axes (absent ones are 1)."""
    sizes: dict[str, int] = {}
    if short := re.fullmatch(r"([0-9]+)x([0-9]+)", text):
        sizes = {"tensor": int(short[1]), "data": int(short[2])}
    else:
        for part in text.split(","):
            named = re.fullmatch(r"\s*(\w+)\s*=\s*(-?[0-9]+)\s*", part)
            if not named:
                raise MeshError(f"--mesh {text!r} is neither TENSORxDATA (8x1) nor axis=size pairs (tensor=4,data=2)")
            if named[1] not in AXES:
                meant = _MEANT.get(named[1]) or "".join(difflib.get_close_matches(named[1], AXES, n=1))
                hint = f"; did you mean {meant}?" if meant else ""
                raise MeshError(f"--mesh {text!r}: unknown axis {named[1]!r}, known axes are {', '.join(AXES)}{hint}")
            if named[1] in sizes:
                raise MeshError(f"--mesh {text!r}: axis {named[1]!r} is given twice")
            sizes[named[1]] = int(named[2])
    if min(sizes.values()) < 1:
        raise MeshError(f"--mesh {text!r}: every axis must be at least 1")
    return MeshSpec(**sizes)


def make_mesh(spec: MeshSpec, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """A mesh over the first devices. Raises MeshError when there are too few."""
    devices = list(jax.devices() if devices is None else devices)
    if spec.num_devices > len(devices):
        hint = ""
        if devices[0].platform == "cpu":
            hint = f"; XLA_FLAGS=--xla_force_host_platform_device_count={spec.num_devices} simulates them on a CPU"
        raise MeshError(
            f"--mesh {spec} needs {spec.num_devices} devices, this process has {len(devices)} "
            f"({devices[0].platform}); --mesh {_shrunk(spec, len(devices))} would fit{hint}"
        )
    return jax.sharding.Mesh(np.array(devices[: spec.num_devices]).reshape(spec.sizes), AXES)


def _shrunk(spec: MeshSpec, num_devices: int) -> MeshSpec:
    """The mesh with its axes made smaller, `data` first, until it fits."""
    for axis in AXES:
        fewest = replace(spec, **{axis: 1})
        if fewest.num_devices <= num_devices:
            return replace(spec, **{axis: num_devices // fewest.num_devices})
        spec = fewest
    return spec
