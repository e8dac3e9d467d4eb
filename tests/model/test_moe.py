"""Mixtures of experts: routing against numpy, the layer against every expert computed, and what a device reads."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints.load import load_params
from checkpoints.open import open_checkpoint
from model.build import model_rules
from model.config import ClampedSwiGLU, MoESpec, Routing
from model.families.registry import param_sources, read_config
from model.layers import gated
from model.moe import MoE, route
from model.transformer import param_axes
from pallas_kernels.grouped_matmul.api import ExpertsSpec, choose_backend
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


@pytest.mark.parametrize("mesh", ["1x1", "4x2"])
def test_layer_equals_every_expert_computed(mesh: str):
    """Also with tokens that are not divided over the devices, and an expert that nobody chose."""
    config = read_config({**harness.config_json("mixtral"), "hidden_size": 16})
    spec = MoESpec(routing=Routing(num_experts=8, top_k=2), width=24)
    rules = model_rules(config, make_mesh(parse_mesh(mesh)))
    held = 8 // rules.shards("experts", 8)
    float32 = jnp.dtype(jnp.float32)
    matmuls = choose_backend("xla", ExpertsSpec(num_experts=held, dtype=float32, weight_dtype=float32),
                             rules.mesh.devices.flat[0])  # fmt: skip
    layer = MoE(config, spec, rules, matmuls, rngs=nnx.Rngs(0), dtype=float32)
    layer.experts.down[...] = layer.experts.down[...] * 100
    x = np.random.default_rng(2).normal(size=(7, 16)).astype(np.float32) ** 2  # positive, so that nobody likes -10
    layer.router[...] = (100 * layer.router[...]).at[:, 5].set(-10)
    chosen, weights = route(spec.routing, jnp.asarray(x) @ layer.router[...])
    assert 5 not in np.asarray(chosen)
    of_all = np.zeros((7, 8), np.float32)
    np.put_along_axis(of_all, np.asarray(chosen), np.asarray(weights), axis=1)
    gate, up = (np.einsum("td,edf->tef", x, p[...]) for p in (layer.experts.gate, layer.experts.up))
    want = np.einsum("tef,efd,te->td", gate / (1 + np.exp(-gate)) * up, layer.experts.down[...], of_all)
    assert np.abs(want).max() > 0.1
    got = nnx.jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(got, want, atol=LOGITS_FLOAT32, rtol=0)


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
