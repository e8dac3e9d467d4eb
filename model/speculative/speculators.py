"""Configs as `speculators` (vllm-project) writes them: the drafter's layers in `transformer_layer_config`, and beside
it what kind of drafter it is and how it was trained."""

from collections.abc import Mapping
from typing import Any

_OF_TRAINING = ("architectures", "auto_map", "base_model_ep_plan", "dtype", "embed_requires_grad", "enable_sp_ulysses",
                "has_no_defaults_at_init", "model_type", "speculators_config", "speculators_model_type",
                "speculators_version", "tie_word_embeddings", "torch_dtype", "transformers_version")  # fmt: skip
# It leaves out of the layers' config what is as in the defaults of transformers.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                  num_attention_heads=32),
    "qwen3": dict(vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32,
                  num_attention_heads=32, num_key_value_heads=32, head_dim=128),
}  # fmt: skip


def from_speculators(hf: Mapping[str, Any], kind: str, *, usual: str) -> Mapping[str, Any]:
    """The same as one plain config, or another config as it is. kind: of drafter. usual: model type of layers that do
    not say one. Raises ValueError."""
    if (found := hf.get("speculators_model_type", kind)) != kind:
        raise ValueError(f"speculators_model_type={found!r} is not supported here, only {kind!r}")
    layers = hf.get("transformer_layer_config")
    if layers is None:
        return hf
    model_type = layers.get("model_type", usual)
    beside = {key: hf[key] for key in hf if key not in (*_OF_TRAINING, "transformer_layer_config")}
    return {"model_type": model_type, **_DEFAULTS.get(model_type, {}), **layers, **beside}
