"""A model's experts while it serves: how busy they are, and where they lie."""

import numpy as np

from model.build import Kernels
from model.config import ModelConfig
from serving.config import EplbConfig
from serving.request import MOST_EXPERTS_TOLD, ExpertStats
from serving.runner.expert_load import ExpertLoad
from serving.runner.programs import StepProgram
from serving.runner.rebalance import Rebalancer
from serving.runner.step import StepOutputs
from sharding.expert_placement import balancedness, first_placement
from sharding.rules import AxisRules


class ServedExperts:
    """Called by the runner before and after it dispatches a step. Moves experts if the kernels were chosen for it."""

    def __init__(self, program: StepProgram, config: ModelConfig, rules: AxisRules, kernels: Kernels, eplb: EplbConfig):
        backend, num_experts = kernels.experts, config.num_experts
        assert backend is not None and num_experts is not None
        self._layers = [number for number, layer in enumerate(config.layers) if layer.moe is not None]
        self._devices, self._interval = rules.shards("experts", backend.num_places), eplb.step_interval
        self._load = ExpertLoad(eplb.window_size, eplb.step_interval)
        self._fixed = first_placement(len(self._layers), num_experts, backend.num_places)
        self._rebalancer = None
        if backend.max_replicas is not None:
            num_hosts = len({device.process_index for device in rules.mesh.devices.flat})
            num_nodes = num_hosts if self._devices % num_hosts == 0 else 1
            self._rebalancer = Rebalancer(program.params, program.paths, config, rules, backend, num_nodes=num_nodes)
        self._news = False

    @property
    def temporary(self) -> int:
        """Bytes that moving takes on a device, at a time when no step runs."""
        return 0 if self._rebalancer is None else self._rebalancer.temporary

    @property
    def placement(self) -> np.ndarray:
        return self._fixed if self._rebalancer is None else self._rebalancer.placement

    def before_step(self) -> None:
        steps = self._load.read()
        self._news = self._news or bool(steps)
        if self._rebalancer is None:
            return
        if any(step % self._interval == 0 for step in steps):
            assert self._load.recent is not None
            self._rebalancer.plan(self._load.recent)
        self._rebalancer.move()

    def after_step(self, outputs: StepOutputs) -> None:
        assert outputs.expert_load is not None
        self._load.after_step(outputs.expert_load)

    def news(self) -> ExpertStats | None:
        """What was read since the last call."""
        total, recent = self._load.total, self._load.recent
        if not self._news or total is None or recent is None:
            return None
        self._news = False
        return ExpertStats(
            layers=self._layers,
            balancedness=balancedness(recent, self.placement, self._devices).tolist(),
            tokens=total.tolist() if total.size <= MOST_EXPERTS_TOLD else [],
            layers_moved=0 if self._rebalancer is None else self._rebalancer.layers_moved,
        )
