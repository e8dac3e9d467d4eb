"""Mixtures of experts: routing against numpy, the layer against every expert computed, and what a device reads."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints.load import load_params
from checkpoints.open import open_checkpoint
from model.batch import StepBatch
from model.build import model_rules
from model.config import MLP, ClampedSwiGLU, ModelConfig, MoESpec, Routing
from model.context import spread_rules
from model.dispatch import BySize, Choices, ExchangeRows, GatherTokens, WeightedInputs
from model.expert_options import ExpertOptions, ExpertsError, choose_experts, exchange_from
from model.families.registry import param_sources, read_config
from model.layers import gated
from model.moe import MoE, route
from model.transformer import param_axes
from sharding.exchange import ragged_exchange
from sharding.expert_placement import first_placement, places_of
from sharding.mesh import make_mesh, parse_mesh
from tests.model import harness
from tests.model.test_goldens import GOLDENS
from tests.tolerances import LOGITS_FLOAT32

V3 = Routing(num_experts=16, top_k=4, scores="sigmoid", bias="choice", groups=4, top_groups=2, group_best=2, scale=2.5)


def oracle(routing: Routing, logits: np.ndarray, bias: np.ndarray) -> list[dict[int, float]]:
    """One token after the other: expert -> weight."""
    found = []
    for row in logits.astype(np.float64):
        row = row + bias if routing.bias == "logits" else row
        scores = np.exp(row) / np.exp(row).sum() if routing.scores == "softmax" else 1 / (1 + np.exp(-row))
        choice = scores + bias if routing.bias == "choice" else scores
        size = len(row) // routing.groups
        groups = choice.reshape(routing.groups, size)
        of_group = [sum(sorted(group)[-routing.group_best :]) for group in groups]
        kept = sorted(range(routing.groups), key=lambda g: -of_group[g])[: routing.top_groups]
        experts = [e for e in range(len(row)) if e // size in kept]
        best = sorted(experts, key=lambda e: -choice[e])[: routing.top_k]
        total = sum(scores[e] for e in best) if routing.weights == "normalized" else 1
        found.append({e: routing.scale * scores[e] / total for e in best})
    return found


@pytest.mark.parametrize("routing", [
    V3,
    Routing(num_experts=16, top_k=4),
    Routing(num_experts=16, top_k=1, weights="scores"),
    Routing(num_experts=16, top_k=3, bias="logits"),
    Routing(num_experts=16, top_k=3, groups=8, top_groups=3, weights="scores", scale=16.0),  # DeepSeek-V2
])  # fmt: skip
def test_routing(routing: Routing):
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(size=(50, 16)).astype(np.float32), rng.normal(size=16).astype(np.float32)
    chosen, weights = (np.asarray(x) for x in route(routing, jnp.asarray(logits), jnp.asarray(bias)))
    for got, of_got, want in zip(chosen, weights, oracle(routing, logits, bias), strict=True):
        assert set(got.tolist()) == set(want)
        np.testing.assert_allclose(of_got, [want[e] for e in got.tolist()], rtol=1e-5)


def test_bias_chooses_and_does_not_weigh():
    """The weights sum to the scale; a constant in the bias changes nothing; of ties the lowest number wins."""
    rng = np.random.default_rng(1)
    logits, bias = jnp.asarray(rng.normal(size=(20, 16)), jnp.float32), jnp.asarray(rng.normal(size=16), jnp.float32)
    chosen, weights = route(V3, logits, bias)
    np.testing.assert_allclose(weights.sum(1), 2.5, rtol=1e-5)
    again, same = route(V3, logits, bias + 3)
    np.testing.assert_array_equal(chosen, again)
    np.testing.assert_array_equal(weights, same)
    chosen, _ = route(V3, jnp.zeros((1, 16)), jnp.zeros(16))
    assert chosen[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("fields", [dict(top_k=5), dict(groups=3), dict(groups=2, top_groups=3),
                                    dict(groups=4, top_groups=1, top_k=2), dict(groups=4, group_best=2)])
def test_impossible_routing_is_refused(fields: dict[str, Any]):
    with pytest.raises(ValueError, match="cannot be chosen|experts"):
        Routing(**{"num_experts": 4, "top_k": 1, **fields})


EXPERTS = ExpertOptions(parallel=True)
RAGGED = replace(EXPERTS, all2all="ragged_all_to_all")
WAYS = {
    "one device": ("1x1", ExpertOptions()),
    "over tensor": ("4x2", ExpertOptions()),
    "over tensor, two halves": ("4x2", ExpertOptions(two_micro_batches=True)),
    "gathered": ("4x2", EXPERTS),
    "exchanged": ("4x2", RAGGED),
    "exchanged, only groups": ("1x8", RAGGED),
    "exchanged, redundant": ("4x2", replace(RAGGED, redundant=8)),
    "exchanged, spread over context": ("tensor=2,data=2,context=2", RAGGED),
    "exchanged, two halves": ("2x4", replace(RAGGED, two_micro_batches=True)),
}


def small_moe(mesh: str, options: ExpertOptions, biases: bool = False) -> tuple[MoE, ModelConfig]:
    """Eight experts, two of them for each token. Nobody chooses expert 5."""
    spec = MoESpec(routing=Routing(num_experts=8, top_k=2), width=24)
    config = read_config({**harness.config_json("mixtral"), "hidden_size": 16, "num_local_experts": 8})
    config = replace(config, layers=(replace(config.layers[0], moe=spec),), biases=MLP if biases else frozenset())
    rules = model_rules(config, make_mesh(parse_mesh(mesh)), options)
    rules = spread_rules(rules) if rules.mesh.shape["context"] > 1 else rules
    float32 = jnp.dtype(jnp.float32)
    backend = choose_experts(config, rules, options, float32)
    assert backend is not None
    layer = MoE(config, spec, rules, backend, rngs=nnx.Rngs(0), dtype=float32)
    layer.router[...] = (100 * layer.router[...]).at[:, 5].set(-10)
    experts = layer.experts
    if experts.places is not None:  # replicas in places where nobody would look for them
        placement = np.random.default_rng(0).permutation(first_placement(1, 8, backend.num_places)[0])
        of = [p for p in (experts.gate, experts.up, experts.down) if p is not None]
        for p in of:
            p[...] = p[...][jnp.asarray([int(np.flatnonzero(placement == e)[0]) for e in placement])]
        places, replicas = places_of(placement[None], 8, backend.max_replicas)
        assert replicas.max() == 2
        experts.places[...], experts.replicas[...] = places[0], replicas[0]
    experts.down[...] = experts.down[...] * 100
    return layer, config


def every_expert_computed(layer: MoE, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the layer's result, the experts of each token)"""
    chosen, weights = jax.jit(partial(route, layer.routing))(x @ np.asarray(layer.router[...]))
    of_all = np.zeros((len(x), 8), np.float32)
    np.put_along_axis(of_all, np.asarray(chosen), np.asarray(weights), axis=1)
    experts = layer.experts
    at = np.arange(8) if experts.places is None else np.asarray(experts.places[...])[:, 0]
    gate, up, down = (np.asarray(p[...])[at] for p in (experts.gate, experts.up, experts.down))
    bias = [0 if p is None else np.asarray(p[...])[at] for p in (experts.gate_bias, experts.up_bias, experts.down_bias)]
    gate, up = np.einsum("td,edf->tef", x, gate) + bias[0], np.einsum("td,edf->tef", x, up) + bias[1]
    out = np.einsum("tef,efd->ted", gate / (1 + np.exp(-gate)) * up, down) + bias[2]
    return np.einsum("ted,te->td", out, of_all), np.asarray(chosen)


@pytest.mark.parametrize("way", WAYS)
def test_layer_equals_every_expert_computed(way: str):
    """With groups that have different numbers of tokens, one of them none; what pads them goes nowhere, NaN and all."""
    mesh, options = WAYS[way]
    layer, _ = small_moe(mesh, options, biases=way == "exchanged")
    groups, T = layer.experts.rules.num_groups, 38
    real = [38, 0, 5, 36, 1, 2, 3, 4][:groups]
    x = np.random.default_rng(2).normal(size=(groups, T, 16)).astype(np.float32) ** 2  # positive: nobody likes -10
    for group, count in zip(x, real, strict=True):
        group[count:] = np.nan
    cu_q_lens = np.array([[0, count // 2, count, count] for count in real], np.int32)
    nothing = np.zeros(0, np.int32)
    batch = StepBatch(nothing, nothing, nothing, nothing, jnp.asarray(cu_q_lens.reshape(-1)), nothing)
    if "context" in way:  # real tokens lie anywhere
        mixed = np.random.default_rng(3).permutation(T)
        x, batch = x[:, mixed], batch._replace(real=(mixed < np.array(real)[:, None]).reshape(-1))
    got, load = nnx.jit(lambda layer, *args: layer(*args))(layer, x.reshape(-1, 16), batch)
    want, chosen = every_expert_computed(layer, np.nan_to_num(x.reshape(-1, 16)))
    assert np.abs(want).max() > 0.1
    got, want, chosen, load = (np.asarray(a).reshape(groups, -1, a.shape[-1]) for a in (got, want, chosen, load))
    if "context" in way:
        got, want, chosen = (a[:, np.argsort(mixed)] for a in (got, want, chosen))
        load = load.sum(1, keepdims=True)
    for group, count in enumerate(real):
        np.testing.assert_allclose(got[group, :count], want[group, :count], atol=LOGITS_FLOAT32, rtol=0)
        assert load[group, 0].tolist() == np.bincount(chosen[group, :count].reshape(-1), minlength=8).tolist()
        assert load[group, 0, 5] == 0


def test_weights_of_inputs_by_hand():
    """Of two experts one squares and one triples; half of 2 squared is not half of the square of 2."""

    def apply(rows, sizes, first, dtype):
        return jnp.where(jnp.arange(len(rows))[:, None] < sizes[0], rows**2, 3 * rows)

    x, places = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[0, 1], [1, 0]])
    way = WeightedInputs(way=GatherTokens(axes=(), num_places=2, held=2))
    got = way(Choices(x, places, jnp.array([[0.5, 0.25], [1.0, 2.0]])), (), apply)
    np.testing.assert_allclose(got, [[0.25 + 0.75, 1 + 1.5], [9 + 36, 12 + 64]], rtol=1e-6)


@pytest.mark.parametrize("halves", [False, True])
def test_collectives_of_an_exchange(halves: bool):
    """As for a TPU: counts, rows there, rows back, and the group's share of its results; nothing else."""
    layer, _ = small_moe("4x2", replace(RAGGED, two_micro_batches=halves))
    way = layer.experts.dispatch
    exchange = way.way if halves else way
    ragged = replace(exchange, large=replace(exchange.large, exchange=ragged_exchange))
    layer.experts.dispatch = replace(way, way=ragged) if halves else ragged
    nothing = jnp.zeros(0, jnp.int32)
    batch = StepBatch(nothing, nothing, nothing, nothing, jnp.array([0, 40, 0, 40]), nothing)
    text = str(jax.make_jaxpr(lambda x: layer(x, batch))(jnp.ones((128, 16))))
    kinds = ("all_gather", "ragged_all_to_all", "all_to_all", "psum", "psum_invariant", "reduce_scatter", "ppermute")
    found = {kind: len(re.findall(rf"= {kind}\[", text)) for kind in kinds}
    assert {kind: count for kind, count in found.items() if count} == {
        "all_gather": 4 if halves else 2, "ragged_all_to_all": 4 if halves else 2,
    }  # fmt: skip


def test_what_pads_a_step_is_sent_nowhere():
    """Nor does it take a replica of an expert: tokens do so in turn, by their number in the step."""
    layer, _ = small_moe("1x1", ExpertOptions())
    seen, way = [], layer.experts.dispatch

    def spy(tokens: Choices, *rest) -> jax.Array:
        seen.append(np.asarray(tokens.places))
        return way(tokens, *rest)

    layer.experts.dispatch = spy
    nothing, x = jnp.zeros(0, jnp.int32), jnp.ones((6, 16))
    layer(x, StepBatch(nothing, nothing, nothing, nothing, jnp.array([0, 3, 4]), nothing))
    assert (seen[0][:4] < 8).all() and (seen[0][4:] == 8).all(), "places 0 to 7 are experts"


def test_the_way_follows_from_bytes_and_size():
    """Eight experts a token on eight devices: gathering moves no more bytes, but in a large step sorting costs more."""
    config = read_config(harness.config_json("qwen3-moe"))
    for options in (EXPERTS, RAGGED):
        rules = model_rules(config, make_mesh(parse_mesh("2x4")), options)
        backend = choose_experts(config, rules, options, jnp.dtype(jnp.float32))
        assert backend is not None and isinstance(backend.dispatch, BySize)
        assert isinstance(backend.dispatch.small, GatherTokens) and isinstance(backend.dispatch.large, ExchangeRows)
        assert backend.dispatch.from_tokens == (32 if options is EXPERTS else 1), "three experts a token"
    for sizes, least in {(1, 8): 256, (2, 4): 256, (8, 1): 256, (64, 1): 32, (32, 4): 32}.items():
        mesh: Any = jax.sharding.AbstractMesh(sizes, ("data", "tensor"))
        assert exchange_from(mesh, top_k=8) == least, sizes


@pytest.mark.parametrize("name, mesh, options, message", [
    ("qwen3-qk-norm", "2x1", EXPERTS, "--enable-expert-parallel: this model has no experts"),
    ("qwen3-qk-norm", "2x1", ExpertOptions(two_micro_batches=True), "--enable-dbo: this model has no experts"),
    ("qwen3-moe", "2x1", ExpertOptions(redundant=0), "give --enable-expert-parallel too"),
    ("qwen3-moe", "2x1", ExpertOptions(all2all="ragged_all_to_all"), "is for --enable-expert-parallel"),
    ("qwen2-moe", "2x4", EXPERTS, r"6 experts do not divide over data=4 x tensor=2; .*_experts\": 2"),
    ("qwen2-moe", "2x4", replace(EXPERTS, redundant=1), "6 experts and 1 redundant ones .*: 2"),
    ("qwen3-moe", "2x4", replace(EXPERTS, redundant=3), "must be a multiple of 8"),
    ("qwen3-moe", "2x1", replace(EXPERTS, redundant=10**9), "experts is 1000000000, must be at most 8: 8 exp"),
    ("qwen3-qk-norm", "2x1", ExpertOptions(all2all="ragged_all_to_all"), "all_to_all: this model has no experts"),
])  # fmt: skip
def test_what_cannot_be_is_refused(name: str, mesh: str, options: ExpertOptions, message: str):
    config = read_config(harness.config_json(name))
    with pytest.raises(ExpertsError, match=message):
        choose_experts(config, model_rules(config, make_mesh(parse_mesh(mesh)), options), options,
                       jnp.dtype(jnp.float32))  # fmt: skip


def test_clamped_swiglu_by_hand():
    gate, up = jnp.array([0.0, 1.0, 9.0, -9.0]), jnp.array([1.0, 9.0, -9.0, 0.5])
    sigmoid = 1 / (1 + np.exp(-2 * np.array([0.0, 1.0, 3.0, -9.0])))
    want = np.array([0, 1 * (3 + 1), 3 * (-3 + 1), -9 * 1.5]) * sigmoid
    np.testing.assert_allclose(gated(ClampedSwiGLU(alpha=2.0, limit=3.0), gate, up), want, rtol=1e-6)


def test_a_device_reads_its_experts_only(monkeypatch: pytest.MonkeyPatch):
    """On eight devices every expert's tensor is read once, for the one that holds it."""
    source = open_checkpoint(GOLDENS / "mixtral").source
    assert source is not None
    config = read_config(harness.config_json("mixtral"))
    model = harness.shapes_of(config, "8x1")
    axes = {path: of for path, of in param_axes(model).items() if "experts" in path}
    shapes = {path: shape for path, (shape, _) in axes.items()}
    shardings = {path: model.rules.sharding(names, shape) for path, (shape, names) in axes.items()}
    targets = param_sources(config, axes)
    reads: list[str] = []
    read = source.read
    monkeypatch.setattr(source, "read", lambda name, index=None: reads.append(name) or read(name, index))
    params = load_params(source, targets, shapes, shardings, np.float32, ignore=["*"])
    assert sorted(reads) == sorted(name for target in targets.values() for name in target.names)
    assert len(reads) == 3 * 8 * 3
    for path, value in params.items():
        assert value.addressable_shards[0].data.shape[:2] == (3, 1), path


def test_experts_that_do_not_divide_are_said():
    model = harness.shapes_of(read_config(harness.config_json("qwen2-moe")), "8x1")
    assert model.rules.shards("experts", 6) == 1
    assert model.rules.replicated["experts"] == "6 experts do not divide over tensor=8"
