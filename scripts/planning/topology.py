"""What can be planned for: a slice of TPU chips or a GPU server, its devices and the network between them.

`v6e:2x4` is eight v6e chips in a grid of 2 x 4, `v7x:2x2x1` (also `tpu7x:2x2x1`) four chips of two devices each,
`h200:1x1x8` one server with eight GPUs, `cpu:8` eight simulated devices of this machine.
"""

import re
from dataclasses import dataclass, replace
from math import prod

from pallas_kernels.devices import DEVICES, Device
from scripts.planning.counting import Collective
from serving.runner.memory import host_memory

ALIASES = {"tpu7x": "v7x", "v5litepod": "v5e", "trillium": "v6e", "ironwood": "v7x"}


class PlanError(ValueError):
    """What was asked for cannot be planned; one line that says what would work."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """link: bytes/s out of a device over one link, one way; a switch is one link to everybody. core_link: between
    the two devices of one chip. hop_seconds: what a message takes over one link, however small. wraps: a side of at
    least this many chips closes to a ring."""

    link: float
    hop_seconds: float
    switched: bool = False
    core_link: float = 0.0
    wraps: int = 16


# TPUs: cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}. v5e: 1,600 Gbit/s over 4 ports, v6e: 3,200 over 4; v5p and v7x:
# 1,200 GB/s both ways over 6. The two halves of a v7x chip are joined at six times a link's rate (same page). v5e and
# v6e close to rings at 16 chips, v5p and v7x at 4. A hop takes about 1 us: jax-ml.github.io/scaling-book, chapter 3.
# H200: NVLink 4 at 900 GB/s both ways through a switch (NVIDIA's data sheet); small NCCL all-reduces over eight
# take some 15 us, which is 2 * 7 steps of 1 us.
NETWORKS = {
    "v5e": Network(link=50e9, hop_seconds=1e-6),
    "v6e": Network(link=100e9, hop_seconds=1e-6),
    "v5p": Network(link=100e9, hop_seconds=1e-6, wraps=4),
    "v7x": Network(link=100e9, hop_seconds=1e-6, core_link=600e9, wraps=4),
    "h200": Network(link=450e9, hop_seconds=1e-6, switched=True),
    "cpu": Network(link=10e9, hop_seconds=1e-6, switched=True),
}

# Simulated devices are for checking the planner's counts; the rates are of no particular machine.
CPU = Device(name="cpu", platform="gpu", kinds=("cpu",), smem_bytes=0, hbm_bytes=0, hbm_bandwidth=20e9,
             bf16_flops=1e11, clock_hz=3e9)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Topology:
    """grid: chips along each side, or servers and GPUs. cores: devices of a chip."""

    device: Device
    grid: tuple[int, ...]
    cores: int = 1

    @property
    def name(self) -> str:
        return f"{self.device.name}:{'x'.join(map(str, self.grid))}"

    @property
    def platform(self) -> str:
        return "cpu" if self.device.name == "cpu" else self.device.platform

    @property
    def num_devices(self) -> int:
        return prod(self.grid) * self.cores

    @property
    def network(self) -> Network:
        return NETWORKS[self.device.name]

    @property
    def description(self) -> str:
        """What the compiler's topology is called."""
        size, name = "x".join(map(str, self.grid)), self.device.name
        return size if self.platform == "gpu" else f"{'tpu7x' if name == 'v7x' else name}:{size}"

    def bandwidth(self, devices: int, stride: int = 1) -> float:
        """Bytes/s that each device of a group sends while all of them pass data around in a ring.

        A ring that closes is used in both directions. In a line of chips the way back takes the links' other
        direction, and one remains. Neighbours are blocks as jax orders devices: 2 x 2 for four of 2 x 4. Devices that
        are not neighbours (stride above 1) get one direction of one link, though others' messages pass there, too.
        """
        net, chips = self.network, devices // self.cores
        if net.switched or stride > 1:
            return net.link
        if chips <= 1:
            return net.core_link
        wide = sum(side > 1 for side in self.grid) > 1
        closed = (wide and chips % 2 == 0 and chips > 2) or chips >= net.wraps
        ring = net.link * (2 if closed else 1)
        return min(ring, 2 * net.core_link) if self.cores > 1 else ring

    def seconds(self, collective: Collective) -> tuple[float, float]:
        """(latency, transfer) of one collective, by ring algorithms.

        With B bytes on n devices: an all-reduce passes 2 (n-1)/n B through each device, a gather or scatter half of
        that, an all-to-all (n-1)/n B over a switch and B n/8 over each direction of a ring's links. A message has to go
        n/2 hops when a ring is used both ways, n - 1 over a switch.
        """
        net, n, size = self.network, collective.devices, collective.bytes
        if n <= 1:
            return 0.0, 0.0
        width = self.bandwidth(n, collective.stride)
        hops = n - 1 if net.switched else max(n // 2, 1)
        part = size * (n - 1) / n
        match collective.kind:
            case "all-reduce":
                return 2 * hops * net.hop_seconds, 2 * part / width
            case "all-to-all" | "ragged-all-to-all":
                return hops * net.hop_seconds, part / width if net.switched else max(size * n / 4, part) / width
            case "collective-permute":
                return net.hop_seconds, size / (width if net.switched else min(width, net.link))
            case _:
                return hops * net.hop_seconds, part / width


def parse_topology(text: str) -> Topology:
    kind, _, size = text.partition(":")
    kind = ALIASES.get(kind, kind)
    sides = 1 if kind == "cpu" else 2 if kind in ("v5e", "v6e") else 3
    example = {1: "8", 2: "2x4", 3: "2x2x1"}[sides] if kind != "h200" else "1x1x8"
    if kind not in NETWORKS:
        raise PlanError(f"--topology {text!r}: unknown kind {kind!r}; known: {', '.join(EXAMPLES)}")
    if not re.fullmatch(r"\d+(x\d+)*", size) or size.count("x") != sides - 1 or 0 in (grid := _numbers(size)):
        raise PlanError(f"--topology {text!r}: {kind} takes {sides} size{'s' * (sides > 1)}, as in {kind}:{example}")
    if prod(grid) > MOST_CHIPS:
        raise PlanError(f"--topology {text!r}: {prod(grid)} chips, at most {MOST_CHIPS} are planned for")
    if kind == "cpu":
        return Topology(device=CPU, grid=grid)
    if DEVICES[kind].platform == "gpu" and grid[:2] != (1, 1):
        raise PlanError(f"--topology {text!r}: only one server's GPUs are known, {kind}:1x1x{grid[-1]} would work")
    device = DEVICES[kind]
    if kind == "v5p":  # a jax device is a whole chip, whose two TensorCores work as one; the table is of one
        device = replace(device, hbm_bytes=2 * device.hbm_bytes, hbm_bandwidth=2 * device.hbm_bandwidth,
                         bf16_flops=2 * device.bf16_flops)  # fmt: skip
    return Topology(device=device, grid=grid, cores=2 if kind == "v7x" else 1)


def _numbers(size: str) -> tuple[int, ...]:
    return tuple(int(n) for n in size.split("x"))


MOST_CHIPS = 1024  # a device stands for each while meshes are compared
EXAMPLES = ("v5e:2x4", "v6e:2x4", "v5p:2x2x1", "v7x:2x2x1", "h200:1x1x8", "cpu:8")


def hbm_limit(topology: Topology) -> int:
    """Bytes of one device."""
    if topology.platform != "cpu":
        return topology.device.hbm_bytes
    return host_memory() // topology.num_devices
