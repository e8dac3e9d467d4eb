"""EAGLE in the engine: trees and chains of heads that guess well and of heads that guess anything. Nothing of what
comes out changes, and what a head proposes does not depend on how its sequence came about."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from model.batch import StepBatch
from model.transformer import Transformer
from serving.engine.plan import StepResult
from serving.runner.runner import ModelRunner
from tests.model import eagle_reference as reference
from tests.model.harness import batch, kv_pages, load
from tests.runner.drafting import PROMPTS, TARGET, D, V, check_distribution, engine, run, tiny, tokens, write

HF = json.loads((TARGET / "config.json").read_text())
KNOWN = np.arange(1, V, 2)  # tokens that EAGLE-3's head has
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def layer(prefix: str, num_inputs: int, rng: np.random.Generator, size: float) -> dict[str, np.ndarray]:
    """What it adds is of this size: 0.0 leaves what it is added to."""
    N, K, H, F = HF["num_attention_heads"], HF["num_key_value_heads"], HF["head_dim"], HF["intermediate_size"]
    shapes = {"q": (N * H, num_inputs), "k": (K * H, num_inputs), "v": (K * H, num_inputs), "o": (D, N * H)}
    mlp = {"gate": (F, D), "up": (F, D), "down": (D, F)}
    every = {**{f"self_attn.{x}_proj": s for x, s in shapes.items()}, **{f"mlp.{x}_proj": s for x, s in mlp.items()}}
    found = {f"{prefix}.{name}.weight": rng.normal(size=s, scale=size) for name, s in every.items()}
    return found | {f"{prefix}.post_attention_layernorm.weight": np.ones(D)}


def write_head(folder: Path, method: str, size: float, target: Mapping[str, np.ndarray], known: np.ndarray) -> str:
    """The head guesses with what the target said last, disturbed: a model that repeats itself is guessed at times."""
    rng, vocab = np.random.default_rng(1), len(target["model.embed_tokens.weight"])
    config, own = HF | {"num_hidden_layers": 1, "vocab_size": vocab}, np.zeros((D, D))
    embedding = target["model.embed_tokens.weight"]
    if method == "eagle":
        tensors = {"fc.weight": np.concatenate([own, np.eye(D)], 1), **layer("layers.0", D, rng, size)}
    else:
        tensors = {"fc.weight": np.concatenate([own, own, np.eye(D)], 1), **layer("midlayer", 2 * D, rng, size),
                   "midlayer.input_layernorm.weight": np.ones(D), "midlayer.hidden_norm.weight": np.ones(D),
                   "norm.weight": target["model.norm.weight"], "lm_head.weight": embedding[known],
                   "d2t": known - np.arange(len(known)), "t2d": np.isin(np.arange(vocab), known)}  # fmt: skip
        layers = sum(name.endswith("o_proj.weight") for name in target)
        config |= {"draft_vocab_size": len(known), "eagle_aux_hidden_state_layer_ids": [0, 1, layers]}
    return write(folder, config, {name: x.astype(np.float32) if x.dtype == float else x for name, x in tensors.items()})


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, target = tmp_path_factory.mktemp("heads"), load_file(TARGET / "model.safetensors")
    return {
        "eagle": write_head(folder / "eagle", "eagle", 0.02, target, KNOWN),
        "random": write_head(folder / "random", "eagle3", 2.0, target, KNOWN),
    }


CONFIGS = {
    "eagle tree": dict(method="eagle", speculative_token_tree=TREE),
    "eagle3 tree": dict(method="eagle3", num_speculative_tokens=3, eagle_topk=2, eagle_num_steps=2),
    "random chain": dict(method="eagle3", num_speculative_tokens=3),
}


def config(kind: str, heads: Mapping[str, str]) -> dict:
    name = "random" if "random" in kind else CONFIGS[kind]["method"]
    return {**CONFIGS[kind], "model": heads[name], "adaptive": False}


@pytest.mark.slow
def test_nothing_changes(heads: Mapping[str, str], tokenizer: str):
    """A fixed tree; other trees and chains, and meshes: tests/features."""
    with engine(tokenizer, None) as llm:
        without = tokens(run(llm))
    with engine(tokenizer, config("eagle tree", heads)) as llm:
        assert tokens(run(llm)) == without
        again = run(llm)
        assert tokens(again) == without and any(output.num_cached_tokens for output in again)
        stats = llm.service.engine.stats
        assert stats.draft_tokens > 100 and stats.accepted_tokens > 10


@pytest.mark.slow
def test_proposals_are_those_of_a_head_that_begins_anew(heads: Mapping[str, str], tokenizer: str,
                                                        monkeypatch: pytest.MonkeyPatch):  # fmt: skip
    """After chunks, rejections and preemptions the head's cache is what it would be, had nothing been rejected."""
    proposed: list[tuple[str, int, list[int]]] = []  # (request, tokens before the drafts, drafts)
    began: dict[str, int] = {}  # with what token
    fetch = ModelRunner.fetch

    def record(runner: ModelRunner, handle: Any) -> StepResult:
        result = fetch(runner, handle)
        for row, sampled, draft in zip(handle.plan.rows, result.token_ids, result.drafts, strict=True):
            if row.start == 0:
                began[row.request_id] = int(row.token_ids[0])
            if draft is not None:
                known = row.start + row.num_tokens - row.num_drafts
                proposed.append((row.request_id, known + len(sampled), draft.tokens.tolist()))
        return result

    monkeypatch.setattr(ModelRunner, "fetch", record)
    prompts = [prompt for prompt in PROMPTS if prompt[:24] != PROMPTS[0][:24]]  # shared pages know one next token
    with engine(tokenizer, config("random chain", heads), num_pages=14, max_model_len=96) as llm:
        outputs = tokens(run(llm, prompts))
        assert llm.service.engine.stats.num_preemptions > 0
    whole = {prompt[0]: [*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)}
    target, head = load(TARGET), load_file(f"{heads['random']}/model.safetensors")
    plain = reference.eagle3(head, np.asarray(target.embedding[...]), hf=HF)
    for request, length, drafts in proposed[:: len(proposed) // 40]:
        sequence = whole[began[request]][:length]
        assert len(sequence) == length
        assert drafts == plain.chain(features(target, sequence[:-1]), np.array(sequence[1:]), len(drafts))


def features(target: Transformer, sequence: list[int]) -> np.ndarray:
    step = batch([(sequence, 0)], num_tokens=128, num_rows=1, row_pages=16)
    _, found, _, _ = _features(target, kv_pages(target), step)
    return np.asarray(found)[: len(sequence)]


@jax.jit
def _features(target: Transformer, pages: jax.Array, step: StepBatch):
    return target.with_features(pages, step, (0, 1, HF["num_hidden_layers"]))


@pytest.mark.slow
def test_the_distribution_is_the_targets(tokenizer: str, tmp_path: Path):
    """Of a tree that grows, by a head that does not know all tokens."""
    vocab, target = 4, tiny(tmp_path / "target", 4)
    head = write_head(tmp_path / "head", "eagle3", 0.02, load_file(target / "model.safetensors"), np.arange(1, vocab))
    check_distribution({**CONFIGS["eagle3 tree"], "model": head, "adaptive": False}, target, vocab, tokenizer)
