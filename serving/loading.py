"""A model from its checkpoint onto a mesh, as an `EngineConfig` asks."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.default_model import default_model_path
from checkpoints.errors import CheckpointError
from checkpoints.open import Checkpoint, open_checkpoint
from model.build import Kernels, choose_kernels, model_rules, model_shapes
from model.config import ModelConfig
from model.expert_options import ExpertOptions, ExpertsError
from model.families.common import UnsupportedModel
from model.families.registry import may_be_left_over, param_sources, read_config
from model.transformer import Path as ParamPath
from model.transformer import Transformer, param_axes, with_params
from serving.config import EngineConfig
from serving.distributed.hosts import Alone, Hosts
from serving.errors import ConfigError
from serving.runner.memory import PAGE_SIZE
from serving.runner.placing import place_experts, stored_shape
from serving.weights import read_params
from sharding.copies import without_copies
from sharding.mesh import MeshError, make_mesh, parse_mesh
from sharding.rules import AxisRules

MUCH_SLOWER = 1.5


@dataclass(frozen=True)
class LoadedModel:
    model: Transformer
    hf_config: Mapping[str, Any]
    params: Mapping[ParamPath, jax.Array]
    dtype: jnp.dtype
    kernels: Kernels

    @property
    def stored_params(self) -> dict[ParamPath, jax.Array]:
        """As a checkpoint has them: every kv head once."""
        return {path: without_copies(self.model.rules, axes, self.params[path])
                for path, (_, axes) in param_axes(self.model).items()}  # fmt: skip

    @property
    def num_parameters(self) -> int:
        """Of the checkpoint: without redundant experts."""
        once = ((axes, stored_shape(self.model, axes, shape)) for shape, axes in param_axes(self.model).values())
        return sum(math.prod(shape) // math.prod(self.model.rules.copies.get(a, 1) for a in axes if a)
                   for axes, shape in once)


@contextmanager
def open_model(config: EngineConfig, progress: bool) -> Iterator[Checkpoint]:
    """Whatever is wrong with the model within the block becomes one line that says what to do, a ConfigError."""
    try:
        with closing(open_checkpoint(config.model or default_model_path(progress))) as checkpoint:
            yield checkpoint
    except (CheckpointError, UnsupportedModel) as error:
        raise ConfigError(f"--model: {error}") from error
    except MeshError as error:
        raise ConfigError(str(error)) from error


def load_model(config: EngineConfig, *, progress: bool = False) -> LoadedModel:
    """Weights on the mesh. Raises ConfigError."""
    with open_model(config, progress) as checkpoint:
        return load(checkpoint, read_config(checkpoint.config, config.max_model_len), config, Alone(), progress)


def load(
    checkpoint: Checkpoint, config: ModelConfig, engine: EngineConfig, hosts: Hosts, progress: bool
) -> LoadedModel:
    mesh = make_mesh(parse_mesh(engine.mesh))
    _check_hosts(mesh, hosts)
    rules = model_rules(config, mesh, expert_options(engine))
    dtype = jnp.dtype(hosts.as_leader("dtype", choose_dtype()) if engine.dtype == "auto" else engine.dtype)
    kernels = _kernels(config, engine, rules, dtype)
    model = model_shapes(config, rules, kernels, dtype)
    axes = param_axes(model)
    params = read_params(model, rules, checkpoint.source or checkpoint.path, partial(param_sources, config),
                         shape_of=partial(stored_shape, model), ignore=may_be_left_over(config), progress=progress)
    params = place_experts(model, axes, params)
    return LoadedModel(with_params(model, params), checkpoint.config, params, dtype, kernels)


def _check_hosts(mesh: jax.sharding.Mesh, hosts: Hosts) -> None:
    used = {device.process_index for device in mesh.devices.flat}
    idle = [hosts.plan.name(rank) for rank in range(hosts.plan.count) if rank not in used]
    if idle:
        raise ConfigError(
            f"--mesh uses {mesh.size} of {jax.device_count()} devices and none of {', '.join(idle)}; use "
            f"--mesh {jax.device_count()}x1 or another of as many devices, or fewer hosts"
        )


def _kernels(config: ModelConfig, engine: EngineConfig, rules: AxisRules, dtype: jnp.dtype) -> Kernels:
    try:
        return choose_kernels(config, rules, dtype, attention_backend=engine.attention_backend,
                              page_size=page_size(engine), options=expert_options(engine))  # fmt: skip
    except (ExpertsError, MeshError) as error:
        raise ConfigError(str(error)) from error
    except ValueError as error:
        raise ConfigError(f"--attention-backend and --block-size: {error}") from error


def expert_options(engine: EngineConfig) -> ExpertOptions:
    return ExpertOptions(
        parallel=engine.enable_expert_parallel, all2all=engine.all2all_backend, two_micro_batches=engine.enable_dbo,
        redundant=engine.eplb_config.num_redundant_experts if engine.enable_eplb else None,
    )  # fmt: skip


def choose_dtype() -> str:
    """bfloat16, but float32 on a CPU that multiplies bfloat16 much slower: some do it at twice the speed of float32,
    others at a fraction. Where the two are near each other half the memory decides, not noise."""
    if jax.default_backend() != "cpu":
        return "bfloat16"
    if jax.__version_info__ < (0, 11):  # multiplies bfloat16 at up to a fiftieth of its speed in a scan of large layers
        return "float32"

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.einsum("td,df->tf", x, w, preferred_element_type=jnp.float32).astype(x.dtype), None

    # A scan, as over the model's layers.
    multiply = jax.jit(lambda x, ws: jax.lax.scan(layer, x, ws)[0])
    operands = {dtype: (jnp.ones((8, 1024), dtype), jnp.full((4, 1024, 1024), 1e-3, dtype))
                for dtype in ("bfloat16", "float32")}  # fmt: skip
    best = dict.fromkeys(operands, float("inf"))
    for _ in range(20):  # in turn, and the best lap counts: other programs disturb both alike
        for dtype, args in operands.items():
            start = time.perf_counter()
            jax.block_until_ready(multiply(*args))
            best[dtype] = min(best[dtype], time.perf_counter() - start)
    return "bfloat16" if best["bfloat16"] < MUCH_SLOWER * best["float32"] else "float32"


def page_size(config: EngineConfig) -> int:
    """Of a page on all devices of the context axis together."""
    on_a_device = config.block_size or PAGE_SIZE.get(jax.default_backend(), PAGE_SIZE["cpu"])
    return on_a_device * parse_mesh(config.mesh).context
