"""The engine on meshes with a context axis: greedy tokens and log-probabilities of one device, whatever the scheduler
does on the way, and what a step that is spread over the axis looks like to the compiler."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from serving.llm import LLM, RequestOutput, SamplingParams
from tests.tolerances import LOGITS_FLOAT32

GOLDENS = Path(__file__).parents[1] / "goldens"
SIZES = dict(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64, dtype="float32", block_size=4)
THRESHOLD = 48
rng = np.random.default_rng(4)
SHARED = rng.integers(0, 60, 100).tolist()
LENGTHS = (55, 3, 37, 70)  # of prompts, after the shared tokens where they are long


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prompts and answers are token ids; the engine wants some tokenizer all the same."""
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(GOLDENS / "tokenizer" / "bpe.model", folder / "tokenizer.model")
    return str(folder)


def prompts(round_: int) -> list[dict]:
    """The second round finds the first tokens of two prompts in the cache."""
    tokens = np.random.default_rng(round_)
    return [{"prompt_token_ids": (SHARED + tokens.integers(0, 60, n).tolist() if n > 50 else
                                  tokens.integers(0, 60, n).tolist())} for n in LENGTHS]  # fmt: skip


def run(name: str, tokenizer: str, **options) -> tuple[list[RequestOutput], LLM]:
    llm = LLM(str(GOLDENS / name), tokenizer=tokenizer, progress=False, check_integrity=True, **(SIZES | options))
    outputs = []
    for round_, wanted in enumerate((None, 1)):  # log-probabilities of a prompt are not in the prefix cache
        greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=1, prompt_logprobs=wanted)
        outputs += llm.generate(prompts(0) + prompts(round_), greedy, use_tqdm=False)
    assert llm.service.engine.stats.compile_misses == 0
    return outputs, llm


def check(name: str, tokenizer: str, mesh: str, **options) -> LLM:
    want, plain = run(name, tokenizer)
    plain.close()
    got, llm = run(name, tokenizer, mesh=mesh, context_parallel_threshold=THRESHOLD, **options)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        for kind in (lambda x: x.prompt_logprobs, lambda x: x.outputs[0].logprobs):
            values = [[0 if at is None else at.logprob for at in kind(x) or ()] for x in (ours, theirs)]
            np.testing.assert_allclose(*values, atol=2 * LOGITS_FLOAT32)
    return llm


def test_tiny(tokenizer):
    with check("llama-gqa-tied", tokenizer, "context=4", num_pages=17) as llm:
        stats = llm.service.engine.stats
        assert stats.prefix_cache_hits > 0 and stats.num_preemptions > 0
