"""Draft models and DeepSeek-V3's extra layer in the engine: what comes out has not changed, or not its distribution."""

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy import stats

from checkpoints.orbax_folder import save_folder
from serving.config import EngineConfig
from serving.errors import ConfigError
from serving.llm import LLM, SamplingParams
from serving.loading import load_model
from tests.model.harness import GOLDENS, all_logits, batch, kv_pages, load
from tests.model.speculators import write_with_mtp
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
        tensors = {key: x + 0.15 * rng.standard_normal(x.shape).astype(np.float32) for key, x in tensors.items()}
    return folder / "target", folder / "drafter"


def joint(target: Path) -> np.ndarray:
    """Of the four tokens after START."""
    model = load(target)
    sequences = [[*START, *np.unravel_index(i, (SMALL,) * 3)] for i in range(SMALL**3)]
    step = batch([(sequence, 0) for sequence in sequences], num_tokens=6 * len(sequences), num_rows=len(sequences),
                 row_pages=1)  # fmt: skip
    logits, _ = all_logits(model, kv_pages(model, num_pages=len(sequences) + 1), step)
    p = np.asarray(jax.nn.softmax(logits)).reshape(SMALL, SMALL, SMALL, 6, SMALL)
    return np.einsum("a,ab,abc,abcd->abcd", p[0, 0, 0, 2], p[:, 0, 0, 3], p[:, :, 0, 4], p[:, :, :, 5])


@pytest.mark.slow
def test_rejection_gives_the_targets_distribution_and_the_same_whatever_else_is_in_the_batch(
    small: tuple[Path, Path], tokenizer: str
):
    """The other ways to draw give the very tokens of no speculation."""
    target, drafter = small
    count, expected = 800, joint(target)
    speculative = draft_model(drafter, "probabilistic")
    with engine(tokenizer, speculative, target, max_num_seqs=8, max_num_batched_tokens=32, num_pages=None) as llm:
        memory = llm.service.engine._core._runner.memory
        layers, page, keys_and_values, heads, head_dim, size = 3, 8, 2, 2, 16, 4
        assert memory.page == 2 * layers * page * keys_and_values * heads * head_dim * size  # of both models
        many = [SamplingParams(temperature=1.0, seed=seed, max_tokens=4, ignore_eos=True) for seed in range(count)]
        tokens = np.array(run(llm, *many, prompts=[START] * count))
        alone = [run(llm, sampling, prompts=[START])[0] for sampling in many[:8]]
        np.testing.assert_array_equal(alone, tokens[:8])
        found = llm.service.engine.stats
        assert 0.2 < found.accepted_tokens / found.draft_tokens < 0.9
    for pair in ((0, 1), (1, 2), (2, 3), (1, 3)):
        table = expected.sum(axis=tuple({0, 1, 2, 3} - {*pair})).ravel() * count
        counts = np.bincount(tokens[:, pair[0]] * SMALL + tokens[:, pair[1]], minlength=SMALL**2)
        often = table >= 5
        table, counts = (np.append(x[often], x[~often].sum() + 1e-9) for x in (table.astype(float), counts))
        assert stats.chisquare(counts, table * counts.sum() / table.sum()).pvalue > 1e-3, pair


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
