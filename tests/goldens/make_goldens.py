"""Makes the goldens under this folder with `transformers`: tiny seeded random models, their inputs and f32 logits.

Run once, in an environment with torch (the test suite reads the results and needs none):

    python tests/goldens/make_goldens.py

A golden is a Hugging Face folder (config.json, model.safetensors in f32) plus golden.npz: `tokens_<n>` [T] int32 and
`logits_<n>` [T, V] f32 for each input. Weights are drawn wide, norms around 1 and biases around 0, so that a missing
norm, bias, scale or window moves the logits far beyond any tolerance.
"""

import json
import platform
import shutil
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
}


# Published checkpoints mostly carry the fields of transformers 4; these do too, the others are in 5's style.
# The value is the name of the rope type's field, which changed within 4.
OLD_STYLE_CONFIG = {"llama3-rope": "rope_type", "llama-linear-rope": "type", "qwen2-mixed-window": "rope_type"}


def rewrite_in_old_style(path: Path) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope[OLD_STYLE_CONFIG[path.parent.name]] = rope.pop("rope_type")
    config["rope_scaling"] = rope if "factor" in rope else None
    config.pop("layer_types", None)  # then max_window_layers says which layers slide
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Matrices at twice the usual scale, norm weights in 1 +- 0.3, biases with std 0.3."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.data = 1.0 + 0.3 * noise.clamp(-2, 2)
        elif name.endswith("bias"):
            parameter.data = 0.3 * noise
        elif "embed_tokens" in name:
            parameter.data = 0.5 * noise
        else:
            parameter.data = noise * (2.0 / parameter.shape[-1] ** 0.5)


def make(index: int, name: str) -> None:
    family, fields, lengths = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(**(COMMON | fields))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32).eval()
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
    np.savez_compressed(folder / "golden.npz", **arrays)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size < 300_000, f"{name} takes {size} bytes"
    spread = arrays[f"logits_{lengths[-1]}"].std(axis=-1).mean()
    print(f"{name}: {size / 1024:.0f} KiB, std of logits {spread:.2f}")


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


def check_effects() -> None:
    """Proves that what a golden is about acts on its logits: without it they differ by far more than a tolerance."""
    changes = {
        "mistral-window": dict(sliding_window=None),
        "qwen2-mixed-window": dict(layer_types=["full_attention"] * 4),
        "llama3-rope": dict(rope_parameters=default_rope(10000.0)),
        "llama-linear-rope": dict(rope_parameters=default_rope(10000.0)),
    }
    for name, change in changes.items():
        family = FAMILIES[name][0]
        config = getattr(transformers, f"{family}Config").from_pretrained(HERE / name)
        for key, value in change.items():
            setattr(config, key, value)
        model = getattr(transformers, f"{family}ForCausalLM").from_pretrained(
            HERE / name, config=config, dtype=torch.float32, attn_implementation="eager")
        golden = np.load(HERE / name / "golden.npz")
        with torch.inference_mode():
            logits = model(torch.tensor(golden["tokens_65"][None].astype(np.int64))).logits[0].numpy()
        difference = np.abs(logits - golden["logits_65"]).max()
        assert difference > 0.1, f"{name}: {change} changes the logits by {difference} only"
        print(f"{name}: without it the logits differ by {difference:.2f}")


def main() -> None:
    torch.set_num_threads(1)
    for index, name in enumerate(FAMILIES):
        make(index, name)
    make_sharded("llama-gqa-tied", "llama-sharded")
    for name in (*FAMILIES, "llama-sharded"):
        check_reload(name)
    check_effects()
    versions = {
        "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "numpy": np.__version__,
    }
    (HERE / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
