"""Experts on a mesh through the engine: greedy tokens as transformers gave them, whichever way tokens meet experts,
and while experts move between devices."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints.load import load_params
from checkpoints.open import open_checkpoint
from model.build import choose_kernels, model_rules, model_shapes
from model.expert_options import ExpertOptions
from model.families.registry import param_sources, read_config
from model.transformer import Transformer, param_axes, param_dtypes, with_params
from serving.config import EplbConfig
from serving.errors import ConfigError
from serving.flags import parse_flags
from serving.llm import LLM
from serving.request import ExpertStats
from serving.runner.placing import place_experts, stored_shape
from serving.runner.programs import StepProgram
from serving.runner.rebalance import Rebalancer
from sharding.expert_placement import balancedness
from sharding.mesh import make_mesh, parse_mesh
from tests.model import harness
from tests.runner.test_family_goldens import GOLDENS, GREEDY, SIZES
from tests.tolerances import LOGITS_FLOAT32


def generate(name: str, tokenizer: str, **options: Any) -> ExpertStats:
    """Through the engine on data=4, tensor=2, with experts over all eight devices."""
    golden = np.load(GOLDENS / name / "golden.npz")
    sizes = {**SIZES, "max_num_seqs": 1}  # of each data group; fewer shapes to compile
    with LLM(str(GOLDENS / name), tokenizer=tokenizer, mesh="2x4", enable_expert_parallel=True, progress=False,
             check_integrity=True, **sizes, **options) as llm:  # fmt: skip
        prompts = [{"prompt_token_ids": golden[f"prompt_{i}"].tolist()} for i in range(3)]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        stats = llm.service.engine.stats
    assert [o.outputs[0].token_ids for o in outputs] == [golden[f"greedy_{i}"].tolist() for i in range(3)]
    assert stats.compile_misses == 0 and stats.experts is not None
    return stats.experts


@pytest.mark.slow
@pytest.mark.parametrize("name, options", [
    ("qwen3-moe", dict(all2all_backend="ragged_all_to_all")),
    ("deepseek-v3", dict(all2all_backend="allgather_reducescatter", enable_dbo=True)),
])  # fmt: skip
def test_experts_move_while_requests_run(name: str, options: dict[str, Any], tokenizer: str):
    eplb = EplbConfig(window_size=4, step_interval=4, num_redundant_experts=8)
    stats = generate(name, tokenizer, enable_eplb=True, eplb_config=eplb, **options)
    assert stats.layers == [1, 2] and stats.layers_moved >= 3
    golden = np.load(GOLDENS / name / "golden.npz")
    tokens = sum(len(golden[f"prompt_{i}"]) + len(golden[f"greedy_{i}"]) - 1 for i in range(3))
    counted = np.sum(stats.tokens, axis=1)  # but for the last two steps; nothing that pads a step
    assert ((3 * (tokens - 2 * 3) <= counted) & (counted <= 3 * tokens)).all(), "three experts a token"


def load_with_places(name: str, mesh: str, options: ExpertOptions) -> tuple[Transformer, Any]:
    """A golden's model with redundant experts, and its kernels."""
    checkpoint = open_checkpoint(GOLDENS / name)
    assert checkpoint.source is not None
    config, float32 = read_config(checkpoint.config), jnp.dtype(jnp.float32)
    rules = model_rules(config, make_mesh(parse_mesh(mesh)), options)
    kernels = choose_kernels(config, rules, float32, attention_backend="xla", page_size=8, options=options)
    model = model_shapes(config, rules, kernels, float32)
    axes = param_axes(model)
    shapes = {path: stored_shape(model, names, shape) for path, (shape, names) in axes.items()}
    shardings = {path: rules.sharding(names, shapes[path]) for path, (_, names) in axes.items()}
    params = load_params(checkpoint.source, param_sources(config, shapes), shapes, shardings, param_dtypes(model))
    return with_params(model, place_experts(model, axes, params)), kernels


def test_a_skewed_layer_evens_out_and_computes_the_same():
    """All tokens choose from the same few experts: the devices that hold them get help, and logits stay."""
    options = ExpertOptions(parallel=True, redundant=8)
    model, kernels = load_with_places("deepseek-v3", "4x2", options)
    for layer in model.stacks[1].layers:
        layer.mlp.router_bias[...] = jnp.zeros_like(layer.mlp.router_bias[...]).at[:, 2:5].set(100)
    assert kernels.experts is not None
    program = StepProgram(model, kernels, max_num_seqs=2)
    rebalancer = Rebalancer(program.params, program.paths, model.config, model.rules, kernels.experts, num_nodes=1)
    structure, state = nnx.split(model)
    tree = jax.tree.structure(state)
    ids = np.load(GOLDENS / "deepseek-v3" / "golden.npz")["tokens_65"][:33]
    step = harness.batch([(ids, 0)], num_tokens=40, num_rows=2, num_groups=2)

    @jax.jit
    def run(params: list[jax.Array], pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(structure, jax.tree.unflatten(tree, params))
        hidden, _, load = model(pages, step)
        assert load is not None
        return model.logits(hidden), load.sum(1)

    pages = harness.kv_pages(model, num_pages=32)
    want, load = run(program.params, pages)
    assert (np.asarray(load)[:, 2:5] == 2 * len(ids)).all(), "three experts a token"
    even = partial(balancedness, np.asarray(load), num_devices=8)
    before = even(placement=rebalancer.placement)
    rebalancer.plan(np.asarray(load))
    for _ in range(len(load) + 1):  # one layer at a time, then none
        rebalancer.move()
    assert rebalancer.layers_moved == len(load)
    after = even(placement=rebalancer.placement)
    assert (before <= 3 / 8 + 1e-9).all() and (after > 0.7).all()
    got, again = run(program.params, pages)
    np.testing.assert_allclose(got, want, atol=LOGITS_FLOAT32, rtol=0)
    np.testing.assert_array_equal(again, load)
    rebalancer.plan(np.asarray(load))
    for _ in load:
        rebalancer.move()
    assert rebalancer.layers_moved == len(load), "what is even already stays"


def test_flags():
    config = '{"num_redundant_experts": 8, "step_interval": 500}'
    engine = parse_flags(["--enable-expert-parallel", "--enable-eplb", "--enable-dbo", "--eplb-config", config]).engine
    assert engine.enable_expert_parallel and engine.enable_dbo and engine.enable_eplb
    assert engine.eplb_config == EplbConfig(num_redundant_experts=8, step_interval=500)


@pytest.mark.parametrize("argv, message", [
    (["--eplb-config", "{"], "'{' is not JSON"),
    (["--eplb-config", "[]"], "not an object; it may have num_redundant_experts, step_interval, window_size"),
    (["--enable-eplb", "--eplb-config", '{"use_async": true}'], "unknown use_async"),
    (["--enable-eplb", "--eplb-config", '{"window_size": 0}'], "window_size is 0, must be a whole number"),
    (["--enable-eplb", "--eplb-config", '{"window_size": true}'], "window_size is True, must be a whole number"),
    (["--eplb-config", '{"window_size": 5}'], "give --enable-eplb too"),
])  # fmt: skip
def test_bad_flags_are_refused(argv: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        parse_flags(argv)


def test_flags_that_a_model_cannot_have_are_refused(tokenizer: str):
    for name, options, message in (
        ("qwen2-moe", dict(enable_expert_parallel=True, mesh="2x4"), "6 experts do not divide over data=4 x tensor=2"),
        ("qwen2-moe", dict(enable_expert_parallel=True, mesh="pipeline=2,tensor=2,data=2"),  # where experts cannot move
         "6 experts do not divide over data=2 x tensor=2; over 1 or 2 or 3 devices of a stage they would"),
        ("llama3-rope", dict(enable_dbo=True), "--enable-dbo: this model has no experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(GOLDENS / name), tokenizer=tokenizer, progress=False, **SIZES, **options)
