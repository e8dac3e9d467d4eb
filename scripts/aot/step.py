"""The whole jitted serving step for a target: what `serving.runner` compiles, from a config and without weights."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model.families.registry import read_config
from model.transformer import abstract_model, param_axes, with_params
from pallas_kernels.ragged_paged_attention.api import AttentionSpec, choose_backend
from scripts.aot.models import StepConfig
from scripts.aot.targets import Target, compile_on, devices_of
from serving.config import MAX_LOGPROBS
from serving.runner.packing import packed_size
from serving.runner.shapes import StepShape
from serving.runner.step import run_step, state_shapes, with_shardings
from sharding.mesh import MeshSpec, make_mesh
from sharding.rules import axis_rules


def compile_step(target: Target, step: StepConfig, backend_name: str, shape: StepShape, *, page_size: int
                 ) -> tuple[Any, int, int]:
    """(Compiled, bytes of the KV cache on a device, bytes of one layer of it)."""
    config = read_config(step.hf)
    mesh = make_mesh(MeshSpec(tensor=step.tensor), devices_of(target))
    rules = axis_rules(mesh, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads)
    shards = step.tensor if rules.rules["kv_heads"] else 1
    dtype = jnp.dtype(jnp.bfloat16)
    spec = AttentionSpec(
        num_heads=config.num_heads // shards, num_kv_heads=config.num_kv_heads // shards, head_dim=config.head_dim,
        page_size=page_size, dtype=dtype, kv_dtype=dtype,
    )
    backend = choose_backend(backend_name, spec, mesh.devices.flat[0])
    page_bytes = backend.layout(config.num_layers, 1, config.num_kv_heads).page_bytes // shards
    num_pages = step.kv_bytes // page_bytes
    layout = backend.layout(config.num_layers, num_pages, config.num_kv_heads)
    state = with_shardings(rules, state_shapes(layout, step.max_num_seqs, config.vocab_size))

    model = abstract_model(config, rules, backend.attend, dtype)
    params = {
        path: jax.ShapeDtypeStruct(shape, dtype, sharding=rules.sharding(axes, shape))
        for path, (shape, axes) in param_axes(model).items()
    }
    structure, weights = nnx.split(with_params(model, params))  # type: ignore[arg-type]
    row_pages = -(-step.max_model_len // page_size)

    def fn(weights, state, packed):
        return run_step(nnx.merge(structure, weights), state, packed, shape, row_pages,
                        min(MAX_LOGPROBS, config.vocab_size))

    packed = jax.ShapeDtypeStruct((packed_size(shape, row_pages),), jnp.int32, sharding=rules.whole)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    jitted = jax.jit(fn, donate_argnums=1, out_shardings=(shardings, rules.whole))
    kv_bytes = num_pages * page_bytes
    return compile_on(mesh, jitted, weights, state, packed), kv_bytes, kv_bytes // config.num_layers
