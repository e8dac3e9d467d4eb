"""The real model through the engine with the TPU and the GPU kernels, simulated: the goldens of transformers.

Simulation takes seconds a step, so prompts are short and few tokens are compared.
"""

import json
from pathlib import Path

import pytest

from serving.llm import LLM, SamplingParams

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "smollm2_greedy.json").read_text())
NUM_TOKENS = 4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["mosaic_tpu", pytest.param("mosaic_gpu", marks=pytest.mark.kernels)])
def test_greedy(backend: str):
    prompts = sorted(GOLDEN["prompts"], key=lambda p: len(p["prompt_token_ids"]))[2:4]
    # Prompts of 4 and 5 tokens in chunks of 3, then both decode together.
    with LLM(progress=False, check_integrity=True, attention_backend=backend, dtype="float32", max_model_len=64,
             max_num_seqs=2, max_num_batched_tokens=32, num_pages=16, long_prefill_token_threshold=3) as llm:
        assert llm.service.engine.info.attention_backend == backend
        outputs = llm.generate([{"prompt_token_ids": p["prompt_token_ids"]} for p in prompts],
                               SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False)
        for output, prompt in zip(outputs, prompts, strict=True):
            assert output.outputs[0].token_ids == prompt["output_token_ids"][:NUM_TOKENS], prompt["name"]
