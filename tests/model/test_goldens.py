"""Logits against transformers, for tiny random models of every family."""

from pathlib import Path

import numpy as np
import pytest

from tests.model import harness

GOLDENS = Path(__file__).parent.parent / "goldens"
FOLDERS = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))


def test_goldens_are_there():
    assert len(FOLDERS) >= 9


@pytest.mark.parametrize("name", FOLDERS)
def test_logits(name: str):
    model = harness.load(GOLDENS / name)
    golden = np.load(GOLDENS / name / "golden.npz")
    lengths = sorted(int(key.split("_")[1]) for key in golden if key.startswith("tokens_"))
    assert lengths
    for length in lengths:
        ids, want = golden[f"tokens_{length}"], golden[f"logits_{length}"]
        pages = harness.kv_pages(model.config, num_pages=16)
        step = harness.batch([(ids, 0)], num_tokens=80, num_rows=2, row_pages=12)
        got, _ = harness.all_logits(model, pages, step)
        np.testing.assert_allclose(np.asarray(got)[: len(ids)], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mesh", ["8x1", "4x2", "1x8", "2x2"])
@pytest.mark.parametrize("name", ["llama2-mha", "qwen3-qk-norm", "llama-mqa"])
def test_logits_on_a_mesh(name: str, mesh: str):
    """Whatever divides is sharded, the rest replicated; the logits stay."""
    model = harness.load(GOLDENS / name, mesh)
    golden = np.load(GOLDENS / name / "golden.npz")
    ids, want = golden["tokens_33"], golden["logits_33"]
    step = harness.batch([(ids, 0)], num_tokens=80, num_rows=2, row_pages=12)
    got, _ = harness.all_logits(model, harness.kv_pages(model.config, num_pages=16), step)
    np.testing.assert_allclose(np.asarray(got)[: len(ids)], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["mistral-window", "llama3-rope"])
def test_chunks_and_decode_give_the_logits_of_one_prefill(name: str):
    """Chunks of odd sizes, then single tokens, beside another row."""
    model = harness.load(GOLDENS / name)
    golden = np.load(GOLDENS / name / "golden.npz")
    ids, want = golden["tokens_33"], golden["logits_33"]
    pages, got = harness.kv_pages(model.config, num_pages=32), []
    for start, end in ((0, 5), (5, 22), (22, 31), (31, 32), (32, 33)):
        other = (golden["tokens_7"][:3], 0)
        rows = [(ids[start:end], start), other]
        step = harness.batch(rows, num_tokens=32, num_rows=2, row_pages=12)
        logits, pages = harness.all_logits(model, pages, step)
        got.append(np.asarray(logits)[: end - start])
    np.testing.assert_allclose(np.concatenate(got), want, atol=1e-4, rtol=0)
