"""Greedy tokens through the engine for a tiny model of every family, as transformers gave them without a cache: prompts
in chunks beside decoding rows, and on meshes."""

from pathlib import Path

import numpy as np
import pytest

from serving.llm import LLM, SamplingParams

GOLDENS = Path(__file__).parents[1] / "goldens"
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SIZES = dict(max_num_seqs=2, max_num_batched_tokens=16, num_pages=40, block_size=8, dtype="float32")
FAMILIES = sorted(p.parent.name for p in GOLDENS.glob("*/golden.npz") if "greedy_0" in np.load(p).files)
WITH_EXPERTS = ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3",
                "llama4")


def check(name: str, tokenizer: str, mesh: str) -> None:
    golden = np.load(GOLDENS / name / "golden.npz")
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(3)]
    with LLM(str(GOLDENS / name), tokenizer=tokenizer, mesh=mesh, progress=False, check_integrity=True, **SIZES) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
        assert llm.service.engine.stats.compile_misses == 0
    for number, output in enumerate(outputs):
        assert output.outputs[0].token_ids == golden[f"greedy_{number}"].tolist(), f"prompt {number}"


def test_every_new_family_has_a_golden():
    assert {name.split("-")[0] for name in FAMILIES} >= {"gemma2", "gemma3", "phi3", "glm", "glm4", "olmo2", "granite"}
    assert {*WITH_EXPERTS} <= {*FAMILIES}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "phi3-window" else pytest.mark.slow) for name in FAMILIES
])  # fmt: skip
def test_greedy(name: str, tokenizer: str):
    check(name, tokenizer, "1x1")


@pytest.mark.slow
@pytest.mark.parametrize("name, mesh", [
    *((name, mesh) for name in FAMILIES for mesh in ("8x1", "2x4")),
    ("gpt-oss", "4x2"),  # two kv heads, each on two devices
])  # fmt: skip
def test_greedy_on_a_mesh(name: str, mesh: str, tokenizer: str):
    check(name, tokenizer, mesh)
