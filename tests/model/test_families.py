"""Reading configs: every key known or refused, published ones accepted, layers as patterns, RoPE numbers."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from model.build import choose_kernels, model_rules
from model.config import LayerSpec, ModelConfig, RopeConfig
from model.families.common import UnsupportedModel
from model.families.names import sources
from model.families.registry import FAMILIES, may_be_left_over, param_sources, read_config
from model.rope import apply_rope, rope_angles
from model.transformer import param_axes
from sharding.mesh import make_mesh, parse_mesh
from tests.model import harness
from tests.model.published import PUBLISHED

GOLDENS = Path(__file__).parents[1] / "goldens"
CONFIGS = {path.parent.name: json.loads(path.read_text()) for path in sorted(GOLDENS.glob("*/config.json"))}
NONSENSE = (None, 0, -1, "x", "", [], [1], {}, {"full_attention": 1}, 1.5, True, 10**12, float("inf"), float("nan"))


def test_every_family_has_a_golden():
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES) - {"gemma3", "llama4"}  # their texts


@pytest.mark.parametrize("name", CONFIGS)
def test_unknown_keys_are_refused(name: str):
    read_config(CONFIGS[name])
    with pytest.raises(UnsupportedModel, match="does not know: num_hash_layers, per_layer_scale"):
        read_config(CONFIGS[name] | {"per_layer_scale": 7.0, "num_hash_layers": 8})


@pytest.mark.parametrize("name", CONFIGS)
def test_nonsense_is_refused_by_name_or_harmless(name: str):
    for key in CONFIGS[name]:
        for value in NONSENSE:
            try:
                read_config(CONFIGS[name] | {key: value})
            except UnsupportedModel as error:
                assert "config.json" in str(error)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str):
    published = PUBLISHED[name]
    assert read_config(published).num_layers == published.get("text_config", published)["num_hidden_layers"]


def test_what_published_configs_mean():
    gemma2, gemma3, gemma3_27b, phi3, phi4 = (read_config(PUBLISHED[name]) for name in list(PUBLISHED)[:5])
    assert gemma2.tie_embeddings and (gemma2.attention_soft_cap, gemma2.logit_soft_cap) == (50.0, 30.0)
    assert [layer.window for layer in gemma2.layers[:4]] == [4096, None, 4096, None]
    assert [layer.window for layer in gemma3.layers] == ([512] * 5 + [None]) * 4 + [512] * 2
    assert gemma3.layers[0].rope.frequencies[1] > gemma3.layers[5].rope.frequencies[1]
    assert [(len(stack.pattern), stack.periods) for stack in gemma3_27b.stacks] == [(6, 10), (1, 2)]
    assert (gemma3_27b.eos_ids, gemma3_27b.vocab_size, gemma3_27b.max_position) == ((1, 106), 262208, 131072)
    assert {layer.window for layer in phi3.layers} == {2047}
    assert len(phi4.layers[0].rope.frequencies) == 48
    np.testing.assert_allclose(phi4.layers[0].rope.magnitude, math.sqrt(1 + math.log(32) / math.log(4096)))
    assert read_config(PUBLISHED["Qwen2.5 with YaRN"]).max_position == 131072
    rope = read_config(PUBLISHED["DeepSeek-R1-0528-Qwen3-8B"]).layers[0].rope
    assert rope is not None and rope.magnitude == pytest.approx(1)  # without its factor 1.14


def layers(kinds: str) -> tuple[LayerSpec, ...]:
    rope = RopeConfig(frequencies=(1.0, 0.1))
    return tuple(LayerSpec(rope=rope, window=None if kind == "G" else ord(kind)) for kind in kinds)


def config_of(kinds: str) -> ModelConfig:
    return ModelConfig(family="llama", vocab_size=64, hidden_size=16, intermediate_size=16, num_heads=2,
                       num_kv_heads=2, head_dim=8, layers=layers(kinds), max_position=64, norm_eps=1e-6,
                       tie_embeddings=True, attention_scale=1.0)


@pytest.mark.parametrize("kinds, stacks", [
    ("G", [("G", 1)]),
    ("G" * 48, [("G", 48)]),
    ("LLLLLG" * 10 + "LL", [("LLLLLG", 10), ("L", 2)]),  # Gemma 3 27B
    ("LG" * 21, [("LG", 21)]),  # Gemma 2 9B
    ("GGG" + "L" * 58, [("G", 3), ("L", 58)]),
    ("GLLLLL" * 3, [("GLLLLL", 3)]),
    ("LLLG" * 2 + "A" * 3, [("LLLG", 2), ("A", 3)]),
    ("ABC", [("A", 1), ("B", 1), ("C", 1)]),
])  # fmt: skip
def test_layers_repeat_in_patterns(kinds: str, stacks: list[tuple[str, int]]):
    config = config_of(kinds)
    assert [(stack.pattern, stack.periods) for stack in config.stacks] == [(layers(p), n) for p, n in stacks]
    numbers = [n for stack in config.stacks for place in range(len(stack.pattern)) for n in stack.layers_at(place)]
    assert sorted(numbers) == list(range(len(kinds)))
    for stack in config.stacks:
        for place, layer in enumerate(stack.pattern):
            assert all(config.layers[number] == layer for number in stack.layers_at(place))


def test_depth_does_not_make_the_program_longer():
    """62 layers in two patterns trace as many layers as 14 do."""

    def size(kinds: str) -> int:
        config = config_of(kinds)
        model = harness.shapes_of(config)
        structure, state = nnx.split(model)
        step = harness.batch([([1, 2], 0)], num_tokens=4, num_rows=4)
        pages = harness.kv_pages(model)
        jaxpr = jax.make_jaxpr(lambda state, pages: nnx.merge(structure, state)(pages, step))(state, pages)
        return str(jaxpr).count("scan[")

    assert size("LLLLLG" * 10 + "LL") == size("LLLLLG" * 2 + "LL") > 0


def test_every_parameter_has_its_tensor_and_no_tensor_two_parameters():
    for name, hf in CONFIGS.items():
        config = read_config(hf)
        paths = param_axes(harness.shapes_of(config))
        found = param_sources(config, paths).values()
        parts = [(tensor, source.rows, source.part) for source in found for tensor in source.names]
        assert len(parts) == len(set(parts)), name


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_the_text_of_a_multimodal_checkpoint(name: str, tmp_path: Path):
    """A golden as the family is published: within a config, under a prefix, beside a vision tower."""
    golden = GOLDENS / name
    tensors = {f"language_model.{name}": value for name, value in load_file(golden / "model.safetensors").items()}
    for tensor in {"gemma3": ("vision_tower.vision_model.post_layernorm", "multi_modal_projector.mm_soft_emb_norm"),
                   "llama4": ("vision_model.layernorm_post", "multi_modal_projector.linear_1")}[name]:  # fmt: skip
        tensors[f"{tensor}.weight"] = np.ones(4, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "text_config": CONFIGS[name]}))
    model, want = harness.load(tmp_path), harness.load(golden)
    for ours, other in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(want)), strict=True):
        np.testing.assert_array_equal(ours, other)
    assert replace(model.config, family=f"{name}_text") == want.config


def test_what_a_config_means_that_says_nothing():
    """What transformers takes, which is not the same for all families."""
    yarn = PUBLISHED["gpt-oss-20b in bfloat16"]["rope_scaling"]
    for name, key, value in (
        ("Mixtral-8x7B-Instruct-v0.1", "rope_theta", 1e6), ("Mixtral-8x7B-Instruct-v0.1", "rms_norm_eps", 1e-5),
        ("Mixtral-8x7B-Instruct-v0.1", "sliding_window", None), ("gpt-oss-20b in bfloat16", "rope_scaling", yarn),
        ("gpt-oss-20b in bfloat16", "rope_theta", 150_000.0), ("gemma-2-9b-it", "attn_logit_softcapping", 50.0),
        ("gemma-2-9b-it", "tie_word_embeddings", True), ("gemma-3-1b-it", "max_position_embeddings", 131_072),
        ("Olmo-3-7B", "rms_norm_eps", 1e-5), ("GLM-4-9B-0414", "num_key_value_heads", 2),
        ("Phi-3-mini-4k-instruct", "max_position_embeddings", 4096), ("Qwen2.5 with YaRN", "num_key_value_heads", 32),
        ("DeepSeek-V3 in bfloat16", "first_k_dense_replace", 3), ("DeepSeek-V2-Lite", "q_lora_rank", 1536),
        ("Llama-4-Maverick-17B-128E, its text", "rope_theta", 500_000.0),
    ):  # fmt: skip
        said = PUBLISHED[name] | {"num_attention_heads": 32}
        unsaid = {k: v for k, v in said.items() if k != key}
        assert read_config(unsaid) == read_config(said | {key: value}), (name, key)
    mistral = CONFIGS["mistral-window"]
    windows = [read_config(hf).layers[0].window for hf in
               (mistral | {"sliding_window": None},
                {k: v for k, v in mistral.items() if k != "sliding_window"})]  # fmt: skip
    assert windows == [None, 4096]


def test_the_norms_of_latents_have_an_epsilon_of_their_own():
    """Moonlight's other norms have 1e-5."""
    layer = harness.shapes_of(read_config(PUBLISHED["Moonlight-16B-A3B"])).stacks[0].layers[0]
    assert (layer.attention_norm.eps, layer.attention.kv_norm.eps) == (1e-5, 1e-6)


def test_where_rope_theta_is_said_twice():
    """`rope_scaling` and `rope_parameters` count before the config around them."""
    rope = {"rope_type": "linear", "factor": 1.0, "rope_theta": 16.0}
    want = read_config(CONFIGS["llama2-mha"] | {"rope_parameters": rope})
    without = {k: v for k, v in CONFIGS["llama2-mha"].items() if k != "rope_parameters"}
    for said in ({"rope_parameters": rope}, {"rope_scaling": rope}):
        assert read_config(without | said | {"rope_theta": 7.0}) == want


def test_deepseeks_predictor_is_left_unread_and_nothing_else():
    """V3's layer behind the last; a second one, or one within, is an error."""
    config = read_config(CONFIGS["deepseek-v3"])
    assert may_be_left_over(config) == ("model.layers.3.*",)
    with pytest.raises(UnsupportedModel, match="num_nextn_predict_layers=2"):
        read_config(CONFIGS["deepseek-v3"] | {"num_nextn_predict_layers": 2})
    with pytest.raises(UnsupportedModel, match="quantization_config of 'fp8': .* use a copy of the model in bfloat16"):
        read_config(CONFIGS["deepseek-v3"] | {"quantization_config": {"quant_method": "fp8"}})


def test_what_the_mixtures_mean():
    names = "Mixtral-8x7B-Instruct-v0.1", "gpt-oss-20b in bfloat16", "DeepSeek-V2-Lite", "DeepSeek-V3 in bfloat16"
    mixtral, oss, lite, v3 = (read_config(PUBLISHED[name]) for name in names)
    assert (mixtral.num_experts, oss.num_experts, lite.num_experts, v3.num_experts) == (8, 32, 64, 256)
    assert [len(stack.pattern) for stack in v3.stacks] == [1, 1] and [s.num_layers for s in v3.stacks] == [3, 58]
    assert [layer.window for layer in oss.layers[:3]] == [128, None, 128]
    np.testing.assert_allclose(oss.layers[0].rope.magnitude, 0.1 * math.log(32) + 1)
    np.testing.assert_allclose(v3.attention_scale, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert v3.layers[0].rope.magnitude == 1.0 and v3.layers[0].rope.pairs == "neighbours"
    moe = v3.layers[3].moe
    assert moe is not None and (moe.width, moe.shared_width, moe.routing.scale) == (2048, 2048, 2.5)
    assert lite.latent is not None and lite.latent.query_rank is None
    assert all(layer.moe and layer.moe.routing.groups == 1 for layer in lite.layers[1:])


def test_what_llama_4_means():
    scout, maverick = (read_config(hf) for name, hf in PUBLISHED.items() if name.startswith("Llama-4"))
    for config in (scout, maverick):
        assert [layer.chunk for layer in config.layers] == [8192, 8192, 8192, None] * 12
        assert [layer.rope is None for layer in config.layers] == [layer.growth is not None for layer in config.layers]
        assert [layer.rope is None for layer in config.layers] == [False, False, False, True] * 12
        assert (config.intermediate_size, config.stacks[0].periods) == (16384, 12)
    moe = scout.layers[0].moe
    assert moe is not None and (moe.width, moe.shared_width, moe.routing.applied_to) == (8192, 8192, "input")
    assert [layer.moe is not None for layer in maverick.layers] == [False, True] * 24
    assert (scout.qk_norm, maverick.qk_norm) == ("rotated", None)
    assert (scout.eos_ids, scout.max_position) == ((200001, 200007, 200008), 10485760)
    # Slower than a turn in 8192 positions, a 16th; there is nothing between.
    assert scout.layers[0].rope and maverick.layers[0].rope
    ratio = np.divide(scout.layers[0].rope.frequencies, maverick.layers[0].rope.frequencies)
    assert {*np.round(16 * ratio)} == {1, 16}
    text = PUBLISHED["Llama-4-Scout-17B-16E-Instruct"]["text_config"]
    without = read_config(text | {"attention_chunk_size": None})
    assert not any(layer.chunk for layer in without.layers)
    assert read_config({k: v for k, v in text.items() if k != "attention_chunk_size"}) == read_config(text)


@pytest.mark.parametrize("change, message", [
    ({"no_rope_layers": [1, 0]}, "no_rope_layers=.1, 0. must be 4 times 0 or 1"),
    ({"layer_types": ["sliding_attention"] * 4}, "must be 4 times chunked_attention or full_attention"),
    ({"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": None}, "there is no attention_chunk_size"),
    ({"attention_chunk_size": 0}, "chunk=0 must be at least 1"),
    ({"floor_scale": 0}, "every=0 tokens must be at least 1"),
])  # fmt: skip
def test_llama_4s_that_are_refused(change: dict, message: str):
    with pytest.raises(UnsupportedModel, match=message):
        read_config(CONFIGS["llama4"] | change)


def test_latent_pages_are_what_the_papers_say():
    """576 numbers a token and layer: 1,152 bytes, one 71st of DeepSeek-V3's keys and values."""
    config = read_config(PUBLISHED["DeepSeek-V3 in bfloat16"])
    rules = model_rules(config, make_mesh(parse_mesh("8x1")))
    kernels = choose_kernels(config, rules, jnp.dtype(jnp.bfloat16), attention_backend="xla", page_size=32)
    layout = kernels.kv_layout(num_pages=4)
    assert layout.page_bytes == 61 * 32 * 1152
    assert rules.spec(layout.axes, layout.shape) == jax.sharding.PartitionSpec(None, None, None, None)
    assert "latent KV pages" in rules.replicated
    assert kernels.attention.spec.num_heads == 16 and kernels.experts is not None
    assert kernels.experts.matmuls.spec.num_experts == 32


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the GPU kernel needs jax 0.12 or newer")
def test_a_gpu_is_simulated_on_one_device_only():
    """On several, jax's interpreter fails after the first step, or waits for ever."""
    config = read_config(CONFIGS["llama-gqa-tied"])

    def choose(mesh: str, backend: str) -> str:
        rules = model_rules(config, make_mesh(parse_mesh(mesh)))
        kernels = choose_kernels(config, rules, jnp.dtype(jnp.float32), attention_backend=backend, page_size=16)
        return kernels.attention.choice.name

    assert (choose("1x1", "mosaic_gpu"), choose("2x1", "mosaic_tpu")) == ("mosaic_gpu", "mosaic_tpu")
    with pytest.raises(ValueError, match="'mosaic_gpu': jax simulates a GPU kernel on one device, the mesh has 2"):
        choose("2x1", "mosaic_gpu")


def test_a_parameter_without_a_name_is_an_error():
    with pytest.raises(KeyError, match="no tensor is known for the parameter vision"):
        sources(config_of("G"), {}, [("vision", "scale")])


def rope_of(rope: dict, context: int | None = None, **fields: Any) -> RopeConfig:
    hf = CONFIGS["llama2-mha"] | {"head_dim": 8, "max_position_embeddings": 64, "rope_parameters": rope} | fields
    return read_config(hf, context).layers[0].rope


def test_scalings_by_hand():
    """Base 16 and four pairs: frequencies 1, 1/2, 1/4, 1/8."""
    base = np.array([1, 1 / 2, 1 / 4, 1 / 8])
    default = {"rope_type": "default", "rope_theta": 16.0}
    np.testing.assert_allclose(rope_of(default).frequencies, base)
    np.testing.assert_allclose(rope_of(default | {"rope_type": "linear", "factor": 4.0}).frequencies, base / 4)
    dynamic = default | {"rope_type": "dynamic", "factor": 2.0}
    np.testing.assert_allclose(rope_of(dynamic, context=64).frequencies, base, rtol=1e-6)
    # Twice the context: the base grows by (2 * 2 - 1) ** (8 / 6), so the last frequency falls to a third.
    np.testing.assert_allclose(rope_of(dynamic, context=128).frequencies, base * 3 ** -np.arange(0, 4 / 3, 1 / 3),
                               rtol=1e-6)
    long = default | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0],
                      "original_max_position_embeddings": 16}
    np.testing.assert_allclose(rope_of(long, context=16).frequencies, base)
    np.testing.assert_allclose(rope_of(long, context=17).frequencies, base**2)
    assert rope_of(long).magnitude == pytest.approx(math.sqrt(1.5))  # 64 is 4 times 16, and log 4 half of log 16
    # Turns in 2 pi * 16 positions: 16, 8, 4, 2. Kept from 8 on, divided by the factor up to 2, half way between at 4.
    yarn = default | {"rope_type": "yarn", "factor": 2.0, "beta_fast": 8.0, "beta_slow": 2.0,
                      "original_max_position_embeddings": 2 * math.pi * 16}
    np.testing.assert_allclose(rope_of(yarn).frequencies, base * [1, 1, 3 / 4, 1 / 2], rtol=1e-6)
    assert rope_of(yarn).magnitude == pytest.approx(0.1 * math.log(2) + 1)
    assert rope_of(yarn | {"attention_factor": 1.5}).magnitude == 1.5


@pytest.mark.parametrize("rope, message", [
    ({"rope_type": "su"}, "'su' is not supported, only default"),
    ({"rope_type": "yarn"}, None),  # everything has a default
    ({"rope_type": "dynamic"}, "'dynamic' needs 'factor'"),
    ({"rope_type": "linear", "factor": 2.0, "alpha": 1}, "unknown rope scaling keys .'alpha'."),
    ({"rope_type": "linear", "factor": 0.0}, "no finite frequencies"),
    ({"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}, "a list of 4 numbers"),
])  # fmt: skip
def test_scalings_that_are_refused(rope: dict, message: str | None):
    if message is None:
        rope_of(rope)
        return
    with pytest.raises(UnsupportedModel, match=message):
        rope_of(rope)


def test_partial_rotation_by_hand():
    """Two of four pairs turn by a right angle, as halves and as neighbours; the rest stays."""
    x = jnp.arange(8, dtype=jnp.float32)[None, None]
    for pairs, want in (("halves", [-2, -3, 0, 1, 4, 5, 6, 7]), ("neighbours", [-1, 0, -3, 2, 4, 5, 6, 7])):
        rope = RopeConfig(frequencies=(math.pi / 2, math.pi / 2), pairs=pairs)
        got = apply_rope(rope, x, rope_angles(rope, jnp.array([1])))
        np.testing.assert_allclose(got[0, 0], want, atol=1e-5)
