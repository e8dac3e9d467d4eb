"""GGUF metadata as the dictionary a Hugging Face `config.json` holds."""

import math
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from quant.gguf import decode
from quant.gguf_file import GGUFFile

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # GGUF architecture -> model_type
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
                 "qwen3": "Qwen3ForCausalLM"}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's frequency divisors, [H/2]


def check_architecture(metadata: dict[str, Any], location: str) -> str:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in MODEL_TYPES:
        raise CheckpointError(
            f"{location}: architecture {architecture!r} is not supported (supported in GGUF: {', '.join(MODEL_TYPES)})"
        )
    return architecture


def read_count(metadata: dict[str, Any], key: str, location: str, default: int | None = None) -> int:
    """A number of things. Raises CheckpointError if the key is missing, not a number (some models have one for each
    layer) or below 1."""
    value = metadata.get(key, default)
    if value is None:
        raise CheckpointError(f"{location}: the metadata has no {key}; convert the model again")
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{location}: {key} is {value!r}, only one whole number above 0 is supported")
    return value


def hf_config(file: GGUFFile, location: str) -> dict[str, Any]:
    """Raises CheckpointError naming a missing key or a setting that has no equivalent."""
    metadata = file.metadata
    architecture = check_architecture(metadata, location)

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise CheckpointError(f"{location}: the metadata has no {architecture}.{key}; convert the model again")
        return _short(value)

    def has(key: str) -> bool:
        return f"{architecture}.{key}" in metadata

    def count(key: str, default: int | None = None) -> int:
        return read_count(metadata, f"{architecture}.{key}", location, default)

    hidden, heads = count("embedding_length"), count("attention.head_count")
    config: dict[str, Any] = {
        "model_type": MODEL_TYPES[architecture],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "vocab_size": file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    head_dim = config["head_dim"] = count("attention.key_length", hidden // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{location}: rope.dimension_count is {get('rope.dimension_count')}, only the head size "
                              f"{head_dim} is supported")  # fmt: skip
    if architecture == "llama":
        config["attention_bias"] = any(name.endswith("attn_q.bias") for name in file.tensors)
    if experts := get("expert_count", 0):  # Mixtral is a llama with experts here
        raise CheckpointError(f"{location}: {architecture}.expert_count is {experts}, mixtures of experts are not "
                              "supported in GGUF; use the model's safetensors")  # fmt: skip
    if has("attention.sliding_window") and architecture == "llama":  # Mistral is a llama with a window here
        config |= {"model_type": "mistral", "sliding_window": get("attention.sliding_window")}
    scaling = _rope_scaling(file, location, get, has, config, head_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    for key in ("bos", "eos"):
        if f"tokenizer.ggml.{key}_token_id" in metadata:
            config[f"{key}_token_id"] = metadata[f"tokenizer.ggml.{key}_token_id"]
    config["architectures"] = [ARCHITECTURES[config["model_type"]]]
    return config


def _short(value: Any) -> Any:
    """Metadata floats are float32: 1e-5 comes back as 9.99999974e-06. Give the shortest number that means the same."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope_scaling(file: GGUFFile, location: str, get: Any, has: Any, config: dict, head_dim: int) -> dict | None:
    if ROPE_FACTORS in file.tensors:
        try:
            stored = decode(file.rows(ROPE_FACTORS), file.tensors[ROPE_FACTORS].type_id)
        except ValueError as error:
            raise CheckpointError(f"{location}: {ROPE_FACTORS}: {error}; convert the model again") from error
        return llama3_rule(stored, config["rope_theta"], head_dim, location)
    factor = next((key for key in ("rope.scaling.factor", "rope.scale_linear") if has(key)), None)  # the old name last
    kind = get("rope.scaling.type", "none" if factor is None else "linear")  # without a type llama.cpp takes linear
    if kind == "none":
        return None
    if kind != "linear":
        raise CheckpointError(f"{location}: rope scaling {kind!r} is not supported (supported: none, linear)")
    return {"rope_type": kind, "factor": get(factor or "rope.scaling.factor")}


def llama3_rule(divisors: np.ndarray, theta: float, head_dim: int, location: str) -> dict:
    """Llama 3.1's scaling rule from the table it makes: a GGUF stores what each RoPE frequency is divided by, [H/2],
    not the rule. The factor is the largest divisor; the original context follows from a divisor between 1 and the
    factor, given the rule's other two constants, which all published models share. Raises CheckpointError if the rule
    found does not give the table again."""
    factor = float(divisors.max())
    rule = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    blend = (1 / divisors - 1 / factor) / (1 - 1 / factor) if factor > 1 else np.zeros_like(divisors)
    between = (blend > 1e-3) & (blend < 1 - 1e-3)
    if divisors.shape == (head_dim // 2,) and between.any():
        turns = rule["low_freq_factor"] + blend * (rule["high_freq_factor"] - rule["low_freq_factor"])
        original = np.median((turns * _wavelengths(theta, head_dim))[between])
        rule["original_max_position_embeddings"] = round(float(original))
    expected = llama3_divisors(rule, theta, head_dim)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise CheckpointError(
            f"{location}: {ROPE_FACTORS} does not follow Llama 3.1's scaling rule; use the model's safetensors"
        )
    return rule


def llama3_divisors(rule: dict, theta: float, head_dim: int) -> np.ndarray:
    """The table, [H/2]: 1 for short wavelengths, the factor for long ones, a blend between them.
    Source: transformers `modeling_rope_utils.py`, `_compute_llama3_parameters`."""
    turns = rule["original_max_position_embeddings"] / _wavelengths(theta, head_dim)
    low, high, factor = rule["low_freq_factor"], rule["high_freq_factor"], rule["factor"]
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - blend) / factor + blend)


def _wavelengths(theta: float, head_dim: int) -> np.ndarray:
    """Positions in a full turn of each frequency, [H/2]."""
    return 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
