"""The LLM class on the real model: what a notebook does, and every sampling option end to end."""

from collections.abc import Iterator
from threading import Thread
from time import sleep
from typing import Any

import pytest

from serving.config import EngineConfig
from serving.errors import EngineDead, InvalidRequest
from serving.llm import LLM, SamplingParams
from serving.request import StructuredOutputs
from tests.decoding.grammar.schema_cases import SCHEMAS, check
from tests.runner.test_greedy_goldens import SIZES

pytestmark = [pytest.mark.slow, pytest.mark.optimized]
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(progress=False, check_integrity=True, **SIZES) as llm:
        yield llm
        stats = llm.service.engine.stats
        assert stats.compile_misses == 0 and stats.kv_cache_usage == 0


def ids(llm: LLM, prompt=PROMPT, **sampling) -> list[int]:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 12} | sampling))
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


def test_chat_knows_the_capital(llm: LLM):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    first, second = llm.chat([question, question], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert "Paris" in first.outputs[0].text and first.outputs[0].finish_reason == "stop"
    assert first.outputs[0].text == second.outputs[0].text
    assert first.prompt is not None and first.prompt.endswith("<|im_start|>assistant\n")
    given: Any = {"chat_template": "{{ tools[0] }} {{ mood }}", "tools": ["f"], "chat_template_kwargs": {"mood": 1}}
    assert llm.chat(question, SamplingParams(max_tokens=1), use_tqdm=False, **given)[0].prompt == "f 1"
    with pytest.raises(TypeError, match="enable_thinking"):
        llm.chat(question, enable_thinking=False)  # type: ignore[call-arg]


def test_a_seed_gives_the_same_tokens_whatever_else_runs(llm: LLM):
    hot = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=24, ignore_eos=True)
    alone = llm.generate(PROMPT, hot, use_tqdm=False)[0].outputs[0].token_ids
    others = [SamplingParams(temperature=1.3, seed=i, max_tokens=30, top_k=i) for i in range(9)]
    crowd = llm.generate([PROMPT] * 10, [*others, hot], use_tqdm=False)
    assert crowd[-1].outputs[0].token_ids == alone
    assert ids(llm, temperature=1.0, seed=8, max_tokens=24, top_p=0.95, ignore_eos=True) != alone


def test_n_are_the_single_requests_with_following_seeds(llm: LLM):
    sampling = {"temperature": 1.0, "max_tokens": 10, "ignore_eos": True}
    [output] = llm.generate(PROMPT, SamplingParams(n=3, seed=40, **sampling), use_tqdm=False)
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert [one.token_ids for one in output.outputs] == [ids(llm, seed=40 + i, **sampling) for i in range(3)]


def test_more_prompts_than_a_server_lets_wait(llm: LLM):
    prompts = [{"prompt_token_ids": [100 + i % 1000]} for i in range(EngineConfig().max_num_waiting + 50)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1] * len(prompts)


def test_bias_allowed_and_banned(llm: LLM):
    plain = ids(llm)
    assert ids(llm, logit_bias={plain[0]: -100.0})[0] != plain[0]
    assert set(ids(llm, allowed_token_ids=(500, 501, 502), ignore_eos=True)) <= {500, 501, 502}
    word = llm.service.tokenizer.decode(plain[2:4])
    without = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, bad_words=(word,)), use_tqdm=False)
    assert word in llm.service.tokenizer.decode(plain)
    assert word not in without[0].outputs[0].text


def test_min_tokens_holds_the_end_back(llm: LLM):
    plain = ids(llm)
    stop = plain[3]
    assert ids(llm, stop_token_ids=(stop,))[-1] == stop
    longer = ids(llm, stop_token_ids=(stop,), min_tokens=8)
    assert len(longer) >= 8 and stop not in longer[:8]


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 5.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}], ids=str
)
def test_penalties_act(llm: LLM, penalty):
    prompt = "ha ha ha ha ha ha ha ha"
    plain = ids(llm, prompt, max_tokens=30, ignore_eos=True)
    penalized = ids(llm, prompt, max_tokens=30, ignore_eos=True, **penalty)
    assert len(set(penalized)) > len(set(plain))


def test_lists_and_one_string_are_as_good_as_tuples():
    given: Any = dict(stop="END", stop_token_ids=[5], allowed_token_ids=[5, 6], bad_words=["no", "never"])
    same = SamplingParams(stop=("END",), stop_token_ids=(5,), allowed_token_ids=(5, 6), bad_words=("no", "never"))
    assert SamplingParams(**given) == same


def test_stop_strings_and_logprobs_end_together(llm: LLM):
    plain = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0].outputs[0].text
    stop = plain[10:14]
    sampling = SamplingParams(temperature=0, max_tokens=20, stop=(stop,), logprobs=2)
    output = llm.generate(PROMPT, sampling, use_tqdm=False)[0].outputs[0]
    assert output.text == plain[: plain.index(stop)] and output.stop_reason == stop
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)


def test_bad_requests_are_refused_before_anything_runs(llm: LLM):
    prompt_tokens = llm.service.engine.stats.prompt_tokens
    for prompt, sampling in ((PROMPT, SamplingParams(temperature=-1)), ("", SamplingParams()),
                             ({"prompt_token_ids": [10**6]}, SamplingParams()), ({}, SamplingParams())):  # fmt: skip
        with pytest.raises(InvalidRequest):
            llm.generate(prompt, sampling, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="2 sampling_params for 1 prompts"):
        llm.generate(PROMPT, [SamplingParams()] * 2, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="leaves no token"):  # refused by the engine, not by the front end
        llm.generate(PROMPT, SamplingParams(allowed_token_ids=(2,), min_tokens=3, max_tokens=9), use_tqdm=False)
    with pytest.raises(InvalidRequest, match="tools are not used by this model's chat template"):
        llm.chat([{"role": "user", "content": PROMPT}], SamplingParams(max_tokens=1), tools=[{"type": "function"}])
    assert llm.service.engine.stats.prompt_tokens == prompt_tokens


def test_every_kind_of_schema_is_kept_to(llm: LLM):
    """By all that ends: some models repeat themselves for ever where the schema lets them, say in a number's digits."""
    jobs = [(name, temperature) for name in SCHEMAS for temperature in (0.0, 1.0)]
    each = [SamplingParams(temperature=temperature, seed=1, max_tokens=60,
                           structured_outputs=StructuredOutputs(json=SCHEMAS[name])) for name, temperature in jobs]
    prompts = [f"An example of JSON: {name}\n\n" for name, _ in jobs]
    outputs = [output.outputs[0] for output in llm.generate(prompts, each, use_tqdm=False)]
    ended = 0
    for (name, _), output in zip(jobs, outputs, strict=True):
        if output.finish_reason == "stop":
            check(SCHEMAS[name], output.text)
            ended += 1
    assert ended > 0.7 * len(jobs)


def test_a_closed_llm_says_so():
    llm = LLM(progress=False, **SIZES)
    sampling, ended = SamplingParams(ignore_eos=True), []
    calls = [Thread(target=lambda: ended.append(llm.generate([PROMPT] * 4, sampling, use_tqdm=False)), daemon=True)
             for _ in range(3)]  # fmt: skip
    for call in calls:
        call.start()
    while llm.service.lifecycle.live < 12:
        sleep(0.01)
    llm.close()
    for call in calls:
        call.join(60)  # all were under way
    assert {one.outputs[0].finish_reason for outputs in ended for one in outputs} == {"abort"} and len(ended) == 3
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate(PROMPT, use_tqdm=False)
