"""The real model's greedy output, token by token as transformers gave it, whatever the engine does on the way."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from serving.llm import LLM, RequestOutput, SamplingParams
from serving.request import Logprobs
from tests.tolerances import RANK

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "smollm2_greedy.json").read_text())
PROMPTS = GOLDEN["prompts"]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
SIZES = dict(max_model_len=512, max_num_seqs=32, max_num_batched_tokens=128, num_pages=400, dtype="float32")

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@contextmanager
def engine(**options) -> Iterator[LLM]:
    with LLM(progress=False, check_integrity=True, **(SIZES | options)) as llm:
        yield llm
        assert llm.service.engine.stats.compile_misses == 0
        assert llm.service.engine.stats.kv_cache_usage == 0
    del llm
    gc.collect()


def run(llm: LLM, prompts=PROMPTS, sampling=GREEDY) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p["prompt_token_ids"]} for p in prompts], sampling, use_tqdm=False)


def check(outputs: list[RequestOutput], prompts=PROMPTS) -> None:
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.outputs[0].token_ids == prompt["output_token_ids"], prompt["name"]


def named(names) -> list[dict]:
    found = [prompt for prompt in PROMPTS if prompt["name"] in names]
    assert len(found) == len(names) > 1
    return found


def assert_same(ours: Logprobs, want: dict) -> None:
    assert ours.token_id == want["token_id"] and abs(ours.rank - want["rank"]) <= RANK * want["rank"]
    np.testing.assert_allclose(ours.logprob, want["logprob"], atol=2e-4)
    np.testing.assert_allclose(ours.top_logprobs, want["top_logprobs"], atol=2e-4)
    close = np.diff(want["top_logprobs"]).max(initial=-1) > -1e-3  # near-ties may come in any order
    assert close or ours.top_ids == want["top_ids"]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with engine() as llm:
        yield llm


def test_there_are_enough_prompts():
    assert len(PROMPTS) >= 20 and all(len(p["output_token_ids"]) == 64 for p in PROMPTS)


def test_in_a_batch_and_again_with_prefix_hits(plain: LLM):
    check(run(plain))
    again = run(plain)
    check(again)
    long = [output for output in again if len(output.prompt_token_ids) > 16]
    assert long and all(output.num_cached_tokens >= 16 for output in long)


def test_alone(plain: LLM):
    for prompt in PROMPTS[::8]:
        check(run(plain, [prompt]), [prompt])


def test_logprobs(plain: LLM):
    prompts = named(GOLDEN["logprobs"])
    outputs = run(plain, prompts, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=5))
    check(outputs, prompts)
    for output, prompt in zip(outputs, prompts, strict=True):
        got = output.outputs[0].logprobs
        assert got is not None and len(got) == 64
        for ours, want in zip(got, GOLDEN["logprobs"][prompt["name"]], strict=True):
            assert_same(ours, want)


def test_prompt_logprobs(plain: LLM):
    prompts = named(GOLDEN["prompt_logprobs"])
    outputs = run(plain, prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5))
    for output, prompt in zip(outputs, prompts, strict=True):
        got = output.prompt_logprobs
        assert got is not None and got[0] is None and len(got) == len(prompt["prompt_token_ids"])
        for ours, want in zip(got[1:], GOLDEN["prompt_logprobs"][prompt["name"]], strict=True):
            assert ours is not None
            assert_same(ours, want)


def test_n_shares_one_prefill(plain: LLM):
    prompt = next(p for p in PROMPTS if len(p["prompt_token_ids"]) > 100)
    before = plain.service.engine.stats.prompt_tokens_cached
    [output] = run(plain, [prompt], SamplingParams(n=4, temperature=0, max_tokens=64, ignore_eos=True))
    assert all(one.token_ids == prompt["output_token_ids"] for one in output.outputs)
    shared = len(prompt["prompt_token_ids"]) // 16 * 16
    assert plain.service.engine.stats.prompt_tokens_cached - before >= 3 * (shared - 16)


OPTIONS = [
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, logit_bias={28: 5.0, 30: -100.0}, max_tokens=24, min_tokens=24),
    SamplingParams(temperature=1.0, top_k=8, min_p=0.05, presence_penalty=1.0, seed=2, max_tokens=24, logprobs=3),
    SamplingParams(temperature=0, bad_words=(" the", "\n\nThe answer"), prompt_logprobs=2, max_tokens=24),
]


def run_options(llm: LLM) -> list[RequestOutput]:
    """Every prompt with some option: together, and each in its own way."""
    tokens = [{"prompt_token_ids": p["prompt_token_ids"]} for p in PROMPTS]
    return llm.generate(tokens, [OPTIONS[i % len(OPTIONS)] for i in range(len(PROMPTS))], use_tqdm=False)


@pytest.fixture(scope="module")
def with_options(plain: LLM) -> list[RequestOutput]:
    return run_options(plain)


def check_options(outputs: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for ours, want in zip(outputs, wanted, strict=True):
        assert ours.outputs[0].token_ids == want.outputs[0].token_ids
        for got, expected in ((ours.outputs[0].logprobs, want.outputs[0].logprobs),
                              (ours.prompt_logprobs, want.prompt_logprobs)):  # fmt: skip
            assert (got is None) == (expected is None)
            for one, other in zip(got or [], expected or [], strict=True):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    assert one.token_id == other.token_id
                    np.testing.assert_allclose(one.logprob, other.logprob, atol=2e-4)


def test_in_chunks_of_16(with_options):
    with engine(long_prefill_token_threshold=16) as llm:
        check(run(llm, PROMPTS[::2]), PROMPTS[::2])
        check_options(run_options(llm), with_options)


def test_after_preemptions_in_a_tiny_pool(with_options):
    with engine(num_pages=50, max_num_seqs=16) as llm:
        check(run(llm, PROMPTS[::2]), PROMPTS[::2])
        greedy_preemptions = llm.service.engine.stats.num_preemptions
        assert greedy_preemptions > 0
        check_options(run_options(llm), with_options)
        assert llm.service.engine.stats.num_preemptions > greedy_preemptions


@pytest.mark.parametrize("mesh", ["8x1", "4x2"])
def test_on_a_mesh(mesh: str):
    """Few of them, in few shapes: all simulated devices share the cores."""
    with engine(mesh=mesh, max_num_seqs=8, max_num_batched_tokens=32) as llm:
        outputs = run(llm, PROMPTS[:8], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    for output, prompt in zip(outputs, PROMPTS, strict=False):
        assert output.outputs[0].token_ids == prompt["output_token_ids"][:24], prompt["name"]
