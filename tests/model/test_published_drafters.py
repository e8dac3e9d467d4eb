"""Configs of published drafters, with the keys that their authors' tools write, and what they mean."""

from typing import Any

import pytest

from model.config import QKV, ModelConfig
from model.families.registry import read_config
from model.speculative.dflash import read_dflash_config
from model.speculative.eagle_checkpoint import read_eagle1, read_eagle3
from model.speculative.medusa import MedusaConfig, read_medusa_config

CONTEXT = 4096


def target(layers: int, hidden: int, vocab: int) -> ModelConfig:
    """What drafters must know of it."""
    return read_config(dict(model_type="llama", hidden_size=hidden, intermediate_size=64, num_attention_heads=32,
                            num_hidden_layers=layers, vocab_size=vocab))  # fmt: skip


LLAMA_8B = target(32, 4096, 128256)
LLAMA3_ROPE = dict(factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
                   rope_type="llama3")  # fmt: skip


def by_speculators(layer: dict[str, Any], **more: Any) -> dict[str, Any]:
    """It takes `model_type` out of what it writes."""
    method = dict(accept_tolerance=0.0, proposal_type="greedy", speculative_tokens=3, verifier_accept_k=1)
    verifier = dict(architectures=["LlamaForCausalLM"], name_or_path="the/target")
    return dict(
        architectures=["Eagle3DraftModel"], auto_map={"": "config.Eagle3SpeculatorConfig"}, draft_vocab_size=32000,
        speculators_config=dict(algorithm="eagle3", default_proposal_method="greedy", proposal_methods=[method],
                                verifier=verifier),
        speculators_model_type="eagle3",
        transformer_layer_config=dict(
            attention_bias=False, attention_dropout=0.0, head_dim=128, hidden_act="silu", initializer_range=0.02,
            intermediate_size=14336, mlp_bias=False, model_type="llama", num_attention_heads=32, num_hidden_layers=1,
            num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-5, use_cache=True, **layer),
        **more)  # fmt: skip


# name -> (the target, the config, layers whose inputs are read, what more is normed)
EAGLE3: dict[str, tuple[ModelConfig, dict[str, Any], tuple[int, ...], set[str]]] = {
    "speculators 0.1: converted for Llama 3.1 8B": (
        LLAMA_8B,
        by_speculators(
            dict(hidden_size=4096, max_position_embeddings=131072, rope_scaling=LLAMA3_ROPE, rope_theta=500000.0,
                 torch_dtype="float16", vocab_size=128256),
            has_no_defaults_at_init=False, norm_before_residual=False, speculators_version="0.1.0.dev21",
            torch_dtype="float32"),
        (2, 16, 29), set()),
    "speculators 0.4: RedHatAI's for Gemma 4 31B": (
        target(60, 5376, 262144),
        by_speculators(
            dict(hidden_size=5376, max_position_embeddings=262144, tie_word_embeddings=False, vocab_size=262144,
                 rope_parameters=dict(rope_theta=10000.0, rope_type="default")),
            base_model_ep_plan=None, dtype="bfloat16", eagle_aux_hidden_state_layer_ids=[2, 30, 57],
            embed_requires_grad=False, has_no_defaults_at_init=False, norm_before_fc=False, norm_before_residual=True,
            target_hidden_size=None, tie_word_embeddings=False, transformers_version="5.0.0",
            speculators_version="0.4.0.1"),
        (2, 30, 57), {"residual"}),
    "EAGLE-3.1": (
        target(60, 6144, 200064),
        dict(
            architectures=["LlamaForCausalLMEagle3"], attention_bias=False, draft_vocab_size=32000, fc_norm=True,
            head_dim=128, hidden_act="silu", hidden_size=6144, intermediate_size=12288, max_position_embeddings=196608,
            model_type="llama", norm_output=True, num_attention_heads=48, num_hidden_layers=1, num_key_value_heads=8,
            rms_norm_eps=1e-6, rope_theta=5000000, tie_word_embeddings=False, torch_dtype="bfloat16",
            vocab_size=200064),
        (2, 30, 57), {"taps", "output"}),
    "speculators 0.8: four layers": (
        target(94, 4096, 151936),
        by_speculators(
            dict(hidden_size=4096, layer_types=["full_attention"], max_position_embeddings=262144, pad_token_id=None,
                 rope_parameters=dict(rope_theta=5000000.0, rope_type="default"), sliding_window=2048,
                 use_sliding_window=False, vocab_size=151936),
            dtype="bfloat16", eagle_aux_hidden_state_layer_ids=[2, 46, 91, 93], embed_requires_grad=False,
            fc_norm=False, norm_before_fc=True, norm_before_residual=True, norm_output=True,
            speculators_version="0.8.0.dev0", target_hidden_size=None, tie_word_embeddings=False),
        (2, 46, 91, 93), {"features", "residual", "output"}),
    "nvidia, for Llama 3.3 70B": (
        target(80, 8192, 128256),
        dict(
            architectures=["LlamaForCausalLMEagle3"], attention_bias=False, attention_dropout=0.0, bos_token_id=128000,
            draft_vocab_size=32000, eos_token_id=[128001, 128008, 128009], head_dim=128, hidden_act="silu",
            hidden_size=8192, initializer_range=0.02, intermediate_size=28672, max_position_embeddings=131072,
            mlp_bias=False, model_type="llama", num_attention_heads=64, num_hidden_layers=1, num_key_value_heads=8,
            pad_token_id=None, pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=LLAMA3_ROPE, rope_theta=500000.0,
            tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.54.1", use_cache=True,
            vocab_size=128256,
            eagle_config=dict(eagle_aux_hidden_state_layer_ids=[1, 39, 76], next_layer_regular=True,
                              norm_before_fc=False, parallel_draft_heads_num_layers=1, parallel_draft_step=1,
                              use_aux_hidden_state=True, use_input_layernorm_in_first_layer=True,
                              use_last_layernorm=True, use_mtp_layernorm=False)),
        (2, 40, 77), set()),
    "nebius/EAGLE3-gpt-oss-20b": (
        target(24, 2880, 201088),
        dict(
            architectures=["LlamaForCausalLM"], draft_vocab_size=64000, head_dim=64, hidden_act="silu",
            hidden_size=2880, intermediate_size=11520, max_position_embeddings=131072, model_type="llama",
            num_attention_heads=64, num_hidden_layers=1, num_key_value_heads=8, rms_norm_eps=1e-5,
            rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096,
                              rope_type="yarn", truncate=False),
            rope_theta=150000, truncated_vocab_size=64000, vocab_size=201088),
        (2, 12, 21), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3(name: str):
    of_target, published, taps, norms = EAGLE3[name]
    config = read_eagle3(published, of_target, CONTEXT)
    assert (config.taps, config.norms) == (taps, norms)
    assert config.draft_vocab == published["draft_vocab_size"]
    assert config.model.layers[0].window is None


def test_another_vocabulary_of_eagle3_is_refused():
    of_target, published, *_ = EAGLE3["nebius/EAGLE3-gpt-oss-20b"]
    with pytest.raises(ValueError, match="truncated_vocab_size=32000 of an EAGLE-3 head must be its draft_vocab_size"):
        read_eagle3(published | {"truncated_vocab_size": 32000}, of_target, CONTEXT)


def test_windows_of_a_head():
    """As vLLM reads them: `layer_types` says, and nothing else that would not be refused."""
    of_target, published, *_ = EAGLE3["speculators 0.8: four layers"]

    def window(model_type: str, **more: Any) -> int | None:
        layer = published["transformer_layer_config"] | {"model_type": model_type, **more}
        if model_type != "llama":
            del layer["mlp_bias"], layer["pretraining_tp"]
        return read_eagle3(published | {"transformer_layer_config": layer}, of_target, CONTEXT).model.layers[0].window

    sliding = dict(layer_types=["sliding_attention"], use_sliding_window=True)
    assert window("llama", **sliding) == window("qwen3", **sliding | {"max_window_layers": 0}) == 2048
    assert window("llama", use_sliding_window=True) is None
    for unclear in ({"layer_types": ["chunked_attention"]}, {"layer_types": None, "use_sliding_window": True},
                    sliding | {"sliding_window": None}):  # fmt: skip
        with pytest.raises(ValueError, match="sliding_window"):
            window("llama", **unclear)


EAGLE_LLAMA3 = dict(
    architectures=["LlamaForCausalLM"], bias=False, bos_token_id=128000, eos_token_id=128001, hidden_act="silu",
    hidden_size=4096, initializer_range=0.02, intermediate_size=14336, max_position_embeddings=2048,
    model_type="llama", num_attention_heads=32, num_hidden_layers=1, num_key_value_heads=8, pad_token_id=0,
    rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False, torch_dtype="float16",
    transformers_version="4.28.1", use_cache=True, vocab_size=128256)  # fmt: skip


# name -> (the target, the config, projections with biases)
EAGLE1: dict[str, tuple[ModelConfig, dict[str, Any], frozenset[Any]]] = {
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": (LLAMA_8B, EAGLE_LLAMA3, frozenset()),
    "the same, made anew for vLLM": (
        LLAMA_8B, dict(model_type="eagle", model=EAGLE_LLAMA3 | dict(eagle_fc_bias=True)), frozenset()),
    "for a Qwen2": (
        target(28, 3584, 152064),
        EAGLE_LLAMA3 | dict(bias=True, hidden_size=3584, intermediate_size=18944, num_attention_heads=28,
                            num_key_value_heads=4, qkv_bias=True, rope_theta=1e6, vocab_size=152064), QKV),
}  # fmt: skip


@pytest.mark.parametrize("name", EAGLE1)
def test_eagle1(name: str):
    of_target, published, biases = EAGLE1[name]
    model = read_eagle1(published, of_target, CONTEXT)
    assert (model.num_layers, model.family, model.biases) == (1, "llama", biases)


# name -> (heads, its config): all are for models of 4096 numbers and 32000 tokens, with a matrix for each head
MEDUSA: dict[str, tuple[int, dict[str, Any]]] = {
    "FasterDecoding/medusa-vicuna-7b-v1.3: five heads": (
        5, dict(base_model_name_or_path="lmsys/vicuna-7b-v1.3", medusa_num_heads=2, medusa_num_layers=1,
                transformers_version="4.31.0")),
    "made anew for vLLM": (
        3, dict(architectures=["MedusaModel"], dtype="bfloat16", hidden_size=4096, medusa_fc_bias=True,
                model_type="medusa", num_heads=3, num_hidden_layers=1, original_lm_head=False,
                truncated_vocab_size=32000, vocab_size=32000)),
}  # fmt: skip


@pytest.mark.parametrize("name", MEDUSA)
def test_medusa(name: str):
    heads, published = MEDUSA[name]
    of_head = "blocks.{0}.layers.0.weight blocks.{0}.layers.0.bias lm_heads.{0}.weight"
    if "model_type" not in published:
        of_head = "{0}.0.linear.weight {0}.0.linear.bias {0}.1.weight"
    names = [name for head in range(heads) for name in of_head.format(head).split()]
    found = read_medusa_config(published, target(32, 4096, 32000), names)
    assert found == MedusaConfig(num_heads=heads, num_blocks=1, has_bias=True, output="own")


DFLASH = {
    "z-lab/Qwen3-4B-DFlash-b16": dict(
        architectures=["DFlashDraftModel"], attention_bias=False, attention_dropout=0.0,
        auto_map=dict(AutoModel="dflash.DFlashDraftModel"), block_size=16, bos_token_id=151643,
        dflash_config=dict(mask_token_id=151669, target_layer_ids=[1, 9, 17, 25, 33]), dtype="bfloat16",
        eos_token_id=151645, head_dim=128, hidden_act="silu", hidden_size=2560, initializer_range=0.02,
        intermediate_size=9728, layer_types=["full_attention"] * 5, max_position_embeddings=40960, max_window_layers=5,
        model_type="qwen3", num_attention_heads=32, num_hidden_layers=5, num_key_value_heads=8, num_target_layers=36,
        rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000, sliding_window=None, tie_word_embeddings=True,
        transformers_version="4.57.1", use_cache=True, use_sliding_window=False, vocab_size=151936),
}  # fmt: skip


@pytest.mark.parametrize("name", DFLASH)
def test_dflash(name: str):
    config = read_dflash_config(DFLASH[name], target(36, 2560, 151936))
    assert (config.block_size, config.mask_token_id, config.causal) == (16, 151669, (False,) * 5)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
