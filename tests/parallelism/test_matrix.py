"""The table of docs/parallelism.md: every family, divided in every way, gives the greedy tokens of one device.

A cell that says why it is refused is tested for that. CI runs families on 8x1 and 2x4 against transformers
(`tests/runner/test_family_goldens.py`); `scripts/check --parallelism` runs the whole table.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.aot.families import FAMILIES, GOLDENS, WAYS, Way, mesh_of, refused
from scripts.aot.table import parallelism_table
from serving.config import EplbConfig
from serving.errors import ConfigError
from serving.llm import LLM, SamplingParams

DOCS = Path(__file__).parents[2] / "docs" / "parallelism.md"
SIZES = dict(max_num_seqs=2, max_num_batched_tokens=32, num_pages=40, block_size=8, dtype="float32")
CELLS = [(family, way) for family in FAMILIES for way in WAYS.values()]


def test_the_table_in_the_docs_is_this_one():
    assert parallelism_table() in DOCS.read_text()


def greedy(family: str, way: Way, tokenizer: str) -> Iterator[list[int]]:
    golden = np.load(GOLDENS / FAMILIES[family] / "golden.npz")
    names = sorted(name for name in golden.files if name.startswith("tokens_"))
    prompts = [golden[name].tolist() for name in names if len(golden[name]) <= 40]
    options: dict[str, Any] = dict(mesh=mesh_of(family, way), enable_expert_parallel=way.expert_parallel)
    if way.name == "context":
        options |= dict(context_parallel_threshold=16)
    if way.expert_parallel and family == "qwen2_moe":  # six experts over eight devices
        options |= dict(enable_eplb=True, eplb_config=EplbConfig(num_redundant_experts=2))
    with LLM(str(GOLDENS / FAMILIES[family]), tokenizer=tokenizer, progress=False, check_integrity=True, **options,
             **SIZES) as llm:  # fmt: skip
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        for output in llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False):
            yield output.outputs[0].token_ids


ONE = Way(name="one device", meshes=("1x1",))


@pytest.mark.matrix
@pytest.mark.parametrize("family, way", CELLS, ids=[f"{family}-{way.name}" for family, way in CELLS])
def test_cell(family: str, way: Way, tokenizer: str):
    if refused(family, way) is not None:
        with pytest.raises(ConfigError, match="no experts|there is no (latent attention|attention in chunks)"):
            list(greedy(family, way, tokenizer))
        return
    assert list(greedy(family, way, tokenizer)) == list(greedy(family, ONE, tokenizer))
