"""The whole jitted serving step for a target: what `serving.runner` compiles, from a config and without weights."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model.build import choose_kernels, model_rules, model_shapes
from model.families.registry import read_config
from model.transformer import param_axes, param_dtypes, with_params
from scripts.aot.models import StepConfig
from scripts.aot.targets import Target, compile_on, devices_of
from serving.config import MAX_LOGPROBS
from serving.runner.memory import bytes_per_device
from serving.runner.packing import packed_size
from serving.runner.shapes import StepShape
from serving.runner.step import run_step, state_shapes, with_shardings
from sharding.mesh import MeshSpec, make_mesh


def compile_step(target: Target, step: StepConfig, backend_name: str, shape: StepShape, *, page_size: int
                 ) -> tuple[Any, int, int]:
    """(Compiled, bytes of the KV cache on a device, bytes of one layer of it)."""
    config = read_config(step.hf)
    mesh = make_mesh(MeshSpec(tensor=step.tensor), devices_of(target))
    rules, dtype = model_rules(config, mesh), jnp.dtype(jnp.bfloat16)
    kernels = choose_kernels(config, rules, dtype, attention_backend=backend_name, page_size=page_size)
    one_page = kernels.kv_layout(config, 1)
    page = jax.ShapeDtypeStruct(one_page.shape, one_page.dtype, sharding=rules.sharding(one_page.axes, one_page.shape))
    page_bytes = bytes_per_device(page)
    num_pages = step.kv_bytes // page_bytes
    layout = kernels.kv_layout(config, num_pages)
    shapes = state_shapes(layout, rules.num_groups, step.max_num_seqs, config.vocab_size)
    state = with_shardings(rules, shapes, layout.axes)

    model = model_shapes(config, rules, kernels, dtype)
    dtypes = param_dtypes(model)
    params = {
        path: jax.ShapeDtypeStruct(shape, dtypes[path], sharding=rules.sharding(axes, shape))
        for path, (shape, axes) in param_axes(model).items()
    }
    structure, weights = nnx.split(with_params(model, params))  # type: ignore[arg-type]
    row_pages = -(-step.max_model_len // page_size)

    def fn(weights, state, packed):
        return run_step(nnx.merge(structure, weights), state, packed, shape, row_pages,
                        min(MAX_LOGPROBS, config.vocab_size))

    size = (rules.num_groups, packed_size(shape, row_pages))
    packed = jax.ShapeDtypeStruct(size, jnp.int32, sharding=rules.sharding(("groups", None), size))
    shardings = jax.tree.map(lambda x: x.sharding, state)
    jitted = jax.jit(fn, donate_argnums=1, out_shardings=(shardings, rules.whole))
    kv_bytes = num_pages * page_bytes
    return compile_on(mesh, jitted, weights, state, packed), kv_bytes, kv_bytes // config.num_layers
