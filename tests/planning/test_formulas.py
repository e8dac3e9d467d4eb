"""The planner's formulas against numbers worked out by hand; docs/planning.md derives them."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from model.families.registry import read_config
from scripts.planning.counting import Collective, Counts
from scripts.planning.placement import MeshLayout, Placement, Sizes, devices_of, place
from scripts.planning.plan import MeshPlan, Question, plan_mesh
from scripts.planning.roofline import CompiledCosts, Line, step_seconds
from scripts.planning.search import layouts, ranked, suggestions
from scripts.planning.topology import PlanError, parse_topology
from scripts.planning.workload import Work, attention_cost, experts_cost, step_cost
from serving.runner.memory import PAGE_SIZE
from sharding.mesh import MeshSpec

CONFIGS = Path(__file__).parents[2] / "scripts" / "planning" / "configs"


def placed(model: str, topology: str, layout: MeshLayout) -> Placement:
    slice_ = parse_topology(topology)
    sizes = Sizes(max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=2048,
                  page_size=PAGE_SIZE[slice_.platform], dtype=jnp.dtype("bfloat16"), memory_share=0.9)  # fmt: skip
    config = read_config(json.loads((CONFIGS / f"{model}.json").read_text()))
    return place(config, slice_, layout, sizes, devices_of(slice_))


def plans(model: str, topology: str) -> list[MeshPlan]:
    slice_ = parse_topology(topology)
    config = read_config(json.loads((CONFIGS / f"{model}.json").read_text()))
    question = Question(context=4096, prompt=1024, batches=(1, 64, 256), contexts=(4096,))
    found = [plan_mesh(placed(model, topology, layout), question) for layout in layouts(config, slice_)]
    return ranked(found, "throughput")


def test_llama_3_8b_on_eight_v6e_chips():
    """Of 8.03e9 parameters a device reads all but the embedding; 64 sequences of 4096 tokens read 4.3 GB of KV."""
    p = placed("llama-3-8b", "v6e:2x4", MeshLayout(MeshSpec(tensor=8)))
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    norms = (2 * 32 + 1) * 4096
    assert p.dense == 32 * layer // 8
    assert p.head == 128256 * 4096 // 8
    assert p.weight_bytes == 2 * (32 * layer // 8 + 2 * p.head + norms)
    assert p.page_bytes == 128 * 32 * 2 * 128 * 2  # one kv head a device

    cost = step_cost(p, Work(decode=64, context=4096))
    assert cost.dense.flops == 2 * 64 * (p.dense + p.head)
    assert cost.dense.bytes == 2 * (p.dense + p.head + 64 * 4096 + norms)
    assert cost.attention.flops == 32 * 4 * 4 * 128 * 64 * 4096
    assert cost.attention.bytes == 32 * 2 * 128 * 2 * 64 * (4096 + 1)
    assert cost.collectives == {Collective("all-reduce", 64 * 4096 * 2, 8): 65}

    seconds = step_seconds(p.topology, cost)
    memory = (cost.dense.bytes + cost.attention.bytes) / 1.64e12
    latency, transfer = 65 * 8e-6, 65 * 2 * 7 / 8 * 64 * 4096 * 2 / 200e9
    assert seconds.total == pytest.approx(memory + latency + transfer)
    assert seconds.bound == "memory" and seconds.total == pytest.approx(4.58e-3, rel=0.01)


def test_a_prompt_is_bound_by_products():
    p = placed("llama-3-8b", "v6e:2x4", MeshLayout(MeshSpec(tensor=8)))
    work = Work(decode=0, context=0, chunk=2048, past=1000)
    cost = step_cost(p, work, shape_rows=256)
    assert cost.dense.flops == 2 * (2048 * p.dense + 256 * p.head)
    pairs = sum(1000 + i + 1 for i in range(2048))
    assert cost.attention.flops == 32 * 4 * 4 * 128 * pairs
    assert cost.attention.bytes == p.token_bytes() * 32 * (3048 + 2048)
    assert step_seconds(p.topology, cost).compute > step_seconds(p.topology, cost).memory


def test_deepseek_v3_keeps_one_latent_for_all_heads():
    p = placed("deepseek-v3", "h200:1x1x8", MeshLayout(MeshSpec(tensor=4, data=2), expert_parallel=True))
    assert p.token_bytes() == (512 + 64) * 2
    cost = attention_cost(p, Work(decode=10, context=1000))
    assert cost.flops == 61 * 32 * 2 * (2 * 512 + 64) * 10 * 1000
    assert cost.bytes == 61 * 1152 * (10 * 1000 + 10)
    # 32 of 256 experts on a device; the tokens of both groups choose 8 each.
    experts = experts_cost(p, 64)
    assert experts.flops == 58 * 2 * (128 * 8 / 8) * 3 * 7168 * 2048
    touched = 32 * (1 - (1 - 8 / 256) ** 128)
    assert experts.bytes == pytest.approx(58 * touched * 3 * 7168 * 2048 * 2)


def test_tokens_travel_to_experts_as_the_dispatch_says():
    few = placed("deepseek-v3", "v7x:2x2x1", MeshLayout(MeshSpec(tensor=4, data=2), expert_parallel=True))
    tokens, D = 16, 7168
    small = step_cost(few, Work(decode=tokens, context=100)).collectives
    assert small[Collective("all-gather", 2 * tokens * D * 2, 2, 4)] == 58
    assert small[Collective("reduce-scatter", 2 * tokens * D * 2, 2, 4)] == 58
    large = step_cost(few, Work(decode=0, context=0, chunk=2048)).collectives
    assert large[Collective("ragged-all-to-all", 2048 // 4 * 8 * D * 2, 8)] == 2 * 58
    # After attention, dense MLPs and the embedding; the shared expert's part is summed together with the routed ones'.
    assert (small[Collective("all-reduce", tokens * D * 2, 4)],
            small[Collective("all-reduce", 2 * tokens * D * 2, 4)]) == (61 + 3 + 1, 58)  # fmt: skip
    assert large[Collective("all-reduce", 2048 * D * 2, 4)] == 61 + 3 + 1 + 58


def test_windows_bound_what_is_read():
    config = read_config(json.loads((CONFIGS / "llama-3-8b.json").read_text()) | {"model_type": "mistral",
                         "architectures": ["MistralForCausalLM"], "sliding_window": 100})  # fmt: skip
    topology = parse_topology("v6e:2x4")
    sizes = placed("llama-3-8b", "v6e:2x4", MeshLayout(MeshSpec(tensor=8))).sizes
    p = place(config, topology, MeshLayout(MeshSpec(tensor=8)), sizes, devices_of(topology))
    assert attention_cost(p, Work(decode=1, context=4096)).bytes == p.token_bytes() * 32 * (100 + 1)
    assert attention_cost(p, Work(decode=0, context=0, chunk=150, past=60)).flops == (
        32 * 4 * 4 * 128 * (sum(range(61, 101)) + 110 * 100)
    )
    # In chunks of 100 a token sees what is before it in its own: 50.5 on average, itself included.
    in_chunks = replace(p, config=replace(config, layers=(replace(config.layers[0], window=None, chunk=100),) * 32))
    assert attention_cost(in_chunks, Work(decode=2, context=4096)).bytes == p.token_bytes() * 32 * 2 * (50.5 + 1)
    assert attention_cost(in_chunks, Work(decode=1, context=100)).bytes == p.token_bytes() * 32 * (100 + 1)
    prompt = attention_cost(in_chunks, Work(decode=0, context=0, chunk=150, past=60))
    assert prompt.flops == 32 * 4 * 4 * 128 * (sum(range(61, 101)) + sum(range(1, 101)) + sum(range(1, 11)))
    assert prompt.bytes == p.token_bytes() * 32 * (60 + 150 + 150)


# Best mesh first, as docs/planning.md derives it. Nothing: no mesh of that slice holds the model.
RANKINGS = {
    ("llama-3-8b", "v5e:2x4"): ["tensor=8,data=1", "tensor=4,data=2", "tensor=2,data=4"],
    ("llama-3-8b", "v6e:2x4"): ["tensor=4,data=2", "tensor=8,data=1", "tensor=2,data=4", "tensor=1,data=8"],
    ("llama-3-8b", "v7x:2x2x1"): ["tensor=2,data=4", "tensor=1,data=8", "tensor=4,data=2", "tensor=8,data=1"],
    ("llama-3-8b", "h200:1x1x8"): ["tensor=1,data=8", "tensor=2,data=4", "tensor=4,data=2", "tensor=8,data=1"],
    ("llama-3-70b", "v5e:2x4"): [],
    ("llama-3-70b", "v6e:2x4"): ["tensor=8,data=1"],
    ("llama-3-70b", "v7x:2x2x1"): ["tensor=8,data=1", "tensor=4,data=2", "tensor=2,data=4"],
    ("llama-3-70b", "h200:1x1x8"): ["tensor=4,data=2", "tensor=8,data=1", "tensor=2,data=4"],
    ("deepseek-v3", "v5e:2x4"): [], ("deepseek-v3", "v6e:2x4"): [], ("deepseek-v3", "v7x:2x2x1"): [],
    ("deepseek-v3", "h200:1x1x8"): [],
}  # fmt: skip


@pytest.mark.parametrize("model, topology", RANKINGS)
def test_rankings_are_those_derived_by_hand(model: str, topology: str):
    found = plans(model, topology)
    assert [plan.name for plan in found if plan.memory.fits] == RANKINGS[model, topology]


def test_what_does_not_fit_says_by_how_much_and_what_would():
    found = plans("deepseek-v3", "v7x:2x2x1")
    placement = found[0].placement
    lines = list(suggestions(placement.topology, found))
    assert f"lacks {found[0].memory.missing / 1e9:.2f} GB a device" in lines[0]
    assert lines[1].startswith("16 such devices would hold the weights")
    assert any("8-bit weights would fit" in line for line in lines)
    sixteen = placed("deepseek-v3", "v7x:2x2x2", MeshLayout(MeshSpec(tensor=16)))
    assert plan_mesh(sixteen, Question(context=4096, prompt=8, batches=(1,), contexts=(4096,))).memory.fits


def test_a_line_through_two_steps():
    line = Line.through((64, 100.0), (1024, 1060.0))
    assert (line.at(64), line.at(1024), line.at(0)) == (100, 1060, 36)
    assert Line.through((64, 100.0), (1024, 50.0)).at(500) == 100


def test_what_lies_between_two_compiled_steps():
    """Sums grow with the tokens; few tokens are gathered, many exchanged."""
    total, gather = Collective("all-reduce", 6400, 8), Collective("all-gather", 640, 2, 4)
    few = Counts(flops=10, hbm_bytes=100, collectives=Counter({total: 3, gather: 2}))
    exchange = Collective("ragged-all-to-all", 2048, 8)
    many = Counts(flops=100, hbm_bytes=190, collectives=Counter({replace(total, bytes=102400): 3, exchange: 4}))
    costs = CompiledCosts.of((64, few), (1024, many))
    formula = step_cost(placed("llama-3-8b", "v6e:2x4", MeshLayout(MeshSpec(tensor=8))), Work(decode=1, context=10))
    small, large = costs.replace_in(formula, 32), costs.replace_in(formula, 512)
    assert small.collectives == {replace(total, bytes=3200): 3, replace(gather, bytes=320): 2}
    assert large.collectives == {replace(total, bytes=51200): 3, replace(exchange, bytes=1024): 4}
    assert (large.dense.flops, large.attention) == (10 + 448 * 90 / 960, formula.attention)


# The network


@pytest.mark.parametrize("topology, devices, bandwidth", [
    ("v5e:2x4", 8, 100e9), ("v6e:2x4", 8, 200e9), ("v6e:2x4", 4, 200e9), ("v6e:2x4", 2, 100e9), ("v6e:1x4", 4, 100e9),
    ("v6e:1x16", 16, 200e9), ("v7x:2x2x1", 2, 600e9), ("v7x:2x2x1", 4, 100e9), ("v7x:2x2x1", 8, 200e9),
    ("v5p:2x2x1", 4, 200e9), ("h200:1x1x8", 8, 450e9),
])  # fmt: skip
def test_bandwidth_of_neighbours(topology: str, devices: int, bandwidth: float):
    assert parse_topology(topology).bandwidth(devices) == bandwidth


def test_devices_far_apart_share_a_link():
    assert parse_topology("v7x:2x2x1").bandwidth(2, stride=4) == 100e9


def test_seconds_of_collectives():
    ring, switch = parse_topology("v6e:2x4"), parse_topology("h200:1x1x8")
    assert ring.seconds(Collective("all-reduce", 8_000_000, 8)) == pytest.approx((8e-6, 2 * 7e6 / 200e9))
    assert ring.seconds(Collective("all-gather", 8_000_000, 8)) == pytest.approx((4e-6, 7e6 / 200e9))
    assert switch.seconds(Collective("reduce-scatter", 8_000_000, 8)) == pytest.approx((7e-6, 7e6 / 450e9))
    assert switch.seconds(Collective("all-to-all", 8_000_000, 8)) == pytest.approx((7e-6, 7e6 / 450e9))
    # Half the rows go n/4 hops or less on a ring of eight: each direction of a link carries B n/8.
    assert ring.seconds(Collective("ragged-all-to-all", 8_000_000, 8)) == pytest.approx((4e-6, 8e6 / 100e9))
    assert ring.seconds(Collective("all-reduce", 8_000_000, 1)) == (0, 0)


@pytest.mark.parametrize("text, message", [
    ("v9:2x4", "unknown kind 'v9'; known: v5e:2x4"), ("v6e", "v6e takes 2 sizes, as in v6e:2x4"),
    ("v6e:2x2x2", "as in v6e:2x4"), ("v7x:8", "as in v7x:2x2x1"), ("cpu:0", "cpu takes 1 size, as in cpu:8"),
    ("h200:2x1x8", "h200:1x1x8 would work"), ("v6e:99999x99999", "9999800001 chips, at most 1024"),
])  # fmt: skip
def test_topologies_that_are_none(text: str, message: str):
    with pytest.raises(PlanError, match=message):
        parse_topology(text)
