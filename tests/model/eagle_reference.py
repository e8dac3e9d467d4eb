"""EAGLE from its papers and published code: dense, float64, one sequence, the whole of it every time."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray

HF: Mapping[str, Any] = dict(
    model_type="llama", vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, hidden_act="silu", rms_norm_eps=1e-5, max_position_embeddings=256,
    rope_theta=10000.0,
)  # fmt: skip
TARGET_LAYERS = 4
TAPS = (2, 2, 1)  # what the config's default gives for four layers
DRAFT_VOCAB = 20


def layer_names(prefix: str, num_inputs: int) -> dict[str, tuple[int, ...]]:
    D, F, N, K = HF["hidden_size"], HF["intermediate_size"], 32, 16
    return {
        f"{prefix}.self_attn.q_proj.weight": (N, num_inputs), f"{prefix}.self_attn.k_proj.weight": (K, num_inputs),
        f"{prefix}.self_attn.v_proj.weight": (K, num_inputs), f"{prefix}.self_attn.o_proj.weight": (D, N),
        f"{prefix}.mlp.gate_proj.weight": (F, D), f"{prefix}.mlp.up_proj.weight": (F, D),
        f"{prefix}.mlp.down_proj.weight": (D, F), f"{prefix}.post_attention_layernorm.weight": (D,),
    }  # fmt: skip


def eagle1_tensors(rng: np.random.Generator, bias: bool = True) -> dict[str, Array]:
    D, V = HF["hidden_size"], HF["vocab_size"]
    shapes = {"embed_tokens.weight": (V, D), "fc.weight": (D, 2 * D), **layer_names("layers.0", D)}
    return _random(rng, shapes | ({"fc.bias": (D,)} if bias else {}))


def eagle3_tensors(rng: np.random.Generator, layer: str = "midlayer", taps: int = 3) -> dict[str, Array]:
    D, V = HF["hidden_size"], HF["vocab_size"]
    known = np.sort(rng.choice(V, DRAFT_VOCAB, replace=False))
    tensors = _random(rng, {
        "fc.weight": (D, taps * D), "norm.weight": (D,), "lm_head.weight": (DRAFT_VOCAB, D),
        f"{layer}.input_layernorm.weight": (D,), f"{layer}.hidden_norm.weight": (D,), **layer_names(layer, 2 * D),
    })  # fmt: skip
    is_known = np.zeros(V, bool)
    is_known[known] = True
    return tensors | {"d2t": known - np.arange(DRAFT_VOCAB), "t2d": is_known}


def _random(rng: np.random.Generator, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Large enough that attention and MLP matter to what comes out."""
    return {name: (rng.normal(size=shape) * (0.3 if len(shape) > 1 else 0.5) + (len(shape) == 1)).astype(np.float32)
            for name, shape in shapes.items()}  # fmt: skip


def norm(x: Array, scale: Array, hf: Mapping[str, Any]) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + hf["rms_norm_eps"]) * scale


def _attention(w: Mapping[str, Array], x: Array, hf: Mapping[str, Any]) -> Array:
    """Causal, of a whole sequence [T, I]."""
    count, N, K = len(x), hf["num_attention_heads"], hf["num_key_value_heads"]
    H = hf.get("head_dim", hf["hidden_size"] // N)
    q, k, v = ((x @ w[f"self_attn.{p}_proj.weight"].T + w.get(f"self_attn.{p}_proj.bias", 0)).reshape(count, -1, H)
               for p in "qkv")
    angle = np.arange(count)[:, None] * 10000.0 ** (-np.arange(0, H, 2) / H)
    cos, sin = (np.concatenate([f(angle)] * 2, 1)[:, None] for f in (np.cos, np.sin))

    def turn(x: Array) -> Array:
        first, second = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate([-second, first], -1) * sin

    q, k, v = turn(q), np.repeat(turn(k), N // K, 1), np.repeat(v, N // K, 1)
    scores = np.einsum("inh,jnh->nij", q, k) / np.sqrt(H)
    back = np.arange(count)[:, None] - np.arange(count)
    window = hf["sliding_window"] if hf.get("layer_types") == ["sliding_attention"] else count
    scores = np.where((back >= 0) & (back < window), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("nij,jnh->inh", weights / weights.sum(-1, keepdims=True), v)
    return out.reshape(count, -1) @ w["self_attn.o_proj.weight"].T


def _mlp(w: Mapping[str, Array], x: Array) -> Array:
    gate = x @ w["mlp.gate_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


@dataclass
class Reference:
    """fuse: the target's features to the layer's; layer: (features, embeddings) of a sequence to the next features;
    log_probs: of a feature, over the target's vocabulary."""

    embedding: Array
    fuse: Callable[[Array], Array]
    layer: Callable[[Array, Array], Array]
    log_probs: Callable[[Array], Array]

    def run(self, features: Array, next_tokens: Array, path: list[int]) -> Array:
        """The newest feature, after the settled tokens and then those of the path, each fed with the one before it."""
        out = self.layer(sequence := self.fuse(features), embedded := self.embedding[next_tokens])
        for token in path:
            sequence = np.concatenate([sequence, out[-1:]])
            embedded = np.concatenate([embedded, self.embedding[[token]]])
            out = self.layer(sequence, embedded)
        return out[-1]

    def chain(self, features: Array, next_tokens: Array, count: int) -> list[int]:
        path: list[int] = []
        while len(path) < count:
            path.append(int(self.log_probs(self.run(features, next_tokens, path)).argmax()))
        return path


def eagle1(tensors: Mapping[str, Array], embedding: Array, output_matrix: Array) -> Reference:
    w = {name.removeprefix("layers.0."): x.astype(np.float64) for name, x in tensors.items()}

    def layer(features: Array, embedded: Array) -> Array:
        x = np.concatenate([embedded, features], 1) @ w["fc.weight"].T + w.get("fc.bias", 0)
        x = x + _attention(w, x, HF)
        return x + _mlp(w, norm(x, w["post_attention_layernorm.weight"], HF))

    def log_probs(feature: Array) -> Array:
        logits = output_matrix.astype(np.float64) @ feature
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    return Reference(embedding.astype(np.float64), lambda features: features, layer, log_probs)


def eagle3(tensors: Mapping[str, Array], embedding: Array, normed: Collection[str] = (),
           hf: Mapping[str, Any] = HF) -> Reference:  # fmt: skip
    """normed: what more, of "residual" and "output"; the features, as one or each tap's, where there are norms."""
    w = {name.removeprefix("layers.0.").removeprefix("midlayer."): x.astype(np.float64) for name, x in tensors.items()}
    known = w["d2t"].astype(int) + np.arange(len(w["d2t"]))

    def layer(features: Array, embedded: Array) -> Array:
        read = norm(features, w["hidden_norm.weight"], hf)
        both = np.concatenate([norm(embedded, w["input_layernorm.weight"], hf), read], 1)
        x = (read if "residual" in normed else features) + _attention(w, both, hf)
        x = x + _mlp(w, norm(x, w["post_attention_layernorm.weight"], hf))
        return norm(x, w["norm.weight"], hf) if "output" in normed else x

    def log_probs(feature: Array) -> Array:
        logits = w["lm_head.weight"] @ (feature if "output" in normed else norm(feature, w["norm.weight"], hf))
        of_target = np.full(len(embedding), -np.inf)
        of_target[known] = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        return of_target

    def fuse(x: Array) -> Array:
        if "input_norm.weight" in w:
            x = norm(x, w["input_norm.weight"], hf)
        if "fc_norm.0.weight" in w:
            taps = np.split(x, sum(name.startswith("fc_norm.") for name in w), axis=1)
            x = np.concatenate([norm(tap, w[f"fc_norm.{i}.weight"], hf) for i, tap in enumerate(taps)], axis=1)
        return x @ w["fc.weight"].T

    return Reference(embedding.astype(np.float64), fuse, layer, log_probs)
