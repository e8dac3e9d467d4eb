"""The planner's bytes are those that the engine allocates: the same model on the same simulated mesh, both ways."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from model.families.registry import read_config
from scripts.planning.compiling import compile_plan, compiler_devices
from scripts.planning.placement import MeshLayout, Sizes, devices_of, place
from scripts.planning.plan import memory_of
from scripts.planning.topology import parse_topology
from serving.config import EngineConfig
from serving.loading import load_model
from serving.runner.runner import ModelRunner, RunnerConfig
from sharding.mesh import parse_mesh

GOLDENS = Path(__file__).parents[1] / "goldens"
SIZES = dict(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, page_size=8)


def bytes_on_a_device(tree) -> int:
    return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize("name, expert_parallel", [
    ("llama-gqa-tied", False),  # kv heads over `tensor`, groups over `data`
    ("deepseek-v3", True),  # latents over `data`, experts over both
])
def test_bytes_by_kind(name: str, expert_parallel: bool, mesh: str = "2x4"):
    loaded = load_model(EngineConfig(model=str(GOLDENS / name), mesh=mesh, dtype="float32", block_size=8,
                                     enable_expert_parallel=expert_parallel))  # fmt: skip
    config = RunnerConfig(**SIZES, may_shorten=False, num_pages=None, memory_share=1e-2)  # type: ignore[arg-type]
    runner = ModelRunner(loaded.model, config, loaded.kernels)
    assert runner.memory is not None

    topology = parse_topology("cpu:8")
    sizes = Sizes(**SIZES, dtype=jnp.dtype("float32"), memory_share=1e-2)  # type: ignore[arg-type]
    hf = json.loads((GOLDENS / name / "config.json").read_text())
    layout = MeshLayout(parse_mesh(mesh), expert_parallel)
    placement = place(read_config(hf), topology, layout, sizes, devices_of(topology))
    compiled = compile_plan(placement, compiler_devices(topology))
    memory = memory_of(placement, compiled.temporaries)

    state = runner._state
    assert memory.weights == bytes_on_a_device(runner._params)
    assert memory.kv == bytes_on_a_device(state.kv_pages)
    assert memory.state == bytes_on_a_device(state) - bytes_on_a_device(state.kv_pages)
    assert memory.temporaries == runner.memory.temporary
    assert (memory.num_pages, memory.page, memory.limit) == (runner.num_pages, runner.memory.page, runner.memory.limit)
