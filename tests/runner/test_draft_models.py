"""Draft models and DeepSeek-V3's extra layer in the engine: what comes out has not changed, or not its distribution."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.orbax_folder import save_folder
from serving.config import EngineConfig
from serving.errors import ConfigError
from serving.llm import LLM, SamplingParams
from serving.loading import load_model
from serving.runner.memory import bytes_per_device
from tests.model.harness import GOLDENS, all_logits, batch, kv_pages, load
from tests.model.speculators import write_with_mtp
from tests.runner import drafting
from tests.runner.distributions import chances, likelihood
from tests.runner.drafting import TARGET, check_distribution, engine

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True, top_p=0.95)
PENALIZED = SamplingParams(temperature=0.8, seed=6, max_tokens=30, ignore_eos=True, repetition_penalty=1.2)
RNG = np.random.default_rng(0)
SHARED = RNG.integers(3, 128, 24).tolist()
PROMPTS = [*([*SHARED, *RNG.integers(3, 128, n).tolist()] for n in (1, 9, 30)),
           *(RNG.integers(3, 128, n).tolist() for n in (2, 40, 17))]  # fmt: skip


def draft_model(path: Path, method: str = "coupled", drafts: int = 3) -> dict:
    return {"method": "draft_model", "model": str(path), "num_speculative_tokens": drafts, "adaptive": False,
            "draft_sample_method": method}  # fmt: skip


def run(llm: LLM, *sampling: SamplingParams, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    given = [sampling[i % len(sampling)] for i in range(len(prompts))]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], given, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def all_accepted(llm: LLM) -> bool:
    found = llm.service.engine.stats
    return found.draft_tokens > 100 and found.accepted_tokens == found.draft_tokens


@pytest.fixture(scope="module")
def without(tokenizer: str) -> dict[str, list[list[int]]]:
    with engine(tokenizer, None) as llm:
        return {"plain": run(llm, GREEDY, DRAWN), "penalized": run(llm, GREEDY, DRAWN, PENALIZED)}


def test_the_target_as_its_own_draft_model_is_always_right(tokenizer: str, without, tmp_path: Path):
    """From an Orbax folder; in chunks beside decoding rows, and again where the prefix cache has both models' pages."""
    loaded = load_model(EngineConfig(model=str(TARGET), dtype="float32"))
    save_folder(tmp_path / "draft", loaded.stored_params, loaded.hf_config, {})
    with engine(tokenizer, draft_model(tmp_path / "draft")) as llm:
        assert run(llm, GREEDY, DRAWN) == without["plain"]
        assert run(llm, GREEDY, DRAWN) == without["plain"]
        assert all_accepted(llm)
        assert run(llm, GREEDY, DRAWN, PENALIZED) == without["penalized"]


@pytest.mark.matrix
@pytest.mark.parametrize("options", [dict(num_pages=22), dict(mesh="tensor=2,data=2", enable_expert_parallel=True)],
                         ids=str)  # fmt: skip
def test_multi_token_prediction(options: dict, tokenizer: str, tmp_path: Path):
    """On one device CI does so beside everything else: tests/features."""
    golden = np.load(GOLDENS / "deepseek-v3" / "golden.npz")
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(3)]
    speculative = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    with engine(tokenizer, speculative, write_with_mtp(tmp_path / "mtp"), **(dict(max_model_len=64) | options)) as llm:
        for _ in range(2):
            outputs = run(llm, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), prompts=prompts)
            assert outputs == [golden[f"greedy_{i}"].tolist() for i in range(3)]
        assert llm.service.engine.stats.draft_tokens > 50


SMALL, START = 8, [3, 5, 4]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a drafter of eight tokens."""
    folder, rng = tmp_path_factory.mktemp("small"), np.random.default_rng(3)
    config = json.loads((TARGET / "config.json").read_text()) | {"vocab_size": SMALL}
    tensors = load_file(TARGET / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:SMALL] * 0.4  # smaller logits
    for name in ("target", "drafter"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / name / "model.safetensors")
        tensors = {key: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32) for key, x in tensors.items()}
    return folder / "target", folder / "drafter"


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "presence": dict(presence_penalty=1.5),
    "frequency": dict(frequency_penalty=0.4),
    "repetition": dict(repetition_penalty=1.7),
    "bias": dict(logit_bias={0: 1.5, 3: -1.5, 6: 0.5}),
    "allowed": dict(allowed_token_ids=[0, 2, 4, 5]),
    "bad word": dict(bad_words=["4"]),
    "bad words": dict(bad_words=["3 4", "5 5 1"]),
    "top_k": dict(top_k=4),
    "top_p": dict(top_p=0.7),
    "min_p": dict(min_p=0.3),
    "temperature": dict(temperature=0.6),
    "min_tokens": dict(min_tokens=9, stop_token_ids=[2]),
    "together": dict(presence_penalty=0.5, repetition_penalty=1.2, logit_bias={1: 1.0}, top_k=5, top_p=0.9, min_p=0.05,
                     temperature=1.4, min_tokens=4, stop_token_ids=[7]),
}  # fmt: skip


@pytest.mark.slow
def test_rejection_gives_each_token_its_distribution(
    small: tuple[Path, Path], tokenizer: str, monkeypatch: pytest.MonkeyPatch
):
    """Given those before it, beside every option, preemptions and other answers, all in the same batches; and the same
    whatever else is in the batch. The other ways to draw give the very tokens of no speculation."""
    target, drafter = small
    requests, answers, length = 10, 3, 22
    monkeypatch.setattr("serving.validation.bad_words_token_ids",
                        lambda words, _: tuple(tuple(map(int, word.split())) for word in words))
    plain = SamplingParams(max_tokens=length, ignore_eos=True, n=answers)
    kinds = {name: msgspec.structs.replace(plain, **fields) for name, fields in OPTIONS.items()}
    each = [name for _ in range(requests) for name in kinds]
    given = [msgspec.structs.replace(kinds[name], seed=1000 * i) for i, name in enumerate(each)]
    short = [SamplingParams(seed=seed, max_tokens=4, ignore_eos=True) for seed in range(8)]
    with engine(tokenizer, draft_model(drafter, "probabilistic"), target, max_num_seqs=4, num_pages=10,
                max_model_len=32) as llm:  # fmt: skip
        state = llm.service.engine._core._runner._program.state_shapes  # type: ignore[attr-defined]
        layers, page, keys_and_values, heads, head_dim, size = 3, 8, 2, 2, 16, 4
        assert (bytes_per_device(state(16)) - bytes_per_device(state(8))) // 8 == (
            2 * layers * page * keys_and_values * heads * head_dim * size)  # fmt: skip
        together = run(llm, *short, prompts=[START] * len(short))
        assert together == [run(llm, sampling, prompts=[START])[0] for sampling in short]
        outputs = drafting.run(llm, [START] * len(given), given)
        counted = llm.service.engine.stats
        assert counted.num_preemptions > 20 and 0.2 < counted.accepted_tokens / counted.draft_tokens < 0.9
    every: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for number, (kind, of) in enumerate(kinds.items()):
        found = [one.token_ids for name, output in zip(each, outputs, strict=True) if name == kind
                 for one in output.outputs]  # fmt: skip
        assert len(found) == requests * answers < 2 * len(set(map(tuple, found)))
        logits = logits_after(target, found, length)
        p = np.array([chances(logits[row, i], START, tokens[:i], of) for row, tokens in enumerate(found)
                      for i in range(len(tokens))])  # fmt: skip
        drawn = np.concatenate(found)
        assert p[np.arange(len(drawn)), drawn].all(), kind
        before = np.concatenate([[START[-1], *tokens[:-1]] for tokens in found])
        index = np.concatenate([np.arange(len(tokens)) // 4 for tokens in found])
        for groups in (before, index):
            assert likelihood(drawn, p, groups) > 1e-3 / len(kinds), kind
        every.append((drawn, p, SMALL * number + before))
    assert likelihood(*map(np.concatenate, zip(*every, strict=True))) > 1e-3


def logits_after(target: Path, answers: Sequence[list[int]], length: int) -> np.ndarray:
    """Of every token of each answer: [answers, length, SMALL]."""
    model, size = load(target), len(START) + length
    rows = [([*START, *answer, *[0] * length][:size], 0) for answer in answers]
    step = batch(rows, num_tokens=size * len(rows), num_rows=len(rows), row_pages=-(-size // 8))
    logits, _ = all_logits(model, kv_pages(model, num_pages=1 + len(rows) * -(-size // 8)), step)
    return np.asarray(logits).reshape(len(rows), size, SMALL)[:, len(START) - 1 :]


@pytest.mark.slow
def test_rejection_of_what_the_targets_own_layer_draws(tokenizer: str, tmp_path: Path):
    vocab, folder = 5, write_with_mtp(tmp_path / "mtp")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    of_tokens = config["vocab_size"], config["hidden_size"]
    smaller = {name: 0.5 * x[:vocab] for name, x in tensors.items() if x.shape == of_tokens}
    save_file(tensors | smaller, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab}))
    speculative = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False,
                   "draft_sample_method": "probabilistic"}  # fmt: skip
    check_distribution(speculative, folder, vocab, tokenizer)


def test_what_cannot_be_is_refused(tokenizer: str, small: tuple[Path, Path]):
    for speculative, options, message in (
        (draft_model(small[1]), {}, "8 tokens, the target 128; it must have the target's vocabulary"),
        (draft_model(TARGET / "nothing"), {}, "nothing: no such file or folder"),
        (draft_model(TARGET), dict(mesh="context=2"), "drafts on the device, which --mesh context=2 has no part for"),
        ({"method": "mtp", "num_speculative_tokens": 2}, {}, "that DeepSeek-V3 is published with; .* has none"),
    ):
        with pytest.raises(ConfigError, match=message), engine(tokenizer, speculative, **options):
            pass
