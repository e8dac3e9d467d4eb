"""From counts to seconds: a step takes as long as its slowest resource, part after part.

Three parts follow each other in every layer: dense matrices, attention, experts. Within a part, computing and reading
overlap, so that the longer one counts; the network is waited for (no overlap is assumed).
"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import zip_longest

from scripts.planning.counting import Collective, Counts
from scripts.planning.topology import Topology
from scripts.planning.workload import Cost, StepCost


@dataclass(frozen=True)
class Seconds:
    """compute, memory: all parts together, as if nothing else took time. total: what the step takes."""

    compute: float
    memory: float
    latency: float
    transfer: float
    total: float

    @property
    def network(self) -> float:
        return self.latency + self.transfer

    @property
    def bound(self) -> str:
        """The resource that takes longest."""
        names = {"compute": self.compute, "memory": self.memory, "network": self.network}
        return max(names, key=lambda name: names[name])


def step_seconds(topology: Topology, cost: StepCost) -> Seconds:
    device = topology.device
    parts = [(part.flops / device.bf16_flops, part.bytes / device.hbm_bandwidth)
             for part in (cost.dense, cost.attention, cost.experts)]  # fmt: skip
    latency, transfer = network_seconds(topology, cost.collectives)
    busy = sum(max(part) for part in parts)
    return Seconds(sum(c for c, _ in parts), sum(m for _, m in parts), latency, transfer, busy + latency + transfer)


def network_seconds(topology: Topology, collectives: Counter[Collective]) -> tuple[float, float]:
    """(latency, transfer) of all."""
    latency, transfer = 0.0, 0.0
    for collective, times in collectives.items():
        one = topology.seconds(collective)
        latency, transfer = latency + times * one[0], transfer + times * one[1]
    return latency, transfer


@dataclass(frozen=True)
class Line:
    """A count that grows with the tokens of a step, through two compiled steps."""

    base: float
    slope: float

    @staticmethod
    def through(small: tuple[int, float], large: tuple[int, float]) -> "Line":
        (t0, y0), (t1, y1) = small, large
        slope = max((y1 - y0) / (t1 - t0), 0.0) if t1 > t0 else 0.0
        return Line(max(y0 - slope * t0, 0.0), slope)

    def at(self, tokens: int) -> float:
        return self.base + self.slope * tokens


@dataclass(frozen=True)
class Travel:
    """A collective of the compiled steps: `line` gives its bytes for steps of `least` to `most` tokens."""

    one: Collective
    times: int
    line: Line
    least: float = 0
    most: float = float("inf")


@dataclass(frozen=True)
class CompiledCosts:
    """Two compiled steps, of few tokens and of many, and what lies between. Attention and experts are kernels, which
    are not in these counts, unless XLA computes them."""

    flops: Line
    bytes: Line
    collectives: tuple[Travel, ...]

    @staticmethod
    def of(small: tuple[int, Counts], large: tuple[int, Counts]) -> "CompiledCosts":
        (t0, a), (t1, b) = small, large
        # The same program but for its sizes, so that collectives of a kind and group pair up in order of their bytes.
        # Those without a partner are another way for tokens to travel: for up to t0 of them, or for more.
        found = []
        for key in sorted({(c.kind, c.devices, c.stride) for c in (*a.collectives, *b.collectives)}):
            few, many = (
                sorted(c for c in counts.collectives if (c.kind, c.devices, c.stride) == key) for counts in (a, b)
            )
            for one, other in zip_longest(few, many):
                if other is None:
                    found.append(Travel(one, a.collectives[one], Line(0, one.bytes / t0), most=t0))
                elif one is None:
                    found.append(Travel(other, b.collectives[other], Line(0, other.bytes / t1), least=t0 + 1))
                else:
                    found.append(Travel(one, a.collectives[one], Line.through((t0, one.bytes), (t1, other.bytes))))
        return CompiledCosts(Line.through((t0, a.flops), (t1, b.flops)),
                             Line.through((t0, a.hbm_bytes), (t1, b.hbm_bytes)), tuple(found))  # fmt: skip

    def replace_in(self, cost: StepCost, tokens: int) -> StepCost:
        """The step's cost with the dense part and the collectives as compiled."""
        found: Counter[Collective] = Counter()
        for travel in self.collectives:
            if travel.least <= tokens <= travel.most:
                found[replace(travel.one, bytes=round(travel.line.at(tokens)))] += travel.times
        dense = Cost(self.flops.at(tokens), self.bytes.at(tokens))
        return StepCost(dense=dense, attention=cost.attention, experts=cost.experts, collectives=found)
