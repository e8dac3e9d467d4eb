"""Grammars end to end, beside everything else a request may ask for. The model is tiny and knows nothing, so that at
temperature 1 it draws what the grammar allows, evenly."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from checkpoints.default_model import default_model_path
from serving.errors import InvalidRequest
from serving.llm import LLM, CompletionOutput, SamplingParams
from serving.request import StructuredOutputs
from tests.decoding.grammar.schema_cases import SCHEMAS, check, obj
from tests.e2e.tiny_model import write_tiny_model
from tests.tolerances import RANK

pytestmark = pytest.mark.slow
PROMPT = "A list of people and places:"
# 240 tokens of KV: eight sequences do not fit.
SIZES = dict(max_model_len=224, max_num_seqs=8, max_num_batched_tokens=32, num_pages=16, dtype="float32")
WORD = {"type": "string", "pattern": "^[a-z]{1,12}$"}
PERSON = obj(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 150}, city={"enum": ["Paris", "London"]},
             tags={"type": "array", "items": {"enum": ["a", "bb", "日本"]}, "maxItems": 3})
# Those that a random walk comes to the end of by itself.
BOUNDED = [
    "enum", "enum with unicode", "enum with common prefixes", "const with a control character", "pattern", "length",
    "pattern with alternatives", "pattern with unicode", "one code point", "integer bounds", "exclusive bounds",
    "multiple of", "some required", "date", "ipv4", "annotations", "deeply nested",
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    with LLM(str(folder), tokenizer=str(default_model_path()), progress=False, check_integrity=True, **SIZES) as llm:
        yield llm
        stats = llm.service.engine.stats
        assert stats.compile_misses == 0 and stats.kv_cache_usage == 0


def run(llm: LLM, *each: SamplingParams) -> list[CompletionOutput]:
    outputs = llm.generate([PROMPT] * len(each), each, use_tqdm=False)
    return [one for output in outputs for one in output.outputs]


def person(**sampling: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "seed": 5, "max_tokens": 150,
                              "structured_outputs": StructuredOutputs(json=PERSON)} | sampling))


def test_all_that_comes_out_follows_its_grammar(llm: LLM):
    other = {
        "regex": (StructuredOutputs(regex="[a-c]{2,5}-[0-9]"), lambda text: text[-1].isdigit() and text[-2] == "-"),
        "choice": (StructuredOutputs(choice=("one", "two", "three")), ("one", "two", "three").__contains__),
        "lark": (StructuredOutputs(grammar='start: "a" ("b" | start)'), lambda text: set(text[:-1]) == {"a"}),
    }
    jobs: list[tuple[SamplingParams, Any]] = []
    for seed in range(2):
        common = {"temperature": 1.0, "seed": seed, "max_tokens": 210}
        for name in BOUNDED:
            jobs.append((SamplingParams(structured_outputs=StructuredOutputs(json=SCHEMAS[name]), **common),
                         lambda text, name=name: check(SCHEMAS[name], text) is not ...))
        jobs += [(SamplingParams(structured_outputs=outputs, **common), test) for outputs, test in other.values()]
    for (sampling, test), output in zip(jobs, run(llm, *(job[0] for job in jobs)), strict=True):
        assert output.finish_reason == "stop" and test(output.text), (sampling, output.text)
    stats = llm.service.engine.stats
    assert stats.forced_tokens > 0 and 0 < stats.grammar_seconds < stats.step_seconds["schedule"]


def test_forcing_changes_nothing_but_the_number_of_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    def steps_of(*each: SamplingParams) -> tuple[list[list[int]], int]:
        before = llm.service.engine.stats.steps
        return [output.token_ids for output in run(llm, *each)], llm.service.engine.stats.steps - before

    greedy = [person(temperature=0.0), person(temperature=0.0, structured_outputs=StructuredOutputs(choice=("a b c",)))]
    forced, few = steps_of(*greedy)
    monkeypatch.setattr("serving.decoding.grammar.matcher.GrammarMatcher.forced", lambda self: [])
    sampled, many = steps_of(*greedy)
    assert sampled == forced and few < 0.75 * many


def test_the_sequences_of_a_request_are_apart(llm: LLM):
    three = run(llm, person(n=3, seed=40))
    alone = run(llm, *(person(seed=40 + i) for i in range(3)))
    assert [one.token_ids for one in three] == [one.token_ids for one in alone]
    assert len({one.text for one in three}) == 3
    assert all(check(PERSON, one.text) for one in three)


def test_forced_tokens_have_their_logprobs(llm: LLM):
    plain, [told] = run(llm, person())[0], run(llm, person(logprobs=3))
    assert told.token_ids == plain.token_ids and told.logprobs is not None
    assert [entry.token_id for entry in told.logprobs] == told.token_ids
    [both] = run(llm, person(logprobs=3, prompt_logprobs=1))
    assert both.token_ids == plain.token_ids and both.logprobs is not None
    ids = llm.service.tokenizer.encode(PROMPT)
    [scored] = llm.generate([{"prompt_token_ids": ids + told.token_ids}],
                            SamplingParams(max_tokens=1, prompt_logprobs=3), use_tqdm=False)
    assert scored.prompt_logprobs is not None
    for entry, *others in zip(told.logprobs, both.logprobs, scored.prompt_logprobs[len(ids) :], strict=True):
        for other in others:
            assert other is not None and other.token_id == entry.token_id and other.top_ids == entry.top_ids
            assert abs(other.rank - entry.rank) <= RANK * entry.rank
            np.testing.assert_allclose(other.logprob, entry.logprob, atol=1e-3)


def test_a_stop_string_may_stand_in_what_is_forced(llm: LLM):
    [whole], [cut] = run(llm, person()), run(llm, person(stop=('", "ag',), logprobs=0))
    assert cut.finish_reason == "stop" and cut.stop_reason == '", "ag'
    assert cut.text == whole.text[: whole.text.index('", "ag')]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] and cut.logprobs is not None
    assert len(cut.logprobs) == len(cut.token_ids)


@pytest.mark.parametrize(
    "other",
    [{"min_tokens": 64}, {"ignore_eos": True}, {"min_tokens": 9, "logprobs": 1}, {"allowed_token_ids": (5, 6)},
     {"bad_words": ('{"', "1", "2")}, {"logit_bias": {2: -100.0}}, {"top_k": 1, "min_p": 1.0}],
    ids=str,
)  # fmt: skip
def test_the_grammar_wins(llm: LLM, other: dict[str, Any]):
    small = StructuredOutputs(json=obj(a={"enum": [1, 2]}))
    for temperature in (0.0, 1.0):
        [output] = run(llm, person(structured_outputs=small, temperature=temperature, **other))
        assert output.text in ('{"a": 1}', '{"a": 2}') and output.finish_reason == "stop"


def test_max_tokens_cut_what_is_forced(llm: LLM):
    [whole] = run(llm, person())
    for most in (1, 2, 3, 5):
        [output] = run(llm, person(max_tokens=most))
        assert output.token_ids == whole.token_ids[:most] and output.finish_reason == "length"


def test_one_code_point_outside_the_basic_plane(llm: LLM):
    schema = {"type": "string", "maxLength": 1, "pattern": "[\U0001f600-\U0001f640]"}
    for output in run(llm, *(person(structured_outputs=StructuredOutputs(json=schema), seed=i) for i in range(4))):
        assert len(json.loads(output.text)) == 1 and ord(json.loads(output.text)) >= 0x1F600


def test_requests_without_a_grammar_do_not_notice(llm: LLM):
    free = [SamplingParams(temperature=1.0, seed=i, max_tokens=20, ignore_eos=True) for i in range(3)]
    alone = [output.token_ids for output in run(llm, *free)]
    mixed = run(llm, free[0], person(), free[1], person(temperature=0.0), free[2])
    assert [output.token_ids for output in mixed[::2]] == alone


def test_prefixes_are_reused(llm: LLM):
    prompt = "Some text that is more than a page of tokens long, and then some more of it, twice: " * 2
    first, second = (llm.generate(prompt, person(), use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens > 0 and second.outputs[0].token_ids == first.outputs[0].token_ids


def test_preemption_is_not_seen(llm: LLM):
    each = [person(seed=i, logprobs=1 if i % 3 == 0 else None) for i in range(12)]
    alone = [run(llm, one)[0].token_ids for one in each]
    before = llm.service.engine.stats.num_preemptions
    assert [output.token_ids for output in run(llm, *each)] == alone
    assert llm.service.engine.stats.num_preemptions > before


def test_a_bad_grammar_is_the_requests_error_alone(llm: LLM):
    with pytest.raises(InvalidRequest, match="at /properties/a: not is not supported") as caught:
        run(llm, person(structured_outputs=StructuredOutputs(json=obj(a={"not": {}}))))
    assert caught.value.param == "structured_outputs.json"
    with pytest.raises(InvalidRequest, match="the grammar cannot go on: parser error: Too many items") as caught:
        run(llm, person(structured_outputs=StructuredOutputs(grammar='start: "a" start')))
    assert caught.value.param == "structured_outputs.grammar"
    assert b'finished_reason="error",model_name="tiny"} 1.0' in llm.service.metrics.render()
    assert run(llm, person())[0].finish_reason == "stop"
