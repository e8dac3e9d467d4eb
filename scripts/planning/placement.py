"""A model on a mesh, without weights and without a compiler: which bytes each device holds, and of what.

Everything here follows from the shardings that the engine itself uses, so the byte counts are exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from model.build import Kernels, choose_kernels, model_rules, model_shapes
from model.config import LayerSpec, ModelConfig
from model.moe import is_expert_matrix
from model.transformer import Path, Transformer, param_axes, param_dtypes, with_params
from scripts.planning.topology import PlanError, Topology
from serving.runner.memory import bytes_per_device
from serving.runner.step import DeviceState, state_shapes, with_shardings
from sharding.mesh import MeshError, MeshSpec, make_mesh
from sharding.rules import AxisRules

PAGE_SIZE = {"tpu": 128, "gpu": 64, "cpu": 16}
KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5p", "v6e": "TPU v6 lite", "v7x": "TPU7x", "h200": "NVIDIA H200"}


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


@dataclass(frozen=True, kw_only=True)
class Placement:
    """params: shapes with their shardings."""

    config: ModelConfig
    topology: Topology
    spec: MeshSpec
    sizes: Sizes
    rules: AxisRules
    kernels: Kernels
    model: Transformer
    params: Mapping[Path, jax.ShapeDtypeStruct]

    @property
    def weight_bytes(self) -> int:
        return bytes_per_device(list(self.params.values()))

    def state(self, num_pages: int) -> DeviceState:
        """Shapes with their shardings. num_pages: of each group."""
        groups = self.rules.num_groups
        layout = self.kernels.kv_layout(self.config, groups * num_pages)
        shapes = state_shapes(layout, groups, self.sizes.max_num_seqs, self.config.vocab_size)
        return with_shardings(self.rules, shapes, layout.axes)

    @property
    def state_bytes(self) -> int:
        """Of sampling: last tokens, biases, penalty counts."""
        state = self.state(8)
        return bytes_per_device(state) - bytes_per_device(state.kv_pages)

    @property
    def page_bytes(self) -> int:
        return bytes_per_device(self.state(8).kv_pages) // 8

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

    @property
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

    @property
    def experts(self) -> int:
        return sum(self.held(path) for path in self.params if is_expert_matrix(path, None))

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
    kind = KINDS[topology.device.name]
    return [StandIn(n, topology.platform, kind) for n in range(topology.num_devices)]


def place(config: ModelConfig, topology: Topology, spec: MeshSpec, sizes: Sizes, devices: Sequence[Any]) -> Placement:
    """Raises PlanError where the engine would refuse to start."""
    if spec.num_devices > topology.num_devices:
        raise PlanError(f"--mesh {spec} needs {spec.num_devices} devices, {topology.name} has {topology.num_devices}; "
                        f"--mesh tensor={topology.num_devices} would use them all")  # fmt: skip
    try:
        mesh = make_mesh(spec, devices)
        rules = model_rules(config, mesh)
        kernels = choose_kernels(config, rules, sizes.dtype, attention_backend="auto", page_size=sizes.page_size)
    except (MeshError, ValueError) as error:
        raise PlanError(f"--mesh {spec}: {error}") from error
    model = model_shapes(config, rules, kernels, sizes.dtype)
    dtypes = param_dtypes(model)
    params = {
        path: jax.ShapeDtypeStruct(shape, dtypes[path], sharding=rules.sharding(axes, shape))
        for path, (shape, axes) in param_axes(model).items()
    }
    return Placement(config=config, topology=topology, spec=spec, sizes=sizes, rules=rules, kernels=kernels,
                     model=with_params(model, params), params=params)  # type: ignore[arg-type]
