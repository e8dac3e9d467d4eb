"""What devices along `tensor` exchange in a step, read from the compiled program: two all-reduces a layer, no more."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from model.build import choose_kernels, model_rules, model_shapes
from model.families.registry import read_config
from model.transformer import with_params
from scripts.planning.hlo import Module, parse
from serving.runner.programs import StepProgram, param_shapes
from serving.runner.shapes import StepShape
from sharding.mesh import make_mesh, parse_mesh
from tests.model.harness import config_json

COLLECTIVES = {"all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "ragged-all-to-all",
               "collective-broadcast"}  # fmt: skip
DECODE, PREFILL = StepShape(8, 8), StepShape(32, 8)
SEQS, LOGPROBS, VOCAB = 8, 20, 4096


class Found(NamedTuple):
    place: str  # step: once; layers: in the loop over them; option: only where a request asks for something
    kind: str
    shapes: tuple[tuple[int, ...], ...]


def exchanged(hf: dict[str, Any], mesh: str, shape: StepShape) -> list[Found]:
    """By the compiled step of a model without weights."""
    config = read_config({**hf, "vocab_size": VOCAB})
    rules, dtype = model_rules(config, make_mesh(parse_mesh(mesh))), jnp.dtype(jnp.float32)
    kernels = choose_kernels(config, rules, dtype, attention_backend="xla", page_size=8)
    model = model_shapes(config, rules, kernels, dtype)
    program = StepProgram(with_params(model, param_shapes(model)), kernels, max_num_seqs=SEQS)
    jitted, arguments = program.step(shape, program.state_shapes(16), row_pages=4)
    module = parse(jitted.lower(*arguments).compile().as_text())
    return list(_walk(module, module.entry, "step"))


def _walk(module: Module, name: str, place: str) -> Iterator[Found]:
    for i in module.computations[name].instructions.values():
        if (kind := i.opcode.removesuffix("-start")) in COLLECTIVES:
            yield Found(place, kind, tuple(shape.dims for shape in i.shapes))
        inner = {"while": "body", "call": "to_apply", "fusion": "calls", "async-start": "calls"}.get(i.opcode)
        if i.opcode == "conditional":
            for branch in i.branches:
                yield from _walk(module, branch, "option")
        elif inner is not None and (called := i.called(inner)):
            loop = place == "step" and i.opcode == "while"
            yield from _walk(module, called, "layers" if loop else place)


def check(found: list[Found], hf: dict[str, Any], shape: StepShape, *layers: tuple[tuple[int, ...], ...],
          tensor: int = 8, data: int = 1) -> None:  # fmt: skip
    """layers: what every layer's all-reduces are of, in any order; the rest is what every model has."""
    hidden, tokens = (shape.num_tokens, hf["hidden_size"]), (data * shape.num_rows, 3)
    assert sorted(found, key=str) == sorted([
        *(Found("layers", "all-reduce", shapes) for shapes in layers),
        Found("step", "all-reduce", (hidden,)),  # the embedding's rows
        Found("step", "all-gather", ((tensor, 2, shape.num_rows),)),  # every slice's best logit and its token
        *([Found("step", "all-gather", (tokens,))] if data > 1 else []),  # for whoever reads the groups' results
        *(one for one in found if one.place == "option"),
    ], key=str)  # fmt: skip
    options = [one for one in found if one.place == "option"]
    assert options and {one.kind for one in options} == {"all-reduce", "all-gather"}
    rows = max(shape.num_rows, min(shape.num_tokens, 16))  # log-probabilities of a prompt: 16 tokens at a time
    widest = max(math.prod(dims) for one in options for dims in one.shapes)
    assert widest == tensor * rows * (2 * LOGPROBS + 1) < rows * VOCAB  # best tokens and logits, and a rank


def llama(**config: int) -> dict[str, Any]:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "hidden_size": 64}
    return {**config_json("llama2-mha"), **heads, **config}


@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=str)
def test_two_all_reduces_a_layer(shape: StepShape):
    hidden = ((shape.num_tokens, 64),)
    check(exchanged(llama(), "8x1", shape), llama(), shape, hidden, hidden)


@pytest.mark.slow
def test_copies_of_kv_heads_change_nothing():
    hf, hidden = llama(num_key_value_heads=2), ((8, 64),)
    check(exchanged(hf, "8x1", DECODE), hf, DECODE, hidden, hidden)


@pytest.mark.slow
def test_experts_and_data_groups():
    """The layer's second all-reduce is that of the experts; groups exchange new tokens and the experts' load."""
    hf = {**config_json("qwen3-moe"), "num_key_value_heads": 4, "mlp_only_layers": []}
    hidden, load = ((8, hf["hidden_size"]),), ((hf["num_hidden_layers"], hf["num_local_experts"]),)
    found = exchanged(hf, "4x2", DECODE)
    found.remove(Found("step", "all-reduce", load))
    check(found, hf, DECODE, hidden, hidden, tensor=4, data=2)


@pytest.mark.slow
def test_latents_and_shared_experts():
    """The shared expert's part is summed beside that of the routed ones, in the same all-reduce."""
    hf = {**config_json("deepseek-v3"), "first_k_dense_replace": 0}
    hidden = (8, hf["hidden_size"])
    check(exchanged(hf, "8x1", DECODE), hf, DECODE, (hidden,), (hidden, hidden))


@pytest.mark.slow
def test_norms_over_all_heads_need_one_more():
    """OLMo-2 norms queries and keys over all heads: two numbers a token are summed as well."""
    hf = config_json("olmo2")
    hidden = ((8, hf["hidden_size"]),)
    check(exchanged(hf, "8x1", DECODE), hf, DECODE, hidden, hidden, ((8,), (8,)))
