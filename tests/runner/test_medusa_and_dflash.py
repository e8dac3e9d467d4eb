"""Medusa and DFlash in the engine: nothing of what comes out changes, whatever they guess; typical acceptance does
change it, and says so."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from serving.errors import ConfigError
from serving.llm import SamplingParams
from tests.runner.drafting import (
    PROMPTS,
    SAMPLING,
    TARGET,
    D,
    check_distribution,
    engine,
    run,
    tiny,
    tokens,
    write,
)

HEADS, BLOCK = 4, 6
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0, 0]]
TINY_POOL = dict(num_pages=14, max_model_len=96, long_prefill_token_threshold=8)


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Heads that change little of the target's own: a model that repeats itself is guessed at times."""
    rng = np.random.default_rng(1)
    tensors = {}
    for head in range(HEADS):
        tensors[f"medusa_head.{head}.0.linear.weight"] = rng.normal(size=(D, D), scale=0.05).astype(np.float32)
        tensors[f"medusa_head.{head}.0.linear.bias"] = np.zeros(D, np.float32)
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": 1, "tie_word_embeddings": True}
    return write(tmp_path_factory.mktemp("heads") / "medusa", config, tensors)


@pytest.fixture(scope="module")
def dflash(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng, found = np.random.default_rng(2), {}
    config = json.loads((TARGET / "config.json").read_text()) | {
        "model_type": "qwen3", "num_hidden_layers": 2, "block_size": BLOCK,
        "dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 1]},
    }  # fmt: skip
    del config["pretraining_tp"], config["mlp_bias"]
    N, K, H, F = (config[x] for x in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"))
    shapes = {"self_attn.q_proj": (N * H, D), "self_attn.k_proj": (K * H, D), "self_attn.v_proj": (K * H, D),
              "self_attn.o_proj": (D, N * H), "self_attn.q_norm": (H,), "self_attn.k_norm": (H,),
              "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F), "input_layernorm": (D,),
              "post_attention_layernorm": (D,)}  # fmt: skip
    every = {f"layers.{layer}.{name}": shape for layer in range(2) for name, shape in shapes.items()}
    for name, shape in {**every, "fc": (D, 2 * D), "hidden_norm": (D,), "norm": (D,)}.items():
        found[f"{name}.weight"] = rng.normal(size=shape, scale=0.3).astype(np.float32)
    return write(tmp_path_factory.mktemp("drafter") / "dflash", config, found)


@pytest.fixture(scope="module")
def without(tokenizer: str) -> list[list[int]]:
    with engine(tokenizer, None) as llm:
        return tokens(run(llm))


def configs(medusa: str, dflash: str) -> dict[str, dict]:
    return {
        "tree": {"method": "medusa", "model": medusa, "speculative_token_tree": TREE, "adaptive": False},
        "block": {"method": "dflash", "model": dflash, "num_speculative_tokens": BLOCK - 1, "adaptive": False},
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind, options", [
    ("tree", TINY_POOL), pytest.param("block", dict(mesh="tensor=2,data=2"), marks=pytest.mark.matrix)])  # fmt: skip
def test_nothing_changes(kind: str, options: dict, medusa: str, dflash: str, tokenizer: str,
                         without: list[list[int]]):  # fmt: skip
    """Nor with preemptions, prefix hits and chunks; chains of heads, and blocks on one device: tests/features."""
    with engine(tokenizer, configs(medusa, dflash)[kind], **options) as llm:
        assert tokens(run(llm)) == without
        again = run(llm)
        assert tokens(again) == without and any(output.num_cached_tokens for output in again)
        stats = llm.service.engine.stats
        assert llm.service.engine.info.acceptance == "exact"
        assert stats.draft_tokens > 100 and (kind == "block" or stats.accepted_tokens > 10)
        assert options is not TINY_POOL or stats.num_preemptions > 0


@pytest.mark.slow
def test_typical_acceptance(medusa: str, tokenizer: str, without: list[list[int]]):
    """Greedy requests stay what they are. Others are not random, whatever their seed, and are not what greedy ones get:
    drafts pass that are not the best."""
    speculative = configs(medusa, "")["tree"] | {"rejection_sample_method": "typical"}
    hot = [SamplingParams(temperature=1.0, seed=seed, max_tokens=30, ignore_eos=True) for seed in (1, 2)]
    with engine(tokenizer, speculative) as llm:
        for got, want, number in zip(tokens(run(llm)), without, range(len(PROMPTS)), strict=True):
            assert SAMPLING[number % len(SAMPLING)].temperature or got == want
        first, second = (tokens(run(llm, PROMPTS[:1], [sampling])) for sampling in hot)
        assert llm.service.engine.info.acceptance == "typical"
    assert first == second and first[0] != without[0]


@pytest.mark.slow
def test_the_distribution_is_the_targets(medusa: str, tokenizer: str, tmp_path: Path):
    vocab = 5
    tree = [[0], [1], [0, 0], [0, 1], [1, 0]]
    speculative = {"method": "medusa", "model": medusa, "speculative_token_tree": tree, "adaptive": False}
    check_distribution(speculative, tiny(tmp_path / "target", vocab), vocab, tokenizer)


@pytest.mark.slow
def test_rejection_gives_the_targets_distribution_where_a_grammar_forbids_drafts(
    dflash: str, tokenizer: str, tmp_path: Path
):
    """Tokens from the fourth on are bytes from 0 on."""
    vocab, grammar, allowed = 8, r"[\x00\x01][\x00-\x02][\x02\x03][\x00\x02\x03]{2}", ([4, 5], [4, 5, 6], [6, 7])
    config = json.loads((Path(dflash) / "config.json").read_text()) | {"vocab_size": vocab}
    drafter = write(tmp_path / "drafter", config, load_file(Path(dflash) / "model.safetensors"))
    speculative = {"method": "dflash", "model": drafter, "draft_sample_method": "probabilistic", "adaptive": False,
                   "num_speculative_tokens": 3}  # fmt: skip
    check_distribution(speculative, tiny(tmp_path / "target", vocab, num_layers=3), vocab, tokenizer, grammar, allowed)


@pytest.mark.parametrize("more, message", [
    ({"num_speculative_tokens": HEADS + 1}, "has 4 heads"),
    ({"speculative_token_tree": "mc_sim_7b_63x"}, "mc_sim_7b_63"),
])  # fmt: skip
def test_refusals_name_what_would_work(more: dict, message: str, medusa: str, tokenizer: str):
    with pytest.raises(ConfigError, match=message), engine(tokenizer, {"method": "medusa", "model": medusa, **more}):
        pass
