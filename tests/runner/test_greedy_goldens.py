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

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "smollm2_greedy.json").read_text())
PROMPTS = GOLDEN["prompts"]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
SIZES = dict(max_model_len=512, max_num_seqs=32, max_num_batched_tokens=128, num_pages=400, dtype="float32")

pytestmark = pytest.mark.slow


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
    assert (ours.token_id, ours.rank) == (want["token_id"], want["rank"])
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
    for prompt in PROMPTS[::4]:
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


def test_in_chunks_of_16():
    with engine(long_prefill_token_threshold=16) as llm:
        check(run(llm))


def test_after_preemptions_in_a_tiny_pool():
    with engine(num_pages=60) as llm:
        check(run(llm))
        assert llm.service.engine.stats.num_preemptions > 0


@pytest.mark.parametrize("mesh, count", [("8x1", 20), ("4x2", 20), ("1x8", 6)])
def test_on_a_mesh(mesh: str, count: int):
    with engine(mesh=mesh) as llm:
        check(run(llm, PROMPTS[:count]), PROMPTS[:count])
