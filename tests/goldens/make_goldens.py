"""Makes the goldens under this folder with `transformers`: tiny seeded random models, their inputs and f32 logits.

Run once, in an environment with torch (the test suite reads the results and needs none):

    python tests/goldens/make_goldens.py [NAME ...]

With names it makes these only. A golden's seed is its place in FAMILIES: add new ones at the end.

A golden is a Hugging Face folder (config.json, model.safetensors in f32) plus golden.npz: `tokens_<n>` [T] int32 and
`logits_<n>` [T, V] f32 for each input. Weights are drawn wide, norms around 1 and biases around 0, so that a missing
norm, bias, scale or window moves the logits far beyond any tolerance.
"""

import json
import platform
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
VOCAB = 128
LENGTHS = (1, 7, 33)

COMMON = dict(
    vocab_size=VOCAB, hidden_size=40, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=256, attn_implementation="eager", bos_token_id=1, eos_token_id=2,
)
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)


def default_rope(theta: float) -> dict:
    return dict(rope_type="default", rope_theta=theta)


GEMMA = dict(hidden_size=32, intermediate_size=32, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
             rms_norm_eps=1e-6, sliding_window=8, query_pre_attn_scalar=12, hidden_activation="gelu_pytorch_tanh")
YARN_ROPE = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16,
                 beta_fast=4.0, beta_slow=0.5)

# One dense layer, then two with experts.
DEEPSEEK = dict(hidden_size=32, num_attention_heads=8, intermediate_size=24, moe_intermediate_size=8,
                first_k_dense_replace=1, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3,
                kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12, rms_norm_eps=1e-6,
                max_position_embeddings=64, tie_word_embeddings=False)


def longrope(pairs: int) -> dict:
    """Divisors that grow from pair to pair; the long ones are far from the short ones."""
    return dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0 + 0.05 * i for i in range(pairs)],
                long_factor=[1.5 + 0.75 * i for i in range(pairs)])


# name: (config class, config fields, input lengths)
FAMILIES = {
    "llama2-mha": ("Llama", dict(num_key_value_heads=4, head_dim=10, tie_word_embeddings=False, rms_norm_eps=1e-5,
                                 rope_parameters=default_rope(10000.0)), LENGTHS),
    "llama-gqa-tied": ("Llama", dict(num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-6,
                                     rope_parameters=default_rope(10000.0)), LENGTHS),
    "llama-mqa": ("Llama", dict(num_key_value_heads=1, head_dim=10, tie_word_embeddings=False, rms_norm_eps=1e-5,
                                attention_bias=True, mlp_bias=True, rope_parameters=default_rope(10000.0)), LENGTHS),
    "llama3-rope": ("Llama", dict(num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, rms_norm_eps=1e-5,
                                  rope_parameters=LLAMA3_ROPE), (*LENGTHS, 65)),
    "llama-linear-rope": ("Llama", dict(num_key_value_heads=2, head_dim=10, tie_word_embeddings=True,
                                        rms_norm_eps=1e-5,
                                        rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
                          (*LENGTHS, 65)),
    "smollm2": ("Llama", dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=3, head_dim=8,
                              tie_word_embeddings=True, rms_norm_eps=1e-5,
                              rope_parameters=default_rope(100000.0)), LENGTHS),
    "mistral-window": ("Mistral", dict(num_key_value_heads=2, head_dim=16, sliding_window=8, rms_norm_eps=1e-5,
                                       tie_word_embeddings=False, rope_parameters=default_rope(10000.0)),
                       (*LENGTHS, 65)),
    "qwen2-bias": ("Qwen2", dict(num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-6,
                                 use_sliding_window=False, rope_parameters=default_rope(1000000.0)), LENGTHS),
    "qwen2-mixed-window": ("Qwen2", dict(num_key_value_heads=2, num_hidden_layers=4, tie_word_embeddings=False,
                                         rms_norm_eps=1e-6, use_sliding_window=True, sliding_window=8,
                                         max_window_layers=2, rope_parameters=default_rope(1000000.0)),
                           (*LENGTHS, 65)),
    "qwen3-qk-norm": ("Qwen3", dict(num_key_value_heads=2, head_dim=20, tie_word_embeddings=False, rms_norm_eps=1e-6,
                                    use_sliding_window=False, rope_parameters=default_rope(1000000.0)), LENGTHS),
    "llama-dynamic-rope": ("Llama", dict(hidden_size=32, num_key_value_heads=2, head_dim=8, num_hidden_layers=2,
                                         tie_word_embeddings=True, max_position_embeddings=32,
                                         rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)),
                           (7, 65)),
    "qwen3-yarn-rope": ("Qwen3", dict(hidden_size=32, num_key_value_heads=2, head_dim=16, num_hidden_layers=2,
                                      max_position_embeddings=64, tie_word_embeddings=True, use_sliding_window=False,
                                      rope_parameters=YARN_ROPE),
                        (7, 65)),
    # Two periods of local and global, and a local layer that is left.
    "gemma2": ("Gemma2", GEMMA | dict(num_hidden_layers=5, rope_parameters=default_rope(10000.0),
                                      attn_logit_softcapping=5.0, final_logit_softcapping=8.0), (*LENGTHS, 65)),
    # Two periods of two local layers and a global one, and two local layers that are left.
    "gemma3": ("Gemma3Text", GEMMA | dict(num_hidden_layers=8, sliding_window_pattern=3, rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
        sliding_attention=default_rope(10000.0))), (*LENGTHS, 65)),
    "phi3-window": ("Phi3", dict(num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=False, sliding_window=8,
                                 pad_token_id=0, rope_parameters=default_rope(10000.0)), (*LENGTHS, 65)),
    # As Phi-4-mini: three quarters of a head turn, tied. Up to 32 tokens the short factors count.
    "phi3-longrope": ("Phi3", dict(hidden_size=64, num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=True,
                                   num_hidden_layers=2, pad_token_id=0, original_max_position_embeddings=32,
                                   rope_parameters=longrope(6) | dict(partial_rotary_factor=0.75)), (7, 33, 65)),
    "glm": ("Glm", dict(num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, tie_word_embeddings=False,
                        attention_bias=True, pad_token_id=0,
                        rope_parameters=default_rope(10000.0) | dict(partial_rotary_factor=0.5)), LENGTHS),
    "glm4": ("Glm4", dict(num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, tie_word_embeddings=False,
                          attention_bias=True, pad_token_id=0,
                          rope_parameters=default_rope(10000.0) | dict(partial_rotary_factor=0.5)), LENGTHS),
    # Eight kv heads: on eight devices the norm of all of a token's heads crosses devices.
    "olmo2": ("Olmo2", dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=8, rms_norm_eps=1e-6,
                            intermediate_size=40, num_hidden_layers=2, tie_word_embeddings=False, pad_token_id=0,
                            rope_parameters=default_rope(500000.0)), LENGTHS),
    "granite": ("Granite", dict(num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=True,
                                embedding_multiplier=6.0, attention_multiplier=0.2, residual_multiplier=0.4,
                                logits_scaling=3.0, attention_bias=True, mlp_bias=True,
                                rope_parameters=default_rope(10000.0)), LENGTHS),
    # Two periods of three local layers and a global one with YaRN.
    "olmo3": ("Olmo3", dict(hidden_size=32, num_key_value_heads=2, rms_norm_eps=1e-6, intermediate_size=32,
                            num_hidden_layers=8, tie_word_embeddings=False, pad_token_id=0, sliding_window=8,
                            max_position_embeddings=64, rope_parameters=dict(
                                full_attention=YARN_ROPE, sliding_attention=default_rope(10000.0))), (7, 65)),
    "mixtral": ("Mixtral", dict(hidden_size=32, num_key_value_heads=2, intermediate_size=16, rms_norm_eps=1e-5,
                                num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=False,
                                rope_parameters=default_rope(1000000.0)), LENGTHS),
    # The first layer is dense.
    "qwen3-moe": ("Qwen3Moe", dict(hidden_size=32, num_key_value_heads=2, head_dim=16, intermediate_size=40,
                                   moe_intermediate_size=16, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True,
                                   decoder_sparse_step=1, mlp_only_layers=[0], rms_norm_eps=1e-6,
                                   tie_word_embeddings=False, rope_parameters=default_rope(1000000.0)), LENGTHS),
    # Every other layer is dense; six experts are not divided by eight devices.
    "qwen2-moe": ("Qwen2Moe", dict(hidden_size=32, num_key_value_heads=2, num_hidden_layers=4, intermediate_size=24,
                                   moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=6,
                                   num_experts_per_tok=2, norm_topk_prob=False, decoder_sparse_step=2,
                                   rms_norm_eps=1e-6, tie_word_embeddings=False,
                                   rope_parameters=default_rope(1000000.0)), LENGTHS),
    # Two periods of a layer with a window and one without; the limit cuts many of the gated values.
    "gpt-oss": ("GptOss", dict(hidden_size=32, num_key_value_heads=2, head_dim=8, num_hidden_layers=4,
                               intermediate_size=12, num_local_experts=8, num_experts_per_tok=2, sliding_window=8,
                               swiglu_limit=1.5, rms_norm_eps=1e-5, tie_word_embeddings=False, attention_bias=True,
                               max_position_embeddings=64, pad_token_id=0,
                               rope_parameters=YARN_ROPE | dict(truncate=False)), (7, 65)),
    "deepseek-v2": ("DeepseekV2", DEEPSEEK | dict(q_lora_rank=24, topk_method="group_limited_greedy", n_group=4,
                                                  topk_group=2, routed_scaling_factor=4.0,
                                                  rope_parameters=YARN_ROPE | dict(mscale=1.3, mscale_all_dim=0.7)),
                    (7, 65)),
    "deepseek-v2-lite": ("DeepseekV2", DEEPSEEK | dict(q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1,
                                                       routed_scaling_factor=1.0, num_attention_heads=4,
                                                       rope_parameters=default_rope(10000.0)), LENGTHS),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK | dict(q_lora_rank=24, n_group=4, topk_group=2, routed_scaling_factor=2.5,
                                                  norm_topk_prob=True, num_mtp_layers=0, num_key_value_heads=8,
                                                  rope_parameters=YARN_ROPE | dict(mscale=1.0, mscale_all_dim=1.0)),
                    (7, 65)),
    # Two periods of a dense layer in chunks and one with experts, no RoPE and attention that grows every 4 tokens.
    "llama4": ("Llama4Text", dict(hidden_size=32, num_key_value_heads=2, head_dim=8, num_hidden_layers=4,
                                  intermediate_size=16, intermediate_size_mlp=24, num_local_experts=8,
                                  num_experts_per_tok=1, interleave_moe_layer_step=2, no_rope_layer_interval=2,
                                  attention_chunk_size=16, floor_scale=4, attn_scale=0.3, rms_norm_eps=1e-5,
                                  rope_parameters=LLAMA3_ROPE), (7, 33, 70)),
}


# Prompts whose greedy continuation a golden also holds, of the families that came after the engine's own golden.
GREEDY = dict.fromkeys(("gemma2", "gemma3", "phi3-window", "glm", "glm4", "olmo2", "olmo3", "granite",
                        "qwen3-yarn-rope", "mixtral", "qwen3-moe", "qwen2-moe", "gpt-oss", "deepseek-v2",
                        "deepseek-v2-lite", "deepseek-v3", "llama4"),
                       (5, 20, 40)) | {"phi3-longrope": (34, 40, 60)}  # fmt: skip
NEW_TOKENS = 16


# Published checkpoints mostly carry the fields of transformers 4; these do too, the others are in 5's style.
# The value is the name of the rope type's field, which changed within 4.
OLD_STYLE_CONFIG = {"llama3-rope": "rope_type", "llama-linear-rope": "type", "qwen2-mixed-window": "rope_type",
                    "llama-dynamic-rope": "type", "qwen3-yarn-rope": "type", "gemma2": "rope_type",
                    "gemma3": "rope_type", "phi3-longrope": "type", "glm4": "rope_type", "olmo2": "rope_type",
                    "granite": "rope_type", "mixtral": "rope_type", "qwen2-moe": "rope_type",
                    "deepseek-v2": "type", "deepseek-v3": "type", "llama4": "rope_type"}  # fmt: skip


def rewrite_in_old_style(path: Path) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:  # Gemma 3
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if "original_max_position_embeddings" in config:  # Phi-3: transformers puts it in both places
        rope.pop("original_max_position_embeddings")
    rope[OLD_STYLE_CONFIG[path.parent.name]] = rope.pop("rope_type")
    config["rope_scaling"] = rope if len(rope) > 1 else None
    config.pop("layer_types", None)  # then other fields say which layers slide
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Matrices mostly at twice the usual scale, norm factors in 1 +- 0.6, biases with std 0.3."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            center = 0.0 if type(model).__name__.startswith("Gemma") else 1.0  # Gemma multiplies by 1 + weight
            parameter.data = center + 0.3 * noise.clamp(-2, 2)
        elif name.endswith("bias"):
            parameter.data = 0.3 * noise
        elif "embed_tokens" in name:
            parameter.data = 0.5 * noise
        elif type(model).__name__.startswith(("GptOss", "Llama4")):  # wider ones sharpen errors with each layer
            inputs = parameter.shape[-2 if ".experts." in name else -1]
            parameter.data = noise * (1.0 / inputs**0.5)
        else:
            parameter.data = noise * (2.0 / parameter.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # of DeepSeek-V3's router
            buffer.data = 0.3 * torch.randn(buffer.shape, generator=generator)


def make(index: int, name: str) -> None:
    family, fields, lengths = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(**(COMMON | fields))
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).to(torch.float32).eval()
    randomize(model, torch.Generator().manual_seed(1000 + index))
    model.tie_weights()
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name in OLD_STYLE_CONFIG:
        rewrite_in_old_style(folder / "config.json")

    rng = np.random.default_rng(index)
    arrays: dict[str, np.ndarray] = {}
    for length in lengths:
        tokens = rng.integers(3, VOCAB, size=length, dtype=np.int32)
        with torch.inference_mode():
            logits = model(torch.tensor(tokens[None].astype(np.int64)), use_cache=False).logits[0]
        arrays[f"tokens_{length}"] = tokens
        arrays[f"logits_{length}"] = logits.float().numpy()
    for number, length in enumerate(GREEDY.get(name, ())):
        arrays[f"prompt_{number}"], arrays[f"greedy_{number}"] = greedy(model, rng, length)
    np.savez_compressed(folder / "golden.npz", **arrays)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size < 300_000, f"{name} takes {size} bytes"
    spread = arrays[f"logits_{lengths[-1]}"].std(axis=-1).mean()
    print(f"{name}: {size / 1024:.0f} KiB, std of logits {spread:.2f}")


def greedy(model: torch.nn.Module, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A prompt and what follows, without a cache: each token from all before it. Never are two tokens nearly equal."""
    narrowest = 0.0
    while narrowest < 2e-3:
        prompt, narrowest = rng.integers(3, VOCAB, size=length), np.inf
        tokens = prompt
        for _ in range(NEW_TOKENS):
            with torch.inference_mode():
                logits = model(torch.tensor(tokens[None]), use_cache=False).logits[0, -1]
            first, second = logits.topk(2).values.tolist()
            narrowest = min(narrowest, first - second)
            tokens = np.append(tokens, logits.argmax().item())
    return prompt.astype(np.int32), tokens[length:].astype(np.int32)


def make_sharded(source: str, name: str) -> None:
    """The same model as `source` in two files with an index."""
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    state = load_file(HERE / source / "model.safetensors")
    folder.mkdir()
    shutil.copy(HERE / source / "config.json", folder)
    shutil.copy(HERE / source / "golden.npz", folder)
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for part, keys in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-{part:05d}-of-00002.safetensors"
        save_file({key: state[key] for key in keys}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(keys, file)
    total = sum(value.numel() * value.element_size() for value in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def check_reload(name: str) -> None:
    """The saved folder, read back by transformers, gives the saved logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32,
                                                              attn_implementation="eager")
    golden = np.load(HERE / name / "golden.npz")
    for key in golden.files:
        if key.startswith("tokens_"):
            with torch.inference_mode():
                logits = model(torch.tensor(golden[key][None].astype(np.int64))).logits[0].numpy()
            np.testing.assert_allclose(logits, golden[key.replace("tokens", "logits")], atol=1e-5)


# Of a config: what a golden is about, taken away.
EFFECTS = {
    "mistral-window": dict(sliding_window=None),
    "qwen2-mixed-window": dict(layer_types=["full_attention"] * 4),
    "llama3-rope": dict(rope_parameters=default_rope(10000.0)),
    "llama-linear-rope": dict(rope_parameters=default_rope(10000.0)),
    "llama-dynamic-rope": dict(rope_parameters=default_rope(10000.0)),
    "qwen3-yarn-rope": dict(rope_parameters=default_rope(10000.0)),
    "gemma2 attention cap": dict(attn_logit_softcapping=None),
    "gemma2 logit cap": dict(final_logit_softcapping=None),
    "gemma2 window": dict(layer_types=["full_attention"] * 5),
    "gemma2 scale": dict(query_pre_attn_scalar=8),
    "gemma3 window": dict(layer_types=["full_attention"] * 8),
    "gemma3 local rope": dict(rope_parameters=dict.fromkeys(
        ("full_attention", "sliding_attention"), dict(rope_type="linear", rope_theta=1000000.0, factor=8.0))),
    "phi3-window": dict(sliding_window=None),
    "phi3-longrope": dict(original_max_position_embeddings=128),  # the short factors, and another magnitude
    "glm4 partial": dict(rope_parameters=default_rope(10000.0) | dict(partial_rotary_factor=1.0)),
    "olmo3 window": dict(layer_types=["full_attention"] * 8),
    "olmo3 global rope": dict(rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"),
                                                            default_rope(10000.0))),
    "granite embedding": dict(embedding_multiplier=1.0),
    "granite attention": dict(attention_multiplier=10**-0.5),
    "granite residual": dict(residual_multiplier=1.0),
    "granite logits": dict(logits_scaling=1.0),
    "qwen3-moe weights": dict(norm_topk_prob=False),
    "qwen2-moe weights": dict(norm_topk_prob=True),
    "gpt-oss window": dict(layer_types=["full_attention"] * 4),
    "gpt-oss limit": dict(swiglu_limit=7.0),
    "deepseek-v2 groups": dict(topk_method="greedy"),
    "deepseek-v2 scale": dict(routed_scaling_factor=1.0),
    "deepseek-v2 yarn": dict(rope_parameters=YARN_ROPE | dict(mscale=1.3, mscale_all_dim=1.3)),
    "deepseek-v3 groups": dict(topk_group=4),
    "deepseek-v3 rope": dict(rope_interleave=False),
    "deepseek-v3 scale": dict(routed_scaling_factor=1.0),
    "llama4 chunks": dict(layer_types=["full_attention"] * 4),
    "llama4 without RoPE": dict(no_rope_layers=[1] * 4),
    "llama4 temperature": dict(attn_temperature_tuning=False),
    "llama4 norm": dict(use_qk_norm=False),
}


def check_effects() -> None:
    """Proves that what a golden is about acts on its logits: without it they differ by far more than a tolerance."""
    for effect, change in EFFECTS.items():
        name = effect.split()[0]
        golden = np.load(HERE / name / "golden.npz")
        length = max(FAMILIES[name][2])
        family = FAMILIES[name][0]
        config = getattr(transformers, f"{family}Config").from_pretrained(HERE / name)
        for key, value in change.items():
            setattr(config, key, value)
        model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM").from_pretrained(
            HERE / name, config=config, dtype=torch.float32, attn_implementation="eager")
        with torch.inference_mode():
            logits = model(torch.tensor(golden[f"tokens_{length}"][None].astype(np.int64))).logits[0].numpy()
        difference = np.abs(logits - golden[f"logits_{length}"]).max()
        assert difference > 0.1, f"{effect}: {change} changes the logits by {difference} only"
        print(f"{effect}: without it the logits differ by {difference:.2f}")


def main() -> None:
    torch.set_num_threads(1)
    names = sys.argv[1:] or [*FAMILIES, "llama-sharded"]
    for index, name in enumerate(FAMILIES):
        if name in names:
            make(index, name)
    if "llama-sharded" in names:
        make_sharded("llama-gqa-tied", "llama-sharded")
    for name in names:
        check_reload(name)
    check_effects()
    versions = {
        "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "numpy": np.__version__,
    }
    (HERE / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
