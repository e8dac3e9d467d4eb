"""Reading Hugging Face configs and naming checkpoint tensors, shared by the Llama-like families."""

from collections.abc import Mapping
from typing import Any

from checkpoints.tensors import ParamSource
from model.config import ModelConfig, RopeConfig

Path = tuple[str, ...]

# Keys of a Hugging Face config that do not change what an inference run computes.
_NEUTRAL = frozenset(
    """
    _name_or_path architectures attention_dropout auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id
    id2label initializer_range is_encoder_decoder is_llama_config label2id model_type output_attentions
    output_hidden_states pad_token_id pretraining_tp problem_type return_dict rope_interleaved tokenizer_class
    torch_dtype transformers.js_config transformers_version unsloth_fixed unsloth_version use_cache
    """.split()
)


_MAX_LAYERS = 10_000  # more is a damaged file


class UnsupportedModel(ValueError):
    """The config asks for something this project does not implement; the message names the key and value."""


class ConfigReader:
    """Takes keys out of a Hugging Face config and insists, at the end, that none was left unread."""

    def __init__(self, hf: Mapping[str, Any]):
        self._hf = hf
        self._taken: set[str] = set(_NEUTRAL)

    def take(self, key: str, default: Any = None) -> Any:
        self._taken.add(key)
        value = self._hf.get(key)
        return default if value is None else value

    def require(self, key: str) -> Any:
        value = self.take(key)
        if value is None:
            raise UnsupportedModel(f"config.json has no {key!r}")
        return value

    def insist(self, key: str, *allowed: Any) -> None:
        """The key, where present, must have one of these values."""
        value = self.take(key, allowed[0])
        if value not in allowed:
            choices = " or ".join(map(repr, allowed))
            raise UnsupportedModel(f"config.json: {key}={value!r} is not supported, only {choices}")

    def num_layers(self) -> int:
        count = int(self.require("num_hidden_layers"))
        if not 1 <= count <= _MAX_LAYERS:
            raise UnsupportedModel(f"config.json: num_hidden_layers={count} must be in 1 to {_MAX_LAYERS}")
        return count

    def rope(self) -> RopeConfig:
        """`rope_theta` and `rope_scaling`, or the newer `rope_parameters` that holds both."""
        scaling = dict(self.take("rope_scaling", {}))
        parameters = dict(self.take("rope_parameters", {}))
        theta = float(self.take("rope_theta", parameters.pop("rope_theta", 10_000.0)))
        scaling = scaling or parameters
        scaling.pop("rope_theta", None)
        kind = scaling.pop("rope_type", scaling.pop("type", "default"))
        scaling.pop("type", None)
        fields = {"default": (), "linear": ("factor",),
                  "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
        if kind not in fields:
            raise UnsupportedModel(f"config.json: rope scaling {kind!r} is not supported, only {', '.join(fields)}")
        values = {}
        for name in fields[kind]:
            if name not in scaling:
                raise UnsupportedModel(f"config.json: rope scaling {kind!r} needs {name!r}")
            values[name.removesuffix("_embeddings")] = value = scaling.pop(name)
            if not isinstance(value, int | float):
                raise UnsupportedModel(f"config.json: {name}={value!r} of rope scaling {kind!r} must be a number")
        if scaling:
            raise UnsupportedModel(f"config.json: unknown rope scaling keys {sorted(scaling)} for kind {kind!r}")
        return RopeConfig(theta=theta, kind=kind, **values)

    def finish(self) -> None:
        unread = sorted(set(self._hf) - self._taken)
        if unread:
            raise UnsupportedModel(f"config.json has keys that this model family does not know: {', '.join(unread)}")


def base_fields(reader: ConfigReader) -> dict[str, Any]:
    """The fields that all Llama-like configs share, all but `layers`."""
    reader.insist("hidden_act", "silu")
    hidden, heads = int(reader.require("hidden_size")), int(reader.require("num_attention_heads"))
    eos = reader.take("eos_token_id", ())
    return dict(
        vocab_size=int(reader.require("vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(reader.require("intermediate_size")),
        num_heads=heads,
        num_kv_heads=int(reader.take("num_key_value_heads", heads)),
        head_dim=int(reader.take("head_dim", hidden // heads)),
        max_position=int(reader.take("max_position_embeddings", 2048)),
        norm_eps=float(reader.take("rms_norm_eps", 1e-6)),
        rope=reader.rope(),
        tie_embeddings=bool(reader.take("tie_word_embeddings", False)),
        bos_id=reader.take("bos_token_id"),
        eos_ids=tuple(map(int, eos)) if isinstance(eos, list | tuple) else (int(eos),),
    )


def param_sources(config: ModelConfig) -> dict[Path, ParamSource]:
    """Which checkpoint tensors make each parameter, for Llama's tensor names."""
    sources: dict[Path, ParamSource] = {
        ("embedding",): ParamSource(names=("model.embed_tokens.weight",), stacked=False),
        ("norm", "scale"): ParamSource(names=("model.norm.weight",), stacked=False),
    }
    if not config.tie_embeddings:
        sources["head",] = ParamSource(names=("lm_head.weight",), stacked=False)
    matrices = {
        ("attention", "q"): "self_attn.q_proj.weight",
        ("attention", "k"): "self_attn.k_proj.weight",
        ("attention", "v"): "self_attn.v_proj.weight",
        ("attention", "o"): "self_attn.o_proj.weight",
        ("mlp", "gate"): "mlp.gate_proj.weight",
        ("mlp", "up"): "mlp.up_proj.weight",
        ("mlp", "down"): "mlp.down_proj.weight",
    }
    vectors = {
        ("attention_norm", "scale"): "input_layernorm.weight",
        ("mlp_norm", "scale"): "post_attention_layernorm.weight",
    }
    if config.qkv_bias:
        vectors |= {("attention", f"{x}_bias"): f"self_attn.{x}_proj.bias" for x in "qkv"}
    if config.mlp_bias:
        vectors |= {("mlp", f"{x}_bias"): f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")}
    if config.o_bias:
        vectors["attention", "o_bias"] = "self_attn.o_proj.bias"
    if config.qk_norm:
        vectors |= {("attention", f"{x}_norm", "scale"): f"self_attn.{x}_norm.weight" for x in "qk"}
    for index, stack in enumerate(config.stacks):
        layers = range(stack.first_layer, stack.first_layer + stack.num_layers)
        for path, name in (matrices | vectors).items():
            names = tuple(f"model.layers.{layer}.{name}" for layer in layers)
            sources["stacks", str(index), "layers", *path] = ParamSource(
                names=names, stacked=True, transpose=path in matrices
            )
    return sources
