"""Greedy tokens through the engine for a tiny model of every family, as transformers gave them without a cache: prompts
in chunks beside decoding rows, and on meshes."""

import re
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
# Divided as others are that CI runs.
VARIANTS = ("deepseek-v2-lite", "glm", "olmo3", "phi3-longrope", "qwen3-yarn-rope")


def check(name: str, tokenizer: str, mesh: str, progress: bool = False) -> None:
    golden = np.load(GOLDENS / name / "golden.npz")
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(3)]
    with LLM(str(GOLDENS / name), tokenizer=tokenizer, mesh=mesh, progress=progress, check_integrity=True,
             **SIZES) as llm:  # fmt: skip
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
@pytest.mark.parametrize("mesh", ["8x1", "2x4"])
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.matrix if name in VARIANTS else ()) for name in FAMILIES
])  # fmt: skip
def test_greedy_on_a_mesh(name: str, mesh: str, tokenizer: str):
    check(name, tokenizer, mesh)


@pytest.mark.slow
def test_start_tells_what_lies_where(tokenizer: str, capsys: pytest.CaptureFixture[str]):
    """Two kv heads, each on two devices."""
    check("gpt-oss", tokenizer, "4x2", progress=True)
    told = capsys.readouterr().err
    for line in (
        "Mesh tensor=4,data=2 on cpu (8 of 8 devices)",
        "  data  tensor  0      1      2      3",
        "  0             cpu:0  cpu:1  cpu:2  cpu:3",
        "  1             cpu:4  cpu:5  cpu:6  cpu:7",
        "  8 in each layer; 2 on a device; rows are gathered",
        # KV: keys and values of one head of 8 numbers, 8 tokens on 40 pages, in 4 layers: 81,920 bytes.
        "Bytes on each device: weights 0.07 MB, KV 0.08 MB, sampling state 0.00 MB, temporaries .* MB; .* MB in all",
        "Replicated: kv heads: 2 kv heads are fewer than tensor=4: each device .* so every kv head is on 2 devices",
        "Replicated over data: all weights (0.07 MB): each group computes its own tokens",
        "Replicated over tensor: mlp.router, .*norm.scale and 1 more (0.01 MB): tensor divides none of their axes",
        "KV cache: 39 pages of 8 tokens = 312 tokens in each of 2 data groups, 4.9 sequences of 64 tokens",
        "Steps: up to 2 sequences and 16 tokens in each of 2 data groups, 2 compiled shapes",
    ):
        assert re.search(f"^{re.escape(line).replace(re.escape('.*'), '.*')}$", told, re.MULTILINE), line
