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

GOLDENS = Path(__file__).parents[1] / "goldens"
CONFIGS = {path.parent.name: json.loads(path.read_text()) for path in sorted(GOLDENS.glob("*/config.json"))}
NONSENSE = (None, 0, -1, "x", "", [], [1], {}, {"full_attention": 1}, 1.5, True, 10**12, float("inf"), float("nan"))

# What families say in their published configs, without what is about tokens and training.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-2-9b-it": dict(
        model_type="gemma2", attention_bias=False, attn_logit_softcapping=50.0, cache_implementation="hybrid",
        final_logit_softcapping=30.0, head_dim=256, hidden_act="gelu_pytorch_tanh", hidden_size=3584,
        hidden_activation="gelu_pytorch_tanh", intermediate_size=14336, max_position_embeddings=8192,
        num_attention_heads=16, num_hidden_layers=42, num_key_value_heads=8, query_pre_attn_scalar=256,
        rms_norm_eps=1e-6, rope_theta=10000.0, sliding_window=4096, vocab_size=256000),
    "gemma-3-1b-it": dict(
        model_type="gemma3_text", attention_bias=False, attn_logit_softcapping=None, cache_implementation="hybrid",
        eos_token_id=[1, 106], final_logit_softcapping=None, head_dim=256, hidden_activation="gelu_pytorch_tanh",
        hidden_size=1152, intermediate_size=6912, max_position_embeddings=32768, num_attention_heads=4,
        num_hidden_layers=26, num_key_value_heads=1, query_pre_attn_scalar=256, rms_norm_eps=1e-6,
        rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512,
        sliding_window_pattern=6, vocab_size=262144),
    "gemma-3-27b-it": dict(
        model_type="gemma3", boi_token_index=255999, eoi_token_index=256000, eos_token_id=[1, 106],
        image_token_index=262144, mm_tokens_per_image=256, vision_config=dict(model_type="siglip_vision_model"),
        text_config=dict(head_dim=128, hidden_size=5376, intermediate_size=21504, model_type="gemma3_text",
                         num_attention_heads=32, num_hidden_layers=62, num_key_value_heads=16,
                         query_pre_attn_scalar=168, rope_scaling=dict(factor=8.0, rope_type="linear"),
                         sliding_window=1024)),
    "Phi-3-mini-4k-instruct": dict(
        model_type="phi3", attention_bias=False, embd_pdrop=0.0, hidden_act="silu", hidden_size=3072,
        intermediate_size=8192, max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=32,
        num_key_value_heads=32, original_max_position_embeddings=4096, resid_pdrop=0.0, rms_norm_eps=1e-5,
        rope_scaling=None, rope_theta=10000.0, sliding_window=2047, tie_word_embeddings=False, vocab_size=32064),
    "Phi-4-mini-instruct": dict(
        model_type="phi3", attention_bias=False, embd_pdrop=0.0, full_attn_mod=1, hidden_act="silu", hidden_size=3072,
        intermediate_size=8192, interpolate_factor=1, lm_head_bias=False, max_position_embeddings=131072,
        mlp_bias=False, num_attention_heads=24, num_hidden_layers=32, num_key_value_heads=8,
        original_max_position_embeddings=4096, partial_rotary_factor=0.75, resid_pdrop=0.0, rms_norm_eps=1e-5,
        rope_scaling=dict(type="longrope", short_factor=[1.0] * 48, long_factor=[2.0] * 48), rope_theta=10000.0,
        sliding_window=262144, tie_word_embeddings=True, vocab_size=200064),
    "GLM-4-9B-0414": dict(
        model_type="glm4", attention_bias=True, eos_token_id=[151329, 151336, 151338], head_dim=128,
        hidden_act="silu", hidden_size=4096, intermediate_size=13696, max_position_embeddings=32768,
        num_attention_heads=32, num_hidden_layers=40, num_key_value_heads=2, partial_rotary_factor=0.5,
        rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, vocab_size=151552),
    "OLMo-2-1124-7B": dict(
        model_type="olmo2", attention_bias=False, hidden_act="silu", hidden_size=4096, intermediate_size=11008,
        max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32,
        rms_norm_eps=1e-6, rope_scaling=None, rope_theta=500000, tie_word_embeddings=False, vocab_size=100352),
    "Olmo-3-7B": dict(
        model_type="olmo3", attention_bias=False, hidden_act="silu", hidden_size=4096, intermediate_size=11008,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8, max_position_embeddings=65536,
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32, rms_norm_eps=1e-6,
        rope_scaling=dict(attention_factor=1.2079441541679836, beta_fast=32, beta_slow=1, factor=8.0,
                          original_max_position_embeddings=8192, rope_type="yarn"),
        rope_theta=500000, sliding_window=4096, tie_word_embeddings=False, vocab_size=100278),
    "granite-3.3-8b-instruct": dict(
        model_type="granite", attention_bias=False, attention_multiplier=0.0078125, embedding_multiplier=12.0,
        hidden_act="silu", hidden_size=4096, intermediate_size=12800, logits_scaling=16.0,
        max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32, num_hidden_layers=40,
        num_key_value_heads=8, residual_multiplier=0.22, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000000.0,
        tie_word_embeddings=True, vocab_size=49159),
    "Mixtral-8x7B-Instruct-v0.1": dict(
        model_type="mixtral", attention_dropout=0.0, hidden_act="silu", hidden_size=4096, intermediate_size=14336,
        max_position_embeddings=32768, num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32,
        num_key_value_heads=8, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-5, rope_theta=1e6,
        router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False, vocab_size=32000),
    "Qwen1.5-MoE-A2.7B": dict(
        model_type="qwen2_moe", attention_dropout=0.0, decoder_sparse_step=1, hidden_act="silu", hidden_size=2048,
        intermediate_size=5632, max_position_embeddings=8192, max_window_layers=21, moe_intermediate_size=1408,
        norm_topk_prob=False, num_attention_heads=16, num_experts=60, num_experts_per_tok=4, num_hidden_layers=24,
        num_key_value_heads=16, output_router_logits=False, rms_norm_eps=1e-6, rope_theta=1000000.0,
        router_aux_loss_coef=0.001, shared_expert_intermediate_size=5632, sliding_window=32768,
        tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936),
    "Qwen3-30B-A3B": dict(
        model_type="qwen3_moe", attention_bias=False, attention_dropout=0.0, decoder_sparse_step=1, head_dim=128,
        hidden_act="silu", hidden_size=2048, intermediate_size=6144, max_position_embeddings=40960,
        max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
        num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4,
        output_router_logits=False, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000.0,
        router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False, use_sliding_window=False,
        vocab_size=151936),
    "gpt-oss-20b in bfloat16": dict(
        model_type="gpt_oss", attention_bias=True, eos_token_id=200002, experts_per_token=4, head_dim=64,
        hidden_act="silu", hidden_size=2880, initial_context_length=4096, intermediate_size=2880,
        layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072,
        num_attention_heads=64, num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=8,
        num_local_experts=32, output_router_logits=False, rms_norm_eps=1e-5,
        rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096,
                          rope_type="yarn", truncate=False),
        rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False,
        vocab_size=201088),
    "DeepSeek-V2-Lite": dict(
        model_type="deepseek_v2", attention_bias=False, attention_dropout=0.0, aux_loss_alpha=0.001,
        first_k_dense_replace=1, hidden_act="silu", hidden_size=2048, intermediate_size=10944, kv_lora_rank=512,
        max_position_embeddings=163840, moe_intermediate_size=1408, moe_layer_freq=1, n_group=1, n_routed_experts=64,
        n_shared_experts=2, norm_topk_prob=False, num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27,
        num_key_value_heads=16, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-6,
        rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=0.707, mscale_all_dim=0.707,
                          original_max_position_embeddings=4096, type="yarn"),
        rope_theta=10000, routed_scaling_factor=1.0, scoring_func="softmax", seq_aux=True, tie_word_embeddings=False,
        topk_group=1, topk_method="greedy", v_head_dim=128, vocab_size=102400),
    "DeepSeek-V3 in bfloat16": dict(
        model_type="deepseek_v3", attention_bias=False, attention_dropout=0.0, aux_loss_alpha=0.001, ep_size=1,
        first_k_dense_replace=3, hidden_act="silu", hidden_size=7168, intermediate_size=18432, kv_lora_rank=512,
        max_position_embeddings=163840, moe_intermediate_size=2048, moe_layer_freq=1, n_group=8, n_routed_experts=256,
        n_shared_experts=1, norm_topk_prob=True, num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61,
        num_key_value_heads=128, num_nextn_predict_layers=1, q_lora_rank=1536, qk_nope_head_dim=128,
        qk_rope_head_dim=64, rms_norm_eps=1e-6,
        rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
                          original_max_position_embeddings=4096, type="yarn"),
        rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", seq_aux=True, tie_word_embeddings=False,
        topk_group=4, topk_method="noaux_tc", v_head_dim=128, vocab_size=129280),
    "Llama-4-Scout-17B-16E-Instruct": dict(
        model_type="llama4", boi_token_index=200080, eoi_token_index=200081, image_token_index=200092,
        tie_word_embeddings=False, vision_config=dict(model_type="llama4_vision_model"),
        text_config=dict(
            _attn_implementation_autoset=True, attention_bias=False, attention_chunk_size=8192, attention_dropout=0.0,
            attn_scale=0.1, attn_temperature_tuning=True, bos_token_id=200000, eos_token_id=[200001, 200007, 200008],
            floor_scale=8192, for_llm_compressor=False, head_dim=128, hidden_act="silu", hidden_size=5120,
            interleave_moe_layer_step=1, intermediate_size=8192, intermediate_size_mlp=16384,
            max_position_embeddings=10485760, model_type="llama4_text", no_rope_layers=[], num_attention_heads=40,
            num_experts_per_tok=1, num_hidden_layers=48, num_key_value_heads=8, num_local_experts=16,
            pad_token_id=200018, rms_norm_eps=1e-5, rope_theta=500000.0, use_qk_norm=True, vocab_size=202048,
            rope_scaling=dict(factor=16.0, high_freq_factor=1.0, low_freq_factor=1.0,
                              original_max_position_embeddings=8192, rope_type="llama3"))),
    "Llama-4-Maverick-17B-128E, its text": dict(
        model_type="llama4_text", attention_bias=False, attention_chunk_size=8192, attn_scale=0.1,
        attn_temperature_tuning=4, floor_scale=8192, head_dim=128, hidden_act="silu", hidden_size=5120,
        interleave_moe_layer_step=2, intermediate_size=8192, intermediate_size_mlp=16384,
        layer_types=(["chunked_attention"] * 3 + ["full_attention"]) * 12, max_position_embeddings=1048576,
        moe_layers=list(range(1, 48, 2)), no_rope_layers=[1, 1, 1, 0] * 12, num_attention_heads=40,
        num_experts_per_tok=1, num_hidden_layers=48, num_key_value_heads=8, num_local_experts=128,
        rms_norm_eps=1e-5, rope_scaling=None, rope_theta=500000.0, use_qk_norm=False, vocab_size=202048),
    "Qwen2.5 with YaRN": dict(
        model_type="qwen2", hidden_act="silu", hidden_size=3584, intermediate_size=18944, max_position_embeddings=32768,
        max_window_layers=28, num_attention_heads=28, num_hidden_layers=28, num_key_value_heads=4, rms_norm_eps=1e-6,
        rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=32768), rope_theta=1000000.0,
        sliding_window=131072, tie_word_embeddings=False, use_sliding_window=False, vocab_size=152064),
    "gemma-3-270m": dict(
        _sliding_window_pattern=6, model_type="gemma3_text", attention_bias=False, attn_logit_softcapping=None,
        eos_token_id=1, final_logit_softcapping=None, head_dim=256, hidden_activation="gelu_pytorch_tanh",
        hidden_size=640, intermediate_size=2048, layer_types=(5 * ["sliding_attention"] + ["full_attention"]) * 3,
        max_position_embeddings=32768, num_attention_heads=4, num_hidden_layers=18, num_key_value_heads=1,
        query_pre_attn_scalar=256, rms_norm_eps=1e-6, rope_local_base_freq=10000.0, rope_scaling=None,
        rope_theta=1000000.0, sliding_window=512, use_bidirectional_attention=False, vocab_size=262144),
}  # fmt: skip


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


def test_deepseeks_predictor_is_left_unread_and_nothing_else():
    """V3's layer behind the last; a second one, or one within, is an error."""
    config = read_config(CONFIGS["deepseek-v3"])
    assert may_be_left_over(config) == ("model.layers.3.*",)
    with pytest.raises(UnsupportedModel, match="num_nextn_predict_layers=2"):
        read_config(CONFIGS["deepseek-v3"] | {"num_nextn_predict_layers": 2})
    with pytest.raises(UnsupportedModel, match="does not know: quantization_config"):
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
    layout = kernels.kv_layout(config, num_pages=4)
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
