"""A model on a mesh, without weights and without a compiler: which bytes each device holds, and of what.

Everything here follows from the shardings that the engine itself uses, so the byte counts are exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from model.build import Kernels, choose_kernels, model_rules, model_shapes
from model.config import LayerSpec, ModelConfig
from model.expert_options import ExpertOptions
from model.experts import is_expert_matrix
from model.transformer import Path, Transformer, param_axes, with_params
from scripts.planning.topology import PlanError, Topology
from serving.runner.memory import bytes_per_device
from serving.runner.programs import StepProgram, param_shapes
from sharding.mesh import MeshSpec, make_mesh
from sharding.rules import AxisRules


@dataclass(frozen=True)
class StandIn:
    """A device that is not there: as much of a jax device as laying out a model asks for."""

    id: int
    platform: str
    device_kind: str
    process_index: int = 0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the engine would be started with. max_num_seqs, max_num_batched_tokens: of each data group."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    dtype: jnp.dtype
    memory_share: float


@dataclass(frozen=True)
class MeshLayout:
    """expert_parallel: experts over data x tensor, as --enable-expert-parallel has it."""

    spec: MeshSpec
    expert_parallel: bool = False

    def __str__(self) -> str:
        return f"{self.spec}" + (" --enable-expert-parallel" if self.expert_parallel else "")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """params: shapes with their shardings."""

    config: ModelConfig
    topology: Topology
    layout: MeshLayout
    sizes: Sizes
    rules: AxisRules
    kernels: Kernels
    model: Transformer
    params: Mapping[Path, jax.ShapeDtypeStruct]

    @cached_property
    def weight_bytes(self) -> int:
        return bytes_per_device(list(self.params.values()))

    @cached_property
    def program(self) -> StepProgram:
        return StepProgram(self.model, self.kernels, max_num_seqs=self.sizes.max_num_seqs)

    @cached_property
    def state_bytes(self) -> int:
        """Of sampling: last tokens, biases, penalty counts."""
        state = self.program.state_shapes(8)
        return bytes_per_device(state) - bytes_per_device(state.kv_pages)

    @cached_property
    def page_bytes(self) -> int:
        return bytes_per_device(self.program.state_shapes(8).kv_pages) // 8

    @property
    def row_pages(self) -> int:
        return -(-self.sizes.max_model_len // self.sizes.page_size)

    def token_bytes(self) -> float:
        """KV of one token in one layer, on one device."""
        return self.page_bytes / self.sizes.page_size / self.config.num_layers

    # What one device computes with

    def held(self, path: Path) -> int:
        """Numbers of a parameter on one device."""
        param = self.params[path]
        assert param.sharding is not None
        return prod(param.sharding.shard_shape(param.shape))

    @cached_property
    def dense(self) -> int:
        """Numbers of the matrices that every token passes."""
        axes = {path: names for path, (_, names) in param_axes(self.model).items()}
        return sum(
            self.held(path) for path, names in axes.items()
            if len([n for n in names if n != "layers"]) >= 2 and path not in (("embedding",), ("head",))
            and not is_expert_matrix(path, None)
        )

    @property
    def head(self) -> int:
        return self.held(("embedding",) if self.config.tie_embeddings else ("head",))

    @property
    def vectors(self) -> int:
        """Bytes of what is read whole each step besides matrices: norms and biases."""
        matrices = self.dense + self.head * (1 if self.config.tie_embeddings else 2) + self.experts
        return self.weight_bytes - matrices * self.sizes.dtype.itemsize

    @cached_property
    def experts(self) -> int:
        return sum(self.held(path) for path in self.params if is_expert_matrix(path, None))

    @property
    def spec(self) -> MeshSpec:
        return self.layout.spec

    @property
    def expert_layers(self) -> list[LayerSpec]:
        return [layer for layer in self.config.layers if layer.moe is not None]

    @property
    def experts_held(self) -> int:
        """Of each layer that has some."""
        count = self.config.num_experts
        return 0 if count is None else count // self.rules.shards("experts", count)

    @property
    def heads(self) -> int:
        return self.config.num_heads // self.rules.shards("heads", self.config.num_heads)


def devices_of(topology: Topology) -> Sequence[Any]:
    """Stand-ins for the devices of a slice; those of this process for simulated ones."""
    if topology.platform == "cpu":
        devices = jax.devices("cpu")
        if len(devices) < topology.num_devices:
            raise PlanError(f"--topology {topology.name}: this process has {len(devices)} CPU devices; "
                            f"--topology cpu:{len(devices)} would work")  # fmt: skip
        return devices[: topology.num_devices]
    return [StandIn(n, topology.platform, topology.device.kinds[0]) for n in range(topology.num_devices)]


def place(config: ModelConfig, topology: Topology, layout: MeshLayout, sizes: Sizes, devices: Sequence[Any]
          ) -> Placement:  # fmt: skip
    """Raises PlanError where the engine would refuse to start."""
    spec, options = layout.spec, ExpertOptions(parallel=layout.expert_parallel)
    if spec.num_devices > topology.num_devices:
        raise PlanError(f"--mesh {spec} needs {spec.num_devices} devices, {topology.name} has {topology.num_devices}; "
                        f"--mesh tensor={topology.num_devices} would use them all")  # fmt: skip
    try:
        mesh = make_mesh(spec, devices)
        rules = model_rules(config, mesh, options)
        kernels = choose_kernels(config, rules, sizes.dtype, attention_backend="auto", page_size=sizes.page_size,
                                 options=options)  # fmt: skip
    except ValueError as error:
        raise PlanError(f"--mesh {layout}: {error}") from error
    model = model_shapes(config, rules, kernels, sizes.dtype)
    params = param_shapes(model)
    return Placement(config=config, topology=topology, layout=layout, sizes=sizes, rules=rules, kernels=kernels,
                     model=with_params(model, params), params=params)
