"""What a request gets does not depend on its data group: slots' sampling state, log-probabilities, shared prompts and
preemption in pools that are too small, on four groups as on one device."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from serving.llm import LLM, RequestOutput, SamplingParams
from tests.tolerances import LOGITS_FLOAT32

GOLDENS = Path(__file__).parents[1] / "goldens"
VOCAB = 60
PLAIN = SamplingParams(temperature=0.8, max_tokens=30, ignore_eos=True)


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = Random(0)
    base = [rng.randrange(3, VOCAB) for _ in range(24)]
    kinds = [
        {},
        {"n": 3},
        {"temperature": 0, "logprobs": 2},
        {"logit_bias": {5: 6.0, 9: -6.0}},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"allowed_token_ids": tuple(range(20, 40)), "min_tokens": 9, "stop_token_ids": (21, 22)},
        {"prompt_logprobs": 1, "max_tokens": 4},
    ]
    return [
        (base[: rng.randrange(4, 24)] + [rng.randrange(3, VOCAB) for _ in range(4)], replace(PLAIN, seed=seed, **kind))
        for seed, kind in enumerate(4 * kinds)
    ]


def run(mesh: str, tokenizer: str) -> tuple[list[RequestOutput], int]:
    """The outputs, and how often a sequence was preempted."""
    with LLM(
        str(GOLDENS / "olmo2"), tokenizer=tokenizer, mesh=mesh, max_num_seqs=2, max_num_batched_tokens=16,
        num_pages=10, block_size=8, max_model_len=64, dtype="float32", check_integrity=True, progress=False,
    ) as llm:  # fmt: skip
        prompts, sampling = zip(*requests(), strict=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], list(sampling), use_tqdm=False)
        stats = llm.service.engine.stats
        assert stats.compile_misses == 0 and stats.kv_cache_usage == 0 and stats.prefix_cache_hits > 0
        return outputs, stats.num_preemptions


@pytest.mark.slow
def test_four_groups_answer_as_one_device(tokenizer: str):
    one, _ = run("1x1", tokenizer)
    four, num_preemptions = run("tensor=1,data=4", tokenizer)
    assert num_preemptions > 0
    for number, (want, got) in enumerate(zip(one, four, strict=True)):
        assert [o.token_ids for o in got.outputs] == [o.token_ids for o in want.outputs], f"request {number}"
        assert [o.finish_reason for o in got.outputs] == [o.finish_reason for o in want.outputs]
        for answer, other in zip(want.outputs, got.outputs, strict=True):
            compare(answer.logprobs, other.logprobs)
        compare(want.prompt_logprobs, got.prompt_logprobs)


def compare(want: list | None, got: list | None) -> None:
    assert (want is None) == (got is None)
    for one, other in zip(want or [], got or [], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.token_id == other.token_id and one.top_ids == other.top_ids
            np.testing.assert_allclose(other.logprob, one.logprob, atol=LOGITS_FLOAT32)
