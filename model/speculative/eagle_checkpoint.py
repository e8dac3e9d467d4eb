"""Published EAGLE checkpoints: their configs and the names of their tensors.

Folders as of SafeAILab/EAGLE and what was trained after it (vLLM, SGLang and SpecForge read the same), and of
`speculators`, which has other names: of EAGLE-1 `fusion_fc` and `transformer`, of EAGLE-3 `layers.0`. Their tensors are
read from safetensors.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from checkpoints.tensors import ParamSource, TensorSource
from model.config import QKV, ModelConfig
from model.families.names import LLAMA
from model.families.registry import read_config
from model.speculative.eagle import Normed
from model.speculative.speculators import from_speculators

Path = tuple[str, ...]

# What `eagle_config` may say, beside the layers: what an EAGLE-3 head is. None: anything.
_NESTED = dict(eagle_aux_hidden_state_layer_ids=None, norm_before_fc=None, use_aux_hidden_state=True,
               use_last_layernorm=True, use_input_layernorm_in_first_layer=True, use_mtp_layernorm=False,
               next_layer_regular=None, parallel_draft_step=1, parallel_draft_heads_num_layers=None)  # fmt: skip
# A Llama's layer comes with these of the config of a target that knows windows.
_OF_WINDOWS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
_OF_EAGLE1 = ("bias", "eagle_fc_bias", "fusion_bias", "layernorms", "model", "qkv_bias",
              "transformer_layer_architecture")  # fmt: skip
_NORMS: Mapping[str, Normed] = {"norm_before_fc": "features", "fc_norm": "taps", "norm_before_residual": "residual",
                                "norm_output": "output"}  # fmt: skip
_OF_EAGLE3 = (*_NORMS, "draft_vocab_size", "truncated_vocab_size", "target_hidden_size", "eagle_config",
              "eagle_aux_hidden_state_layer_ids")  # fmt: skip
# EAGLE-1 has copies of the target's matrices, which its training leaves alone.
FROZEN = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    model: ModelConfig  # the drafter's layer; vocab_size: of the target
    taps: tuple[int, ...]
    target_hidden: int
    draft_vocab: int
    norms: frozenset[Normed]


def read_eagle1(hf: Mapping[str, Any], target: ModelConfig, context: int | None) -> ModelConfig:
    """The drafter's layer. context: the longest sequence that will be served. Raises ValueError."""
    if isinstance(hf.get("model"), Mapping):  # made anew for vLLM
        hf = {**hf, **hf["model"]}
    if "draft_vocab_size" in hf:
        raise ValueError("draft_vocab_size: this is an EAGLE-3 head; give \"method\": \"eagle3\"")
    hf = from_speculators(hf, "eagle", usual="llama")
    if hf.get("layernorms"):
        raise ValueError("layernorms=true of an EAGLE head is not supported, only false: no norm but the layer's own")
    # Whether `fc` has a bias the tensors say; that q, k and v have one, and o none, no Llama's config can.
    model = _read_layer({key: hf[key] for key in hf if key not in _OF_EAGLE1}, target, context)
    model = replace(model, biases=model.biases | QKV) if hf.get("qkv_bias") else model
    if model.hidden_size != target.hidden_size:
        raise ValueError(f"the EAGLE head has hidden_size={model.hidden_size}, the target has {target.hidden_size}; "
                         "use the head of this model")
    return model


def read_eagle3(hf: Mapping[str, Any], target: ModelConfig, context: int | None) -> Eagle3Config:
    """Raises ValueError."""
    rest = dict(from_speculators(hf, "eagle3", usual="llama"))
    own = {key: rest.pop(key, None) for key in _OF_EAGLE3}
    if own["truncated_vocab_size"] not in (None, own["draft_vocab_size"]):
        raise ValueError(f"truncated_vocab_size={own['truncated_vocab_size']} of an EAGLE-3 head must be its "
                         f"draft_vocab_size, {own['draft_vocab_size']}")
    if own["norm_before_fc"] and own["fc_norm"]:
        raise ValueError("norm_before_fc and fc_norm of an EAGLE-3 head norm the same features; there may be one")
    model = _read_layer(rest, target, context)
    target_hidden = int(own["target_hidden_size"] or model.hidden_size)
    if target_hidden != target.hidden_size:
        raise ValueError(f"the EAGLE-3 head is for features of {target_hidden} numbers, the target has "
                         f"{target.hidden_size}; use the head of this model")  # fmt: skip
    return Eagle3Config(
        model=model, taps=_taps(own["eagle_aux_hidden_state_layer_ids"], own["eagle_config"], target),
        target_hidden=target_hidden, draft_vocab=int(own["draft_vocab_size"] or model.vocab_size),
        norms=frozenset(what for key, what in _NORMS.items() if own[key] or (own["eagle_config"] or {}).get(key)),
    )  # fmt: skip


def _read_layer(hf: Mapping[str, Any], target: ModelConfig, context: int | None) -> ModelConfig:
    window = None
    if hf.get("model_type") == "llama" and (kinds := _says_windows(hf)) is not None:
        window = int(hf["sliding_window"]) if "sliding_attention" in kinds else None
        hf = {key: hf[key] for key in hf if key not in _OF_WINDOWS}
    model = read_config(hf, context)
    if window is not None:
        model = replace(model, layers=tuple(replace(layer, window=window) for layer in model.layers))
    if model.num_layers != 1:
        raise ValueError(f"num_hidden_layers={model.num_layers} of an EAGLE head is not supported, only 1")
    if model.norms != "input" or model.latent is not None or model.layers[0].moe is not None:
        raise ValueError(f"model_type={model.family!r} of an EAGLE head is not supported, only layers as Llama's")
    if model.vocab_size != target.vocab_size:
        raise ValueError(f"the EAGLE head has vocab_size={model.vocab_size}, the target has {target.vocab_size}; use "
                         "the head of this model")  # fmt: skip
    return model


def _says_windows(hf: Mapping[str, Any]) -> set[str] | None:
    """The one kind that its layers are of; None: that is not clear."""
    kinds: set[str] = set(hf.get("layer_types") or ())
    if kinds:
        known = {"full_attention"} if hf.get("sliding_window") is None else {"full_attention", "sliding_attention"}
        return kinds if len(kinds) == 1 and kinds <= known else None
    return {"full_attention"} if hf.get("use_sliding_window", True) is False else None


def _taps(ids: Any, nested: Mapping[str, Any] | None, target: ModelConfig) -> tuple[int, ...]:
    """Layers whose inputs are wanted: vLLM's ids mean that too, SGLang's (in `eagle_config`) the layers' outputs."""
    count, nested = target.num_layers, nested or {}
    for key, value in nested.items():
        if key not in _NESTED or (_NESTED[key] is not None and value is not None and value != _NESTED[key]):
            raise ValueError(f"eagle_config.{key}={json.dumps(value)} of an EAGLE-3 head is not supported")
    if ids:
        taps, what = [int(layer) for layer in ids], "eagle_aux_hidden_state_layer_ids"
    elif outputs := nested.get("eagle_aux_hidden_state_layer_ids"):
        taps, what = [int(layer) + 1 for layer in outputs], "eagle_config.eagle_aux_hidden_state_layer_ids, one added,"
    else:
        taps, what = [2, count // 2, count - 3], "without eagle_aux_hidden_state_layer_ids the features'"
    if not all(0 <= tap <= count for tap in taps):
        raise ValueError(f"{what} layers {taps} are not all in 0 to {count}, which the target has")
    return tuple(taps)


_BLOCK = {("block", *path): name for path, name in LLAMA.items()}
_EAGLE3: Mapping[Path, str] = {
    ("fc",): "fc.weight", ("norm", "scale"): "norm.weight", ("head",): "lm_head.weight", ("offsets",): "d2t",
    ("embedding",): "embed_tokens.weight", ("input_norm", "scale"): "input_norm.weight",
}  # fmt: skip
_EAGLE3_LAYER: Mapping[Path, str] = {
    ("embedding_norm", "scale"): "input_layernorm.weight", ("feature_norm", "scale"): "hidden_norm.weight",
}  # fmt: skip
_TURNED = ("fc", "q", "k", "v", "o", "gate", "up", "down")  # matrices stored as [out, in]


def eagle1_sources(paths: Iterable[Path], names: Collection[str]) -> dict[Path, ParamSource]:
    """paths: of the parameters of `model.speculative.eagle.Eagle1`. names: of the checkpoint."""
    fc, layer = ("fusion_fc", "transformer") if "fusion_fc.weight" in names else ("fc", "layers.0")
    known: dict[Path, str] = {("fc",): f"{fc}.weight", ("fc_bias",): f"{fc}.bias"}
    known |= {path: f"{layer}.{name}" for path, name in _BLOCK.items()}
    return {path: _source(path, known[path]) for path in paths}


def eagle3_sources(paths: Iterable[Path], names: Collection[str], num_taps: int) -> dict[Path, ParamSource]:
    """paths: of the parameters of `model.speculative.eagle.Eagle3`. names: of the checkpoint."""
    layer = "midlayer" if any(name.startswith("midlayer.") for name in names) else "layers.0"
    inside = {path: f"{layer}.{name}" for path, name in {**_BLOCK, **_EAGLE3_LAYER}.items()}
    of_taps = ParamSource(names=tuple(f"fc_norm.{tap}.weight" for tap in range(num_taps)), stacked=True)
    return {path: of_taps if path == ("tap_scales",) else _source(path, {**_EAGLE3, **inside}[path]) for path in paths}


def _source(path: Path, name: str) -> ParamSource:
    return ParamSource(names=(name,), stacked=False, transpose=path[-1] in _TURNED)


def check_vocabulary(source: TensorSource, config: Eagle3Config) -> None:
    """Whether `d2t` and `t2d` say the same of which tokens of the target the head knows. Raises ValueError."""
    names, size = source.names(), config.model.vocab_size
    if "d2t" not in names:
        if config.draft_vocab != size:
            raise ValueError(f"draft_vocab_size={config.draft_vocab} of a vocabulary of {size} needs the tensor d2t, "
                             "which says which tokens they are")
        return
    known = draft_tokens(source.read("d2t"))
    if len(known) != config.draft_vocab:
        raise ValueError(f"d2t has {len(known)} tokens, draft_vocab_size={config.draft_vocab}")
    if known.min() < 0 or known.max() >= size or len(np.unique(known)) != len(known):
        raise ValueError(f"d2t names tokens outside of the vocabulary of {size}, or one twice")
    if "t2d" in names and not np.array_equal(np.flatnonzero(source.read("t2d")), np.sort(known)):
        raise ValueError("d2t and t2d name different tokens: the checkpoint is damaged")


def draft_tokens(d2t: np.ndarray) -> np.ndarray:
    """The target's id of each draft id: d2t holds how much to add."""
    return np.asarray(d2t, np.int64) + np.arange(len(d2t))
