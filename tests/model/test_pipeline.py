"""Stages of layers give what all layers on one device give, page by page, and are idle as long as the formula says."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model import pipeline
from model.batch import StepBatch
from model.build import choose_kernels, model_rules
from model.families.registry import read_config
from model.transformer import Transformer
from sharding.mesh import MeshError, make_mesh, parse_mesh
from sharding.rules import AxisRules, axis_rules
from tests.model import harness
from tests.tolerances import LOGITS_FLOAT32

SLOW = pytest.mark.slow
CPU_TOKENS = pipeline._FEWEST_TOKENS["cpu"]


def rules_of(mesh: str) -> AxisRules:
    return axis_rules(make_mesh(parse_mesh(mesh)), num_heads=4, num_kv_heads=4)


@nnx.jit(donate_argnums=1)
def forward(model: Transformer, pages: jax.Array, step: StepBatch):
    hidden, pages, load = model(pages, step)
    return model.logits(hidden), pages, load


def pages_by_layer(model, pages: jax.Array) -> np.ndarray:
    """[G, P, ...] of the model's layers in their order, from those of the stages; page 0 is scratch."""
    config, rules = model.config, model.rules
    stages = pipeline.num_stages(rules)
    of_stage = np.asarray(pages).reshape(stages, -1, rules.num_groups, pages.shape[1] // rules.num_groups,
                                         *pages.shape[2:])  # fmt: skip
    layers = []
    for stack, held in zip(config.stacks, pipeline.stacks_of_stage(config, rules), strict=True):
        mine = slice(held.first_layer, held.first_layer + held.num_layers)
        whole = of_stage[:, mine]
        if held.periods == stack.periods:
            np.testing.assert_array_equal(whole[0, :, :, 1:], whole[-1, :, :, 1:])  # every stage has written the same
            whole = whole[:1]
        layers.append(whole.reshape(-1, *whole.shape[2:]))
    return np.concatenate(layers)[:, :, 1:]


@pytest.mark.parametrize("name, mesh", [
    ("olmo2", "pipeline=2,tensor=2,data=2"),
    pytest.param("deepseek-v3", "pipeline=2,tensor=2,data=2", marks=SLOW),
    *(pytest.param(*case, marks=pytest.mark.matrix) for case in (
        ("llama4", "pipeline=2,tensor=2"), ("gemma3", "pipeline=2,tensor=2"))),
])  # fmt: skip
def test_logits_and_pages(name: str, mesh: str):
    """Four micro-batches: a decode row, a prompt cut by three borders, a row within the last, and padding."""
    golden = np.load(harness.GOLDENS / name / "golden.npz")
    length = min((int(key.split("_")[1]) for key in golden if key.startswith("tokens_")), key=lambda n: abs(n - 33))
    ids, want = golden[f"tokens_{length}"][:50], golden[f"logits_{length}"][:50]
    rows = [([5], 6), (ids, 0), (ids[:9], 0)]

    def run(mesh: str):
        model = harness.load(harness.GOLDENS / name, mesh)
        groups = model.rules.num_groups
        step = harness.batch(rows, num_tokens=80, num_rows=4, row_pages=12, num_groups=groups)
        pages = harness.kv_pages(model, 64 * groups)
        got, pages, load = forward(model, pages, step)
        return model, np.asarray(got).reshape(groups, 80, -1), pages, load

    model, got, pages, load = run(mesh)
    assert pipeline.num_micro_batches(80, 4, pipeline.num_stages(model.rules), "cpu") == 4
    assert pages.sharding.spec[0] == "pipeline"
    alone, expected, whole, wanted = run("1x1")
    if wanted is not None:  # tokens that chose each expert, [layers, G, E]
        assert load is not None and wanted.sum() > 0
        np.testing.assert_array_equal(load, np.broadcast_to(wanted, load.shape))
    for group in got:
        np.testing.assert_allclose(group[1 : 1 + len(ids)], want, atol=LOGITS_FLOAT32, rtol=0)
        np.testing.assert_allclose(group[: len(ids) + 10], expected[0, : len(ids) + 10], atol=LOGITS_FLOAT32, rtol=0)
    one = pages_by_layer(alone, whole)
    for group in range(len(got)):
        np.testing.assert_allclose(pages_by_layer(model, pages)[:, [group]], one, atol=LOGITS_FLOAT32, rtol=0)


def counted(mesh: str, num_tokens: int, num_rows: int, used: int, dtype=jnp.float32) -> tuple[np.ndarray, int]:
    """Of a step of one-token rows through stages that only count: [P, 3] ticks, ticks with rows, rows; and M."""
    rules = rules_of(mesh)
    stages, groups = pipeline.num_stages(rules), rules.num_groups
    step = harness.batch([([1], 0)] * used, num_tokens=num_tokens, num_rows=num_rows, num_groups=groups)

    def layers(params, x, angles, counts, batch: StepBatch):
        rows = batch.distribution.reshape(groups, 3)[0, 2]
        return x + params, counts + jnp.stack([jnp.ones_like(rows), (rows > 0).astype(rows.dtype), rows]), None

    @jax.jit
    def run(params, x, step):
        counts = jnp.zeros((stages, 3), jnp.int32)
        return pipeline.run_stages(layers, params, stages, rules, x, [], counts, step)

    x = jnp.arange(groups * num_tokens).astype(dtype)[:, None]
    out, counts, _ = run(jnp.arange(1, stages + 1).astype(dtype)[:, None], x, step)
    np.testing.assert_array_equal(out, x + stages * (stages + 1) / 2)  # every token passed every stage once
    return np.asarray(counts), pipeline.num_micro_batches(num_tokens, num_rows, stages, "cpu")


@pytest.mark.parametrize("mesh, num_tokens, micro_batches", [
    ("pipeline=4,data=2", 128, 8), ("pipeline=3", 8, 1),
])  # fmt: skip
def test_idle_ticks_are_those_of_the_formula(mesh: str, num_tokens: int, micro_batches: int):
    counts, count = counted(mesh, num_tokens, num_tokens, num_tokens)
    stages = len(counts)
    assert count == micro_batches
    assert (counts == [count + stages - 1, count, num_tokens]).all()
    measured = 1 - counts[:, 1].sum() / counts[:, 0].sum()
    assert measured == pytest.approx(pipeline.bubble(count, stages)) == pytest.approx((stages - 1) / counts[0, 0])


def test_bfloat16_compiles_on_a_cpu():
    """XLA crashes there on a sum of bfloat16 over one axis of a mesh whose other axes are left to it."""
    counted("pipeline=2,tensor=2", 8, 8, 8, jnp.bfloat16)


def test_a_step_that_is_not_full_has_empty_micro_batches():
    counts, count = counted("pipeline=2", 64, 64, 20)
    assert count == 4 and (counts == [5, 2, 20]).all()


@pytest.mark.parametrize("num_tokens, num_rows, stages, want", [
    (64, 64, 1, 1), (64, 64, 2, 4), (16, 16, 2, 1), (8, 8, 4, 1), (1024, 1024, 2, 8), (64, 32, 4, 1), (128, 32, 4, 2),
    (512, 32, 4, 8), (96, 8, 4, 4),
])  # fmt: skip
def test_number_of_micro_batches(num_tokens: int, num_rows: int, stages: int, want: int):
    count = pipeline.num_micro_batches(num_tokens, num_rows, stages, "cpu")
    assert count == want and num_tokens % count == 0
    if count > 1:  # large enough to be worth it, and not taken for a step that only decodes
        assert num_tokens // count >= CPU_TOKENS and (num_tokens == num_rows or num_tokens // count > num_rows)


def test_a_row_is_cut_where_a_micro_batch_ends():
    """Rows of 1, 1, 5 and 3 tokens, of 7, 1, 9 and 3 in all, in micro-batches of 4; two rows of padding."""
    table = jnp.arange(6)[:, None]
    args = (table, jnp.array([7, 1, 9, 3, 0, 0]), jnp.array([0, 1, 2, 7, 10, 10, 10]), jnp.array([2, 2, 4]))
    of = jax.jit(partial(pipeline.micro_batch_rows, num_tokens=4, num_rows=4))
    found = [jax.tree.map(np.asarray, of(number, *args)) for number in range(4)]
    first, second, third, none = found
    assert first[0][:3, 0].tolist() == [0, 1, 2] and first[1].tolist() == [7, 1, 6, 0]
    assert first[2].tolist() == [0, 1, 2, 4, 4] and first[3].tolist() == [2, 2, 3]
    assert second[0][:2, 0].tolist() == [2, 3] and second[1].tolist() == [9, 1, 0, 0]
    assert second[2].tolist() == [0, 3, 4, 4, 4] and second[3].tolist() == [0, 0, 2]
    assert third[0][0, 0] == 3 and third[1].tolist() == [3, 0, 0, 0]
    assert third[2].tolist() == [0, 2, 2, 2, 2] and third[3].tolist() == [0, 0, 1]
    assert none[1].tolist() == [0] * 4 and none[2].tolist() == [0] * 5 and none[3].tolist() == [0, 0, 0]


def test_pages_stay_in_place():
    model = harness.shapes_of(read_config(harness.config_json("olmo2")), "pipeline=2,tensor=2")
    kernels = choose_kernels(model.config, model.rules, jnp.dtype(jnp.float32), attention_backend="xla", page_size=8)
    layout = kernels.kv_layout(4096)
    pages = jax.ShapeDtypeStruct(layout.shape, jnp.float32, sharding=model.rules.sharding(layout.axes, layout.shape))
    step = harness.batch([([1], 0)], num_tokens=64, num_rows=64)
    analysis = harness.all_logits.lower(model, pages, step).compile().memory_analysis()
    held = layout.page_bytes * 4096 // 4
    assert analysis.alias_size_in_bytes >= held
    assert analysis.temp_size_in_bytes < held // 8


@pytest.mark.parametrize("name, mesh, message", [
    ("llama2-mha", "pipeline=2", r"repeated patterns of 3; pipeline=3 would"),
    ("olmo2", "pipeline=2,context=2", r"pipeline=2,context=2: the two cannot be combined"),
    ("qwen3-moe", "pipeline=3", r"patterns of 1 \+ 2; pipeline=2 would"),
])  # fmt: skip
def test_a_mesh_that_cannot_be_is_refused(name: str, mesh: str, message: str):
    with pytest.raises(MeshError, match=message):
        model_rules(read_config(harness.config_json(name)), make_mesh(parse_mesh(mesh)))


def test_a_stack_that_does_not_divide_is_told_of():
    rules = model_rules(read_config(harness.config_json("deepseek-v3")), make_mesh(parse_mesh("pipeline=2")))
    pipeline.num_kv_layers(read_config(harness.config_json("deepseek-v3")), rules)
    assert "1 layers do not divide over pipeline=2" in rules.replicated["layers"]
