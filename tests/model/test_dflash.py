"""DFlash against attention over the whole sequence, made anew for every block, without any cache."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from model.build import model_rules
from model.config import ModelConfig
from model.families.registry import read_config
from model.speculative.dflash import DFlash, dflash_sources, read_dflash_config
from model.speculative.draws import DraftSampling
from serving.decoding.speculation.config import SpeculativeConfig
from serving.drafters.dflash import load_dflash
from serving.drafters.loading import Surroundings
from serving.errors import ConfigError
from sharding.mesh import make_mesh, parse_mesh
from tests.model.drafting import loaded, paths_of, sampling_rows, settled
from tests.model.harness import batch, config_json, shapes_of
from tests.tolerances import LOGITS_FLOAT32

TARGET: ModelConfig = read_config(config_json("llama-gqa-tied"))
V, D, N, K, H, F = TARGET.vocab_size, TARGET.hidden_size, 4, 2, 12, 24
THETA, EPS, TAPS, MASK, BLOCK = 10_000.0, 1e-6, (0, 1), 100, 6
RNG = np.random.default_rng(0)
MATRIX = RNG.normal(size=(V, D)).astype(np.float32)  # the target's
LENGTH = 26  # tokens of a sequence
FEATURES = RNG.normal(size=(3, LENGTH, len(TAPS) * D)).astype(np.float32)  # of three sequences

# As published: all layers see everything; or the first ones have a window and are causal.
HF = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False, "head_dim": H,
    "hidden_act": "silu", "hidden_size": D, "intermediate_size": F, "max_position_embeddings": 256,
    "max_window_layers": 3, "num_attention_heads": N, "num_key_value_heads": K, "num_hidden_layers": 3,
    "num_target_layers": 3, "rms_norm_eps": EPS, "rope_theta": THETA, "tie_word_embeddings": False, "vocab_size": V,
    "use_sliding_window": False, "sliding_window": None, "rope_scaling": None, "use_cache": True,
    "layer_types": ["full_attention"] * 3, "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
}  # fmt: skip
WINDOWED = HF | {"use_sliding_window": True, "sliding_window": 5,
                 "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
CAUSAL = HF | {"dflash_config": HF["dflash_config"] | {"is_causal": True, "input_embedding_scale": 2.0}}
BOTH_WAYS = WINDOWED | {"dflash_config": HF["dflash_config"] | {"is_causal": False}}
VARIANTS = {"full": HF, "windowed": WINDOWED, "causal": CAUSAL, "windows both ways": BOTH_WAYS}
KNOWN = RNG.random(V) < 0.3  # tokens that drafters of a smaller vocabulary draft


def by_speculators(hf: dict) -> dict:
    """The same drafter with the tokens that are KNOWN."""
    beside = ("architectures", "block_size", "dflash_config", "num_target_layers")
    own, layers = hf["dflash_config"], {key: hf[key] for key in hf if key not in beside}
    return {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "speculators_version": "0.8.0",
        "speculators_config": {"algorithm": "dflash"}, "transformer_layer_config": layers, "dtype": "float32",
        "tie_word_embeddings": False, "target_hidden_size": None, "sample_from_anchor": False,
        "sliding_window_non_causal": False, "block_size": hf["block_size"], "mask_token_id": own["mask_token_id"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in own["target_layer_ids"]],  # inputs of these
        "draft_vocab_size": int(KNOWN.sum()),
    }  # fmt: skip


def tensors(hf: dict) -> dict[str, np.ndarray]:
    """Under the published names."""
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape, scale=0.2).astype(np.float32)

    def scale(size: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    found = {"fc.weight": normal(D, len(TAPS) * D), "hidden_norm.weight": scale(D), "norm.weight": scale(D)}
    for layer in range(hf["num_hidden_layers"]):
        of_layer = {
            "self_attn.q_proj": normal(N * H, D), "self_attn.k_proj": normal(K * H, D),
            "self_attn.v_proj": normal(K * H, D), "self_attn.o_proj": normal(D, N * H), "self_attn.q_norm": scale(H),
            "self_attn.k_norm": scale(H), "mlp.gate_proj": normal(F, D), "mlp.up_proj": normal(F, D),
            "mlp.down_proj": normal(D, F), "input_layernorm": scale(D), "post_attention_layernorm": scale(D),
        }  # fmt: skip
        found |= {f"layers.{layer}.{name}.weight": tensor for name, tensor in of_layer.items()}
    return found


def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale


def rotated(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    angles = positions[:, None] / THETA ** (np.arange(0, H, 2) / H)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., : H // 2], x[..., H // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def by_definition(hf: dict, of: dict[str, np.ndarray], features: np.ndarray, token: int, size: int) -> np.ndarray:
    """The normed states [size, D] of the block that follows these tokens, in float64: one long attention."""
    own = hf["dflash_config"]
    context = norm(features.astype(np.float64) @ of["fc.weight"].T, of["hidden_norm.weight"])
    x = MATRIX[[token] + [MASK] * (size - 1)].astype(np.float64) * own.get("input_embedding_scale", 1.0)
    position = np.arange(len(context) + size)
    back = position[len(context) :, None] - position
    for layer in range(hf["num_hidden_layers"]):
        w = {name.removeprefix(f"layers.{layer}."): t for name, t in of.items() if name.startswith(f"layers.{layer}.")}
        h = norm(x, w["input_layernorm.weight"])
        both = np.concatenate([context, h])
        q = rotated(norm((h @ w["self_attn.q_proj.weight"].T).reshape(-1, N, H), w["self_attn.q_norm.weight"]),
                    position[len(context) :])
        k = rotated(norm((both @ w["self_attn.k_proj.weight"].T).reshape(-1, K, H), w["self_attn.k_norm.weight"]),
                    position)
        v = (both @ w["self_attn.v_proj.weight"].T).reshape(-1, K, H)
        windowed = hf["layer_types"][layer] == "sliding_attention"
        causal = own.get("is_causal", windowed)
        visible = back >= 0 if causal else np.ones(back.shape, bool)
        if windowed:
            visible &= (back < hf["sliding_window"]) & (causal | (-back < hf["sliding_window"]))
        heads = []
        for head in range(N):
            scores = np.where(visible, q[:, head] @ k[:, head * K // N].T / np.sqrt(H), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, head * K // N])
        x = x + np.concatenate(heads, -1) @ w["self_attn.o_proj.weight"].T
        h = norm(x, w["post_attention_layernorm.weight"])
        gate = h @ w["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return norm(x, of["norm.weight"])


def make(folder: Path, hf: dict, mesh: str = "1x1", sampling: DraftSampling = "greedy", small: bool = False) -> DFlash:
    """small: written by `speculators`, with a vocabulary of its own."""
    save_file(tensors(hf) | ({"t2d": KNOWN} if small else {}), folder / "model.safetensors")
    config = read_dflash_config(by_speculators(hf) if small else hf, TARGET)
    rules = model_rules(config.model, make_mesh(parse_mesh(mesh)))
    shapes = nnx.eval_shape(lambda: DFlash(config, rules, page_size=8, sampling=sampling, rngs=nnx.Rngs(0),
                                           dtype=jnp.dtype("float32")))  # fmt: skip
    return loaded(shapes, rules, dflash_sources(config, paths_of(shapes)), folder)


def empty_pages(drafter: DFlash, num_groups: int = 1) -> jax.Array:
    """Whatever is not written yet must not be read."""
    shapes = drafter.state_shapes(num_groups * (1 + 3 * 8))
    return jnp.full(shapes.shape, jnp.nan, shapes.dtype, device=shapes.sharding)


# Steps of three sequences as (new tokens, of which at the end are rejected, tokens before): a prompt in chunks, other
# lengths, a row that wants no drafts, and rejected drafts that are written over.
STEPS = [
    [(5, 0, 0), (9, 0, 0), (2, 0, 0)],
    [(1, 0, 5), (4, 3, 9), (6, 0, 2)],
    [(3, 1, 6), (3, 2, 10), (14, 0, 8)],
]


@pytest.mark.parametrize("kind, mesh", [*((kind, "1x1") for kind in VARIANTS), ("windowed", "tensor=2,data=2")])
def test_blocks(tmp_path: Path, kind: str, mesh: str):
    """Tokens of a block see what is settled and each other. Pages are full of NaN at first, and rejected drafts have
    features like any other. With windows: a drafter of `speculators` that knows some of the tokens."""
    hf, of, small = VARIANTS[kind], tensors(VARIANTS[kind]), kind == "windowed"
    drafter = make(tmp_path, hf, mesh, small=small)
    groups = drafter.rules.num_groups
    assert drafter.taps == (1, 2) and drafter.max_drafts == BLOCK - 1 and not drafter.probabilistic
    matrix = jax.device_put(MATRIX, drafter.rules.sharding(("vocab", "embed"), MATRIX.shape))

    @nnx.jit
    def run(drafter: DFlash, pages: jax.Array, now, step):
        drafts, pages = drafter.propose(pages, now, step, sampling_rows(4 * groups), BLOCK - 1, matrix, matrix)
        return drafts, drafter.fill(pages, now, step, BLOCK, matrix), pages

    pages = empty_pages(drafter, groups)
    for number, rows in enumerate(STEPS):
        step = batch([([1] * new, before) for new, _, before in rows], num_tokens=32, num_rows=4, num_groups=groups)
        features = np.concatenate([
            np.where(np.arange(new)[:, None] < new - rejected, FEATURES[row, before : before + new], 5.0)
            for row, (new, rejected, before) in enumerate(rows)
        ])  # fmt: skip
        features = np.pad(features, ((0, 32 - len(features)), (0, 0)), constant_values=np.nan).astype(np.float32)
        token = [3 + number, 7, 90]
        now = settled(step, features, [rejected for _, rejected, _ in rows], token, [True, True, number != 1], groups)
        drafts, hidden, pages = run(drafter, pages, now, step)
        for row, (new, rejected, before) in enumerate(rows):
            if row == 2 and number == 1:
                continue
            known = before + new - rejected
            wanted = by_definition(hf, of, FEATURES[row, :known], token[row], BLOCK)
            for group in range(groups):
                np.testing.assert_allclose(hidden[group * 4 + row], wanted, atol=LOGITS_FLOAT32)
                logits = np.where(KNOWN | (not small), wanted[1:] @ MATRIX.T, -np.inf)
                assert (drafts.tokens[group * 4 + row] == logits.argmax(-1)).all()


def test_nothing_of_a_block_stays(tmp_path: Path):
    """Pages hold what the settled tokens made them hold, whatever the blocks were."""
    drafter = make(tmp_path, HF)
    step = batch([([1] * 5, 0), ([1] * 3, 0)], num_tokens=16, num_rows=2)
    features = np.pad(np.concatenate([FEATURES[0, :5], FEATURES[1, :3]]), ((0, 8), (0, 0)))
    matrix, found = jnp.asarray(MATRIX), []
    propose = nnx.jit(DFlash.propose, static_argnums=5)
    for token in ((3, 4), (50, 60)):
        now = settled(step, features, [0, 0], token)
        found.append(propose(drafter, empty_pages(drafter), now, step, sampling_rows(2), 2, matrix, matrix)[1])
    np.testing.assert_array_equal(*found)
    written = ~np.isnan(np.asarray(found[0])).any((0, 3, 4, 5))  # [P, b]
    assert written[1].tolist() == [True] * 5 + [False] * 3 and written[9].tolist() == [True] * 3 + [False] * 5
    assert written[1:].sum() == 8


def test_drawn_drafts_come_with_their_distributions(tmp_path: Path):
    """Those of every mask, of a row with a temperature; of a greedy one, the best token."""
    hf = HF | {"dflash_config": HF["dflash_config"] | {"output_multiplier": 0.25, "final_logit_softcapping": 3.0}}
    drafter = make(tmp_path, hf, sampling="probabilistic")
    assert drafter.probabilistic
    step = batch([([1] * 5, 0), ([1] * 3, 0)], num_tokens=16, num_rows=2)
    features = np.pad(np.concatenate([FEATURES[0, :5], FEATURES[1, :3]]), ((0, 8), (0, 0)))
    rows = sampling_rows(2)._replace(temperature=jnp.asarray([0.7, 0.0]), top_p=jnp.ones(2), seed=jnp.ones((2, 2), int))
    matrix = jnp.asarray(MATRIX)
    drafts, _ = nnx.jit(DFlash.propose, static_argnums=5)(
        drafter, empty_pages(drafter), settled(step, features, [0, 0], (3, 4)), step, rows, BLOCK - 1, matrix, matrix)
    wanted = by_definition(hf, tensors(hf), FEATURES[0, :5], 3, BLOCK)[1:] @ MATRIX.T
    weights = np.exp(3 * np.tanh(wanted * 0.25 / 3) / 0.7)
    assert drafts.probabilities is not None and drafts.probabilities.shape == (2, BLOCK - 1, V)
    np.testing.assert_allclose(drafts.probabilities[0], weights / weights.sum(-1, keepdims=True), atol=LOGITS_FLOAT32)
    best = (by_definition(hf, tensors(hf), FEATURES[1, :3], 4, BLOCK)[1:] @ MATRIX.T).argmax(-1)
    assert (drafts.tokens[1] == best).all() and (drafts.probabilities[1].argmax(-1) == best).all()
    assert (drafts.tokens[0] != wanted.argmax(-1)).any()


WRONG = [
    ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel is not supported"),
    ({"dflash_config": {"mask_token_id": MASK}}, "no dflash_config.target_layer_ids"),
    ({"dflash_config": {"mask_token_id": V, "target_layer_ids": [0]}}, f"mask_token_id={V} is not in"),
    ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [2]}}, r"target_layer_ids=\[2\] must be in 0 to 1"),
    ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0], "x": 1}}, "dflash_config has keys .* x"),
    ({"hidden_size": D + 1}, f"hidden_size={D + 1}, the target has {D}"),
    ({"block_size": 1}, "block_size=1 must be in 2"),
    ({"unheard_of": 1}, "unheard_of"),
]  # fmt: skip


@pytest.mark.parametrize("more, message", WRONG)
def test_what_does_not_fit_is_refused(more: dict, message: str):
    with pytest.raises(ValueError, match=message):
        read_dflash_config(HF | more, TARGET)


def test_what_does_not_fit_of_speculators_is_refused():
    for more, message in (
        ({"sample_from_anchor": True}, "sample_from_anchor=true of a DFlash drafter is not supported"),
        ({"target_hidden_size": D + 1}, f"target_hidden_size={D + 1} of a DFlash drafter must be its hidden_size, {D}"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type='dspark' is not supported here, only 'dflash'"),
        ({"aux_hidden_state_layer_ids": [0]}, r"target_layer_ids=\[-1\] must be in 0 to 1"),
        ({"unheard_of": 1}, "unheard_of"),
    ):
        with pytest.raises(ValueError, match=message):
            read_dflash_config(by_speculators(HF) | more, TARGET)


def test_copies_of_the_targets_matrices_are_not_read(tmp_path: Path):
    """Those of `speculators`; another drafter has none."""
    target = shapes_of(TARGET)
    around = Surroundings(target=target, dtype=jnp.dtype(jnp.float32), page_size=8, max_num_seqs=2, max_model_len=None,
                          attention_backend="xla", progress=False)  # fmt: skip
    d2t = np.flatnonzero(KNOWN) - np.arange(KNOWN.sum())
    copies = {"embed_tokens.weight": MATRIX, "lm_head.weight": MATRIX[KNOWN], "t2d": KNOWN, "d2t": d2t}
    save_file(tensors(HF) | copies, tmp_path / "model.safetensors")
    config = SpeculativeConfig.of({"method": "dflash", "model": str(tmp_path), "num_speculative_tokens": BLOCK - 1})
    (tmp_path / "config.json").write_text(json.dumps(by_speculators(HF)))
    drafter = load_dflash(config, around)
    assert drafter.known is not None and (np.asarray(drafter.known[...]) == KNOWN).all() and drafter.taps == (1, 2)
    (tmp_path / "config.json").write_text(json.dumps(by_speculators(HF) | {"draft_vocab_size": V}))
    assert load_dflash(config, around).known is None
    (tmp_path / "config.json").write_text(json.dumps(HF))
    with pytest.raises(ConfigError, match="left-over tensors"):
        load_dflash(config, around)
