"""The whole jitted serving step for a target: what `serving.runner` compiles, from a config and without weights."""

from typing import Any

import jax.numpy as jnp

from model.build import choose_kernels, model_rules, model_shapes
from model.expert_options import ExpertOptions
from model.families.registry import read_config
from model.speculative.eagle_checkpoint import read_eagle3
from model.speculative.eagle_drafter import EagleDrafter
from model.transformer import Transformer, with_params
from scripts.aot.models import StepConfig
from scripts.aot.targets import Target, compile_on, devices_of
from serving.decoding.speculation.config import SpeculativeConfig
from serving.drafters.eagle import drafter_of, make_eagle3
from serving.drafters.loading import Surroundings
from serving.engine.speculating import tree_words
from serving.runner.compiler import compiler_options
from serving.runner.memory import PAGE_SIZE, bytes_per_device
from serving.runner.programs import StepProgram, param_shapes
from serving.runner.shapes import StepShape
from sharding.mesh import make_mesh, parse_mesh


def compile_step(target: Target, step: StepConfig, backend_name: str, shape: StepShape
                 ) -> tuple[Any, int, int]:  # fmt: skip
    """(Compiled, bytes of the KV cache on a device, bytes of one layer of it)."""
    config = read_config(step.hf)
    mesh, options = make_mesh(parse_mesh(step.mesh), devices_of(target)), ExpertOptions(parallel=step.expert_parallel)
    rules, dtype = model_rules(config, mesh, options), jnp.dtype(jnp.bfloat16)
    # Each device of the context axis has a part of every page.
    page_size = PAGE_SIZE[target.device.platform] * mesh.shape["context"]
    kernels = choose_kernels(config, rules, dtype, attention_backend=backend_name, page_size=page_size,
                             options=options)  # fmt: skip
    page_bytes = bytes_per_device(kernels.kv_pages(rules, 1))
    num_pages = step.kv_bytes // page_bytes
    model = model_shapes(config, rules, kernels, dtype)
    model = with_params(model, param_shapes(model))
    drafter = None if step.speculation is None else drafter_shapes(step, model, dtype, backend_name, page_size)
    program = StepProgram(model, kernels, max_num_seqs=step.max_num_seqs, num_drafts=shape.num_drafts, drafter=drafter)
    state, row_pages = program.state_shapes(num_pages), -(-step.max_model_len // page_size)
    jitted, arguments = program.step(shape, state, row_pages)
    kv_bytes = num_pages * page_bytes
    compiled = compile_on(mesh, jitted, *arguments, options=compiler_options(target.device.platform, shape))
    return compiled, kv_bytes, kv_bytes // config.num_layers


def drafter_shapes(step: StepConfig, target: Transformer, dtype: jnp.dtype, backend_name: str, page_size: int
                   ) -> EagleDrafter:  # fmt: skip
    """The EAGLE-3 head of a step, without weights."""
    assert step.speculation is not None and step.head is not None
    around = Surroundings(target=target, dtype=dtype, page_size=page_size, max_num_seqs=step.max_num_seqs,
                          max_model_len=step.max_model_len, attention_backend=backend_name, progress=False)
    config = read_eagle3(step.head, target.config, step.max_model_len)
    network, kernels = make_eagle3(config, around, has_offsets=True, has_embedding=False)
    network = with_params(network, param_shapes(network))
    return drafter_of(network, kernels, SpeculativeConfig.of(step.speculation), around)


def verifying_shape(step: StepConfig) -> StepShape:
    """Every row has all its drafts."""
    assert step.speculation is not None
    config = SpeculativeConfig.of(step.speculation)
    return StepShape((config.most + 1) * step.max_num_seqs, step.max_num_seqs, num_drafts=config.most,
                     tree_words=tree_words(config))  # fmt: skip
