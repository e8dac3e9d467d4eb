"""Which meshes a model could take on a topology, and which of them are best."""

from collections.abc import Iterator, Sequence

from model.config import ModelConfig
from model.fitting import parts_divide
from scripts.planning.placement import MeshLayout
from scripts.planning.plan import MeshPlan
from scripts.planning.topology import PlanError, Topology
from sharding.mesh import MeshSpec


def meshes(topology: Topology) -> list[MeshSpec]:
    """Every tensor x data that uses all devices."""
    n = topology.num_devices
    return [MeshSpec(tensor=tensor, data=n // tensor) for tensor in range(n, 0, -1) if n % tensor == 0]


def layouts(config: ModelConfig, topology: Topology) -> list[MeshLayout]:
    """Those whose `tensor` divides something of the model, and with experts also the ones whose groups share them,
    where they divide."""
    specs = [spec for spec in meshes(topology) if any(parts_divide(config, spec.tensor).values())]
    found = [MeshLayout(spec) for spec in specs]
    if config.num_experts is not None and config.num_experts % topology.num_devices == 0:
        found += [MeshLayout(spec, expert_parallel=True) for spec in specs if spec.data > 1]
    return found


def ranked(plans: Sequence[MeshPlan], by: str) -> list[MeshPlan]:
    """Best first: compiled ones before those by formula, whose numbers are lower bounds and do not compare; those that
    do not fit last, the one that lacks least before the others."""

    def key(plan: MeshPlan):
        score = -plan.throughput if by == "throughput" else plan.latency
        return (not plan.memory.fits, plan.memory.missing, plan.compiled is None, score)

    return sorted(plans, key=key)


def suggestions(topology: Topology, plans: Sequence[MeshPlan]) -> Iterator[str]:
    """What would make a model fit that fits on no mesh."""
    best = min(plans, key=lambda plan: plan.memory.missing)
    memory = best.memory
    sharded = memory.weights * best.placement.spec.tensor
    per_device = memory.usable - memory.state - memory.temporaries - 2 * memory.page
    yield (f"no mesh of {topology.name} holds it: --mesh {best.placement.spec} comes closest and lacks "
           f"{memory.missing / 1e9:.2f} GB a device")  # fmt: skip
    if per_device > 0:
        need = -(-sharded // per_device)
        devices = 1 << (need - 1).bit_length()
        yield f"{devices} such devices would hold the weights (at least {need} by memory alone)"
    if memory.weights // 2 + memory.state + memory.temporaries + 2 * memory.page <= memory.usable:
        yield "8-bit weights would fit (the engine does not serve them yet)"


def check(spec: MeshSpec, topology: Topology) -> None:
    """Raises PlanError for a mesh that the topology cannot take, or the planner."""
    if spec.context * spec.pipeline > 1:
        raise PlanError(f"--mesh {spec}: the planner knows tensor and data, as in --mesh {topology.num_devices}x1")
    if spec.num_devices != topology.num_devices:
        fitting = ", ".join(f"{mesh.tensor}x{mesh.data}" for mesh in meshes(topology))
        raise PlanError(f"--mesh {spec} has {spec.num_devices} devices, {topology.name} has {topology.num_devices}; "
                        f"--mesh {fitting} would use them all")  # fmt: skip
