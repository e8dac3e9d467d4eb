"""Reading Hugging Face configs, shared by the families."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from model.config import LayerSpec, MoESpec, Projection, RopeConfig
from model.families.rope import Parameters, Rotary, reach, resolve

# Keys of a Hugging Face config that do not change what an inference run computes.
_NEUTRAL = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _model_name_or_path _name_or_path architectures attention_dropout
    auto_map bos_token_id cache_implementation chunk_size_feed_forward dtype embd_pdrop eos_token_id for_llm_compressor
    id2label initializer_range is_encoder_decoder is_llama_config label2id model_type output_attentions
    output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type resid_pdrop return_dict
    rope_interleaved router_aux_loss_coef router_jitter_noise tokenizer_class torch_dtype transformers.js_config
    transformers_version unk_token_id unsloth_fixed unsloth_version use_cache
    """.split()
)

_MAX_LAYERS = 10_000  # more is a damaged file
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


class UnsupportedModel(ValueError):
    """The config asks for something this project does not implement; the message names the key and value."""


class ConfigReader:
    """Takes keys out of a Hugging Face config and insists, at the end, that none was left unread."""

    def __init__(self, hf: Mapping[str, Any], context: int | None = None):
        """context: the longest sequence that will be served; None: the longest that the model can."""
        self._hf, self._context = hf, context
        self._assumed: dict[str, Any] = {}
        self._taken: set[str] = set(_NEUTRAL)

    def assume(self, **values: Any) -> None:
        """What a config of this family means that says nothing about these keys, not even null: transformers' own
        defaults where they are not those of most families. Those assumed first count."""
        self._assumed = values | self._assumed

    def take(self, key: str, default: Any = None) -> Any:
        """default: for null, too."""
        self._taken.add(key)
        value = self._hf.get(key, self._assumed.get(key))
        return default if value is None else value

    def take_dict(self, key: str) -> dict[str, Any]:
        value = self.take(key, {})
        if not isinstance(value, dict):
            raise UnsupportedModel(f"config.json: {key}={value!r} must be an object")
        return dict(value)

    def nested(self, key: str) -> "ConfigReader":
        """A reader of the config within this one. Whoever asks for it finishes it."""
        return ConfigReader(self.take_dict(key), self._context)

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

    def rope(self, head_dim: int, *, partial: float = 1.0, names: Mapping[str, str] = MappingProxyType({}),
             **fields: Any) -> RopeConfig:  # fmt: skip
        """`rope_theta`, `partial_rotary_factor` (without it `partial`) and `rope_scaling`, or the newer
        `rope_parameters` that holds all. names: what this family calls scalings. `fields` go to RopeConfig."""
        parameters = self.take_dict("rope_parameters")
        scaling = self.take_dict("rope_scaling") or parameters
        theta = scaling.pop("rope_theta", self.take("rope_theta", 10_000.0))
        partial = scaling.pop("partial_rotary_factor", self.take("partial_rotary_factor", partial))
        for key in scaling.keys() & {"rope_type", "type"}:
            scaling[key] = names.get(scaling[key], scaling[key])
        original = self.take("original_max_position_embeddings")
        if original is not None and len(scaling) > 1:  # Phi-3 keeps it outside
            scaling["original_max_position_embeddings"] = original
        return self.resolve_rope(scaling, theta, int(head_dim * partial), **fields)

    def global_and_local_rope(self, head_dim: int, *, theta: float,
                              local_theta: float) -> tuple[RopeConfig, RopeConfig]:  # fmt: skip
        """Of layers without and with a window: `rope_theta` and `rope_scaling` of the former, or the newer
        `rope_parameters` with an object for each. Without a theta there it is as given."""
        parameters = self.take_dict("rope_parameters")
        of_global = {**self.take_dict("rope_scaling"), **(parameters.pop(_GLOBAL, None) or {})}
        of_local = dict(parameters.pop(_LOCAL, None) or {})
        if parameters:
            raise UnsupportedModel(f"config.json: rope_parameters has {', '.join(parameters)}, which no layer uses")
        theta = of_global.pop("rope_theta", self.take("rope_theta", theta))
        local_theta = of_local.pop("rope_theta", local_theta)
        return self.resolve_rope(of_global, theta, head_dim), self.resolve_rope(of_local, local_theta, head_dim)

    def resolve_rope(self, scaling: Mapping[str, Any], theta: float, dim: int, **fields: Any) -> RopeConfig:
        """The first `dim` numbers of a head turn. Raises ValueError."""
        rotary = Rotary(theta=float(theta), dim=dim, max_position=self._max_position(),
                        context=self._context or self.max_position())
        return resolve(rotary, Parameters(scaling), **fields)

    def _max_position(self) -> int:
        return int(self.take("max_position_embeddings", 2048))

    def max_position(self) -> int:
        """The longest sequence. Some scalings reach beyond `max_position_embeddings`."""
        scaling = self.take_dict("rope_scaling") or self.take_dict("rope_parameters")
        return reach(scaling.get("full_attention") or scaling, self._max_position())

    def finish(self) -> None:
        if (quantized := self._hf.get("quantization_config")) is not None:
            kind = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
            raise UnsupportedModel(f"config.json: quantization_config of {kind!r}: quantized checkpoints are not "
                                   f"supported; use a copy of the model in bfloat16")  # fmt: skip
        unread = sorted(set(self._hf) - self._taken)
        if unread:
            raise UnsupportedModel(f"config.json has keys that this model family does not know: {', '.join(unread)}")


def base_fields(reader: ConfigReader) -> dict[str, Any]:
    """The fields that all Llama-like configs share, all but `layers`."""
    hidden, heads = int(reader.require("hidden_size")), int(reader.require("num_attention_heads"))
    head_dim = int(reader.take("head_dim", hidden // heads))
    if head_dim < 1:
        raise ValueError(f"{head_dim=} must be at least 1")
    eos = reader.take("eos_token_id", ())
    return dict(
        family=reader.require("model_type"),
        vocab_size=int(reader.require("vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(reader.require("intermediate_size")),
        num_heads=heads,
        num_kv_heads=int(reader.take("num_key_value_heads", heads)),
        head_dim=head_dim,
        max_position=reader.max_position(),
        norm_eps=float(reader.take("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(reader.take("tie_word_embeddings", False)),
        attention_scale=head_dim**-0.5,
        bos_id=reader.take("bos_token_id"),
        eos_ids=tuple(map(int, eos)) if isinstance(eos, list | tuple) else (int(eos),),
    )


def biases(reader: ConfigReader, key: str, projections: frozenset[Projection],
           default: bool = False) -> frozenset[Projection]:  # fmt: skip
    """The projections, where the config has this key set."""
    return projections if reader.take(key, default) else frozenset()


def window_layers(reader: ConfigReader, rope: RopeConfig, window: int | None,
                  local_rope: RopeConfig | None = None, *, moe: MoESpec | None = None,
                  default: Callable[[int], bool]) -> tuple[LayerSpec, ...]:
    """`layer_types` where given, otherwise what `default` says of a layer's number: does it have the window?
    local_rope: the RoPE of those that have."""
    count, kinds = reader.num_layers(), reader.take("layer_types")
    kinds = kinds or [_LOCAL if window is not None and default(layer) else _GLOBAL for layer in range(count)]
    if len(kinds) != count or not set(kinds) <= {_LOCAL, _GLOBAL}:
        raise UnsupportedModel(f"config.json: layer_types={kinds} must be {count} times {_GLOBAL} or {_LOCAL}")
    if window is None and _LOCAL in kinds:
        raise UnsupportedModel(f"config.json: layer_types has {_LOCAL} but there is no sliding_window in use")
    local, everywhere = LayerSpec(rope=local_rope or rope, window=window, moe=moe), LayerSpec(rope=rope, moe=moe)
    return tuple(local if kind == _LOCAL else everywhere for kind in kinds)
