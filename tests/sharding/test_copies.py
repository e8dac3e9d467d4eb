"""Kv heads fewer than devices along `tensor`: each device holds the one that its query heads use, and nothing else."""

from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints.load import load_params
from checkpoints.open import open_checkpoint
from checkpoints.orbax_folder import restore_params, save_folder
from model.families.registry import may_be_left_over, param_sources, read_config
from model.transformer import param_axes
from serving.runner.memory import bytes_per_device
from sharding.copies import stored_layout, with_copies, without_copies
from sharding.mesh import MeshSpec, make_mesh
from sharding.rules import axis_rules
from tests.checkpoints.llama import write_llama
from tests.model import harness
from tests.model.test_goldens import check
from tests.tolerances import LOGITS_FLOAT32

GOLDENS = Path(__file__).parents[1] / "goldens"
AXES = ("layers", "embed", "kv_heads", "head_dim")
VALUE = np.arange(3 * 4 * 2 * 5, dtype=np.float32).reshape(3, 4, 2, 5)  # two kv heads


def layout(spec: MeshSpec, num_kv_heads: int = 2):
    rules = axis_rules(make_mesh(spec), num_heads=8, num_kv_heads=num_kv_heads)
    shape = (3, 4, rules.held("kv_heads", num_kv_heads), 5)
    return rules, shape, *stored_layout(rules, AXES, shape)


SPECS = [MeshSpec(tensor=8), MeshSpec(tensor=4, data=2), MeshSpec(tensor=4, context=2)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_device_holds_the_head_of_its_query_heads(spec: MeshSpec, tmp_path: Path):
    rules, shape, stored_shape, sharding = layout(spec)
    assert stored_shape == VALUE.shape and shape[2] == spec.tensor
    stored = jax.device_put(VALUE, sharding)
    held = with_copies(rules, AXES, shape, stored)
    np.testing.assert_array_equal(np.asarray(held), VALUE.repeat(spec.tensor // 2, axis=2))
    assert all(shard.data.shape == (3, 4, 1, 5) for shard in held.addressable_shards)
    np.testing.assert_array_equal(np.asarray(without_copies(rules, AXES, held)), VALUE)
    # And an Orbax folder that was written from copies has none.
    save_folder(tmp_path / "model", {("k",): without_copies(rules, AXES, held)}, {}, {})
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    again = restore_params(tmp_path / "model", {("k",): VALUE.shape}, {("k",): one}, np.float32)["k",]
    np.testing.assert_array_equal(again, VALUE)
    across = restore_params(tmp_path / "model", {("k",): stored_shape}, {("k",): sharding}, np.float32)["k",]
    np.testing.assert_array_equal(np.asarray(with_copies(rules, AXES, shape, across)), np.asarray(held))


def test_where_heads_divide_nothing_is_copied():
    rules, shape, stored_shape, sharding = layout(MeshSpec(tensor=2))
    assert (shape, sharding) == (stored_shape, rules.sharding(AXES, shape)) and not rules.replicated
    stored = jax.device_put(VALUE, sharding)
    assert with_copies(rules, AXES, shape, stored) is stored is without_copies(rules, AXES, stored)


@pytest.mark.parametrize("heads, kv_heads, tensor", [(8, 3, 8), (4, 2, 8), (12, 8, 3)])
def test_what_comes_out_uneven_is_replicated_and_says_so(heads: int, kv_heads: int, tensor: int):
    rules = axis_rules(make_mesh(MeshSpec(tensor=tensor)), num_heads=heads, num_kv_heads=kv_heads)
    assert rules.held("kv_heads", kv_heads) == kv_heads and rules.shards("kv_heads", kv_heads) == 1
    assert rules.replicated == {
        "attention": f"{kv_heads} kv heads ({heads} query heads) do not divide over tensor={tensor}: "
        "attention weights and KV pages are on every device"
    }


@pytest.mark.parametrize("name, kv_heads, length", [
    ("llama-mqa", 1, 33), pytest.param("gpt-oss", 2, 65, marks=pytest.mark.slow),  # biases and sinks
])  # fmt: skip
def test_logits_and_bytes(name: str, kv_heads: int, length: int):
    model, whole = harness.load(GOLDENS / name, "4x2"), harness.load(GOLDENS / name)
    check(model, np.load(GOLDENS / name / "golden.npz"), length)
    assert f"{kv_heads} kv heads are fewer than tensor=4" in model.rules.replicated["kv heads"]
    assert f"every kv head is on {4 // kv_heads} devices" in model.rules.replicated["kv heads"]
    pages, of_one = harness.kv_pages(model, num_pages=32), harness.kv_pages(whole, num_pages=16)
    assert pages.size == 2 * of_one.size * 4 // kv_heads
    assert bytes_per_device(pages) * kv_heads == bytes_per_device(of_one)  # one head


def test_two_kv_heads_on_eight_devices(tmp_path: Path):
    rng = np.random.default_rng(0)
    folder = write_llama(tmp_path / "model", lambda shape: rng.normal(0, 0.3, shape).astype(np.float32), vocab_size=64,
                         hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
                         num_key_value_heads=2, head_dim=8)  # fmt: skip
    step, logits = harness.batch([(range(20), 0)], num_tokens=32, num_rows=2), []
    for mesh in ("1x1", "8x1"):
        model = harness.load(folder, mesh)
        logits.append(np.asarray(harness.all_logits(model, harness.kv_pages(model), step)[0])[:20])
    assert np.abs(logits[0]).max() > 1
    np.testing.assert_allclose(logits[1], logits[0], atol=LOGITS_FLOAT32, rtol=0)


class Counting:
    """Counts what is read of each tensor."""

    def __init__(self, source):
        self._source, self.read_elements = source, dict.fromkeys(source.names(), 0)
        self.location, self.names, self.shape = source.location, source.names, source.shape
        self.close = source.close

    def read(self, name, index=None):
        found = self._source.read(name, index)
        self.read_elements[name] += found.size
        return found


def test_each_head_is_read_once():
    checkpoint = open_checkpoint(GOLDENS / "llama-gqa-tied")
    assert checkpoint.source is not None
    config, source = read_config(checkpoint.config), Counting(checkpoint.source)
    model = harness.shapes_of(config, "4x2")
    stored = {path: stored_layout(model.rules, axes, shape) for path, (shape, axes) in param_axes(model).items()}
    shapes = {path: shape for path, (shape, _) in stored.items()}
    load_params(source, param_sources(config, shapes), shapes, {path: place for path, (_, place) in stored.items()},
                np.float32, ignore=may_be_left_over(config))  # fmt: skip
    for name, count in source.read_elements.items():
        assert count == np.prod(source.shape(name)), name
