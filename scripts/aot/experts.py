"""A layer of experts of a real model, as devices share it: compiled for absent chips."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model.batch import StepBatch
from model.build import model_rules
from model.expert_options import ExpertOptions, choose_experts
from model.families.registry import read_config
from model.moe import MoE
from scripts.aot.models import STEPS
from scripts.aot.targets import Target, compile_on, devices_of
from sharding.mesh import make_mesh, parse_mesh

EXCHANGED = ExpertOptions(parallel=True, all2all="ragged_all_to_all")
IN_HALVES = ExpertOptions(parallel=True, all2all="ragged_all_to_all", two_micro_batches=True)
GATHERED = ExpertOptions(parallel=True, all2all="allgather_reducescatter")
NUM_LAYERS = 2  # so that the layer's index matters


@dataclass(frozen=True, kw_only=True)
class ExpertsLayer:
    """model: a key of STEPS. num_tokens: of a data group."""

    name: str
    model: str
    mesh: str
    num_tokens: int
    options: ExpertOptions


QWEN, DEEPSEEK = "qwen3-30b-a3b/8", "deepseek-v3 5 layers/8"
LAYERS = {
    layer.name: layer
    for layer in (
        ExpertsLayer(name="qwen3-30b-a3b exchanged", model=QWEN, mesh="4x2", num_tokens=1024, options=EXCHANGED),
        ExpertsLayer(name="qwen3-30b-a3b in halves", model=QWEN, mesh="4x2", num_tokens=1024, options=IN_HALVES),
        ExpertsLayer(name="qwen3-30b-a3b gathered", model=QWEN, mesh="4x2", num_tokens=64, options=GATHERED),
        ExpertsLayer(name="deepseek-v3 exchanged", model=DEEPSEEK, mesh="1x8", num_tokens=1024, options=EXCHANGED),
        ExpertsLayer(name="deepseek-v3 in halves", model=DEEPSEEK, mesh="1x8", num_tokens=1024, options=IN_HALVES),
        ExpertsLayer(name="deepseek-v3 exchanged, few", model=DEEPSEEK, mesh="1x8", num_tokens=64, options=EXCHANGED),
    )
}


def compile_layer(target: Target, layer: ExpertsLayer) -> Any:
    """jax's Compiled, of the layer's router, experts and shared expert."""
    return compile_on(*layer_program(layer, devices_of(target)))


def layer_program(layer: ExpertsLayer, devices: Sequence[Any]) -> tuple[Any, ...]:
    """(mesh, jitted function, arguments)"""
    config, mesh = read_config(STEPS[layer.model].hf), make_mesh(parse_mesh(layer.mesh), devices)
    rules, dtype = model_rules(config, mesh, layer.options), jnp.dtype(jnp.bfloat16)
    backend = choose_experts(config, rules, layer.options, dtype)
    spec = next(of.moe for of in config.layers if of.moe is not None)
    assert backend is not None
    module = nnx.eval_shape(lambda: MoE(config, spec, rules, backend, rngs=nnx.Rngs(0), dtype=dtype))
    structure, state = nnx.split(module)

    def shape_of(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        shape, axes = variable.get_value().shape, variable.get_metadata("axes")
        if path[0] == "experts":
            shape, axes = (NUM_LAYERS, *shape), ("layers", *axes)
        return variable.replace(shaped(shape, variable.get_value().dtype, axes))

    def shaped(shape: tuple[int, ...], of: Any, axes: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, of, sharding=rules.sharding(axes, shape))

    def run(state, x, cu_q_lens, number):
        none = jnp.zeros(0, jnp.int32)
        batch = StepBatch(none, none, none, none, cu_q_lens, none)
        return nnx.merge(structure, state)(x, batch, number)

    groups, rows = rules.num_groups, 64
    weights = nnx.from_flat_state([(path, shape_of(path, of)) for path, of in nnx.to_flat_state(state)])
    x = shaped((groups * layer.num_tokens, config.hidden_size), dtype, ("tokens", "embed"))
    cu_q_lens = shaped((groups * (rows + 1),), jnp.int32, ("groups",))
    return mesh, jax.jit(run), weights, x, cu_q_lens, shaped((), jnp.int32, ())


def collectives(text: str) -> Iterator[tuple[str, str]]:
    """(what, name) of the entry computation's exchanges and kernels, as scheduled: what is "start", "done", of the
    exchange that `name` starts, or "kernel"."""
    for line in text[text.index("ENTRY") :].splitlines():
        name, _, rest = line.strip().partition(" = ")
        if " ragged-all-to-all-start(" in rest:
            yield "start", name
        elif " ragged-all-to-all-done(" in rest:
            yield "done", rest.partition("ragged-all-to-all-done(")[2].partition(")")[0]
        elif "grouped_matmul" in name and " custom-call(" in rest:
            yield "kernel", name
