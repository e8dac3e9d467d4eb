"""Logits against transformers, for tiny random models of every family."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from model.transformer import Transformer
from tests.model import harness
from tests.tolerances import LOGITS_FLOAT32

GOLDENS = Path(__file__).parent.parent / "goldens"
FOLDERS = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))


# Whose RoPE follows from the longest sequence that is served: transformers takes each sequence as that.
BY_LENGTH = ("llama-dynamic-rope", "phi3-longrope")

NEW = [name for name in FOLDERS if "greedy_0" in np.load(GOLDENS / name / "golden.npz").files]
SLOW = pytest.mark.slow
# Four layers to compile; two models; most mixtures of experts, whose grouped matmuls take long to compile.
LONG = ("olmo3", "llama-dynamic-rope", "mixtral", "qwen2-moe", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3")


def check(model: Transformer, golden: Mapping[str, np.ndarray], length: int) -> None:
    ids, want = golden[f"tokens_{length}"], golden[f"logits_{length}"]
    groups = model.rules.num_groups
    step = harness.batch([(ids, 0)], num_tokens=80, num_rows=2, row_pages=12, num_groups=groups)
    got, _ = harness.all_logits(model, harness.kv_pages(model, num_pages=16 * groups), step)
    for of_group in np.asarray(got).reshape(groups, 80, -1):
        np.testing.assert_allclose(of_group[: len(ids)], want, atol=LOGITS_FLOAT32, rtol=0)


def test_goldens_are_there():
    assert len(FOLDERS) >= 22 and len(NEW) >= 10


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name in LONG else ()) for name in FOLDERS])
def test_logits(name: str):
    golden = np.load(GOLDENS / name / "golden.npz")
    lengths = sorted(int(key.split("_")[1]) for key in golden if key.startswith("tokens_"))
    assert lengths
    model = harness.load(GOLDENS / name)
    for length in lengths:
        if name in BY_LENGTH:
            model = harness.load(GOLDENS / name, context=length)
        check(model, golden, length)


@pytest.mark.parametrize("name, mesh", [
    pytest.param(name, mesh, marks=() if name == "llama2-mha" or mesh == "8x1" else SLOW)
    for name in ("llama2-mha", "qwen3-qk-norm", "llama-mqa") for mesh in ("8x1", "4x2", "1x8", "2x2")
])  # fmt: skip
def test_logits_on_a_mesh(name: str, mesh: str):
    """Whatever divides is sharded, the rest replicated; the logits stay."""
    check(harness.load(GOLDENS / name, mesh), np.load(GOLDENS / name / "golden.npz"), 33)


# Heads that are normed across devices, patterns of layers, latents with experts.
@pytest.mark.parametrize("name, mesh", [("olmo2", "8x1"), ("gemma3", "2x4"), ("deepseek-v3", "8x1")])
def test_new_families_on_a_mesh(name: str, mesh: str):
    """All of them are compared by the tokens that the engine gives, in tests/runner/test_family_goldens.py."""
    golden = np.load(GOLDENS / name / "golden.npz")
    length = max(int(key.split("_")[1]) for key in golden if key.startswith("tokens_"))
    check(harness.load(GOLDENS / name, mesh), golden, length)


@pytest.mark.parametrize("name", ["mistral-window", "llama3-rope", "gemma2"])
def test_chunks_and_decode_give_the_logits_of_one_prefill(name: str):
    """Chunks of odd sizes, then single tokens, beside another row."""
    model = harness.load(GOLDENS / name)
    golden = np.load(GOLDENS / name / "golden.npz")
    ids, want = golden["tokens_33"], golden["logits_33"]
    pages, got = harness.kv_pages(model, num_pages=32), []
    for start, end in ((0, 5), (5, 22), (22, 31), (31, 32), (32, 33)):
        other = (golden["tokens_7"][:3], 0)
        rows = [(ids[start:end], start), other]
        step = harness.batch(rows, num_tokens=32, num_rows=2, row_pages=12)
        logits, pages = harness.all_logits(model, pages, step)
        got.append(np.asarray(logits)[: end - start])
    np.testing.assert_allclose(np.concatenate(got), want, atol=LOGITS_FLOAT32, rtol=0)
