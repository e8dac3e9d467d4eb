"""Experts that move between simulated devices, against indexing."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.exchange import dense_exchange
from sharding.mesh import make_mesh, parse_mesh
from sharding.moving import move_layer, spread_experts
from sharding.rules import AxisRules, axis_rules

L, P = 3, 16


def rules_of(mesh: str) -> AxisRules:
    rules = axis_rules(make_mesh(parse_mesh(mesh)), num_heads=8, num_kv_heads=8)
    return replace(rules, rules={**rules.rules, "experts": ("data", "tensor")})


def weights_of(rules: AxisRules, num_places: int) -> tuple[np.ndarray, jax.Array]:
    values = np.random.default_rng(0).normal(size=(L, num_places, 2, 3)).astype(np.float32)
    return values, jax.device_put(values, rules.sharding(("layers", "experts", None, None), values.shape))


@pytest.mark.parametrize("mesh, before", [("1x1", 8), ("2x4", 8), ("4x2", 6)])  # six are whole on each of eight devices
def test_spread(mesh: str, before: int):
    rules = rules_of(mesh)
    values, weights = weights_of(rules, before)
    sources = np.random.default_rng(1).integers(0, before, (L, P))
    out = rules.sharding(("layers", "experts", None, None), (L, P, 2, 3))
    got = jax.jit(partial(spread_experts, rules, dense_exchange), out_shardings=out)(weights, jnp.asarray(sources))
    np.testing.assert_array_equal(got, np.stack([values[layer, of] for layer, of in enumerate(sources)]))


@pytest.mark.parametrize("mesh", ["1x1", "2x4"])
def test_one_layer_moves_in_place(mesh: str):
    rules = rules_of(mesh)
    values, weights = weights_of(rules, P)
    sources = np.random.default_rng(2).integers(0, P, P)
    move = jax.jit(partial(move_layer, rules, dense_exchange), donate_argnums=0, out_shardings=weights.sharding)
    got = move(weights, np.int32(1), sources)
    assert weights.is_deleted()
    values[1] = values[1][sources]
    np.testing.assert_array_equal(got, values)
