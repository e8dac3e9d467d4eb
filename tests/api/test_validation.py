import math

import msgspec
import pytest

from serving.errors import InvalidRequest
from serving.request import SamplingParams
from serving.tokenizer.tokenizer import Tokenizer
from serving.validation import INT64_MAX, RequestLimits, bad_words_token_ids, fit_prompt, to_engine_requests, validate

LIMITS = RequestLimits(max_model_len=64, vocab_size=500)


@pytest.mark.parametrize(
    "field, value",
    [
        ("n", 0), ("n", 129), ("max_tokens", 0), ("min_tokens", -1), ("temperature", -0.1), ("temperature", 2.01),
        ("temperature", math.nan), ("temperature", math.inf), ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan),
        ("top_k", -2), ("min_p", -0.1), ("min_p", 1.1), ("frequency_penalty", 2.1), ("frequency_penalty", math.nan),
        ("presence_penalty", -2.1), ("repetition_penalty", 0.0), ("repetition_penalty", math.inf), ("seed", 1 << 63),
        ("seed", -(1 << 63) - 1), ("logprobs", 21), ("logprobs", -1), ("logprobs", 1_000_000), ("prompt_logprobs", 21),
        ("prompt_logprobs", -1), ("stop", ("",)), ("stop", ("a",) * 17), ("stop", ("a" * 1025,)), ("bad_words", ("",)),
        ("bad_words", ("a",) * 129), ("stop_token_ids", (500,)), ("stop_token_ids", (1,) * 129),
        ("logit_bias", {191222: -100.0}), ("logit_bias", {1: 101.0}), ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 1.0}), ("allowed_token_ids", ()), ("allowed_token_ids", (500,)),
        ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        validate(SamplingParams(**{field: value}), LIMITS)
    assert caught.value.param == field


@pytest.mark.parametrize(
    "field, value",
    [
        ("n", 128), ("max_tokens", 1), ("temperature", 0.0), ("temperature", 1e-6), ("temperature", 2.0),
        ("top_p", 1e-9), ("top_k", -1), ("top_k", 0), ("min_p", 1.0), ("frequency_penalty", -2.0),
        ("presence_penalty", 2.0), ("repetition_penalty", 1e-3), ("seed", INT64_MAX), ("seed", -(1 << 63)),
        ("logprobs", 0), ("logprobs", 20), ("stop", ("a",) * 16), ("stop_token_ids", (499,)),
        ("logit_bias", {0: -100.0, 499: 100.0}), ("allowed_token_ids", (0,)), ("truncate_prompt_tokens", -1),
    ],
)  # fmt: skip
def test_the_ends_of_the_ranges_are_in(field: str, value: object) -> None:
    validate(SamplingParams(**{field: value}), LIMITS)


def test_a_server_may_allow_fewer_logprobs() -> None:
    with pytest.raises(InvalidRequest, match="logprobs is 3, must be between 0 and 2"):
        validate(SamplingParams(logprobs=3), RequestLimits(max_model_len=64, vocab_size=500, max_logprobs=2))


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens is 5, must be at most max_tokens, 4"):
        validate(SamplingParams(min_tokens=5, max_tokens=4), LIMITS)


@pytest.mark.parametrize(
    "length, sampling, rule",
    [
        (0, {}, "no tokens"),
        (64, {}, "room for 1 output token"),
        (60, {"max_tokens": 5}, "max_tokens is 5, must be at most 4"),
        (60, {"min_tokens": 5}, "min_tokens is 5, must be at most 4"),
        (65, {"truncate_prompt_tokens": 64}, "room for 1 output token"),
    ],
)
def test_prompt_and_output_must_fit_the_context(length: int, sampling: dict, rule: str) -> None:
    with pytest.raises(InvalidRequest, match=rule):
        fit_prompt(list(range(length)), SamplingParams(**sampling), LIMITS)


def test_prompt_ids_must_be_in_the_vocabulary() -> None:
    for bad in (500, -1):
        with pytest.raises(InvalidRequest, match=f"prompt has token id {bad}"):
            fit_prompt([1, bad], SamplingParams(), LIMITS)


@pytest.mark.parametrize(
    "sampling, default, expected",
    [
        ({}, None, (10, 54)),
        ({}, 16, (10, 16)),
        ({"min_tokens": 20}, 16, (10, 20)),
        ({"truncate_prompt_tokens": 3}, None, (3, 61)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 60}, None, (4, 60)),
        ({"max_tokens": 54}, 16, (10, 54)),
    ],
)
def test_room_for_output(sampling: dict, default: int | None, expected: tuple[int, int]) -> None:
    prompt = list(range(10))
    ids, max_tokens = fit_prompt(prompt, SamplingParams(**sampling), LIMITS, default)
    assert (len(ids), max_tokens) == expected
    assert ids == prompt[-len(ids) :], "the end of the prompt is kept"


def test_the_default_gives_way_to_a_long_prompt() -> None:
    assert fit_prompt(list(range(60)), SamplingParams(), LIMITS, 16)[1] == 4


def test_split_into_sequences(tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(n=3, max_tokens=5, seed=INT64_MAX, prompt_logprobs=1, temperature=0.5)
    requests = to_engine_requests([1, 2], sampling, LIMITS, tokenizer, request_id="mine", cache_salt="s")
    assert [r.sampling.seed for r in requests] == [INT64_MAX, -(1 << 63), -(1 << 63) + 1], "int64 wraps"
    assert [r.sampling.prompt_logprobs for r in requests] == [1, None, None]
    assert len({r.request_id for r in requests}) == 3 and len({r.group_id for r in requests}) == 1
    assert all(r.sampling.n == 1 and r.sampling.max_tokens == 5 and r.cache_salt == "s" for r in requests)
    again = to_engine_requests([1, 2], sampling, LIMITS, tokenizer, request_id="mine")
    assert not {r.request_id for r in requests} & {r.request_id for r in again}, "whatever the caller's id is"


def test_one_text_is_no_sequence_of_letters() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="bad_words is 'END', must be a sequence of strings"):
        validate(SamplingParams(bad_words="END"), LIMITS)  # type: ignore[arg-type]


def test_words_of_tokens_that_the_model_does_not_have_are_not_banned(tokenizer: Tokenizer) -> None:
    whole = to_engine_requests([1], SamplingParams(bad_words=("Hello", "a")), LIMITS, tokenizer)[0]
    assert max(map(max, whole.bad_words_token_ids)) == 259
    limits = RequestLimits(max_model_len=64, vocab_size=259)
    small = to_engine_requests([1], SamplingParams(bad_words=("Hello", "a")), limits, tokenizer)[0]
    assert 0 < len(small.bad_words_token_ids) < len(whole.bad_words_token_ids)
    assert max(map(max, small.bad_words_token_ids)) < 259


def test_bad_words_are_spelled_once_for_all_prompts_of_a_request(tokenizer: Tokenizer) -> None:
    class Counting:
        calls = 0
        special_token_ids, eos_ids = tokenizer.special_token_ids, tokenizer.eos_ids

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            self.calls += 1
            return tokenizer.encode(text, add_special_tokens)

    counting = Counting()
    for _ in range(5):
        to_engine_requests([1], SamplingParams(bad_words=("a", "b")), LIMITS, counting)
    assert counting.calls == 4


def test_an_id_is_short(tokenizer: Tokenizer) -> None:
    """gRPC has no limit of its own, and an id goes with every token."""
    with pytest.raises(InvalidRequest, match="request_id has 257 characters"):
        to_engine_requests([1], SamplingParams(), LIMITS, tokenizer, request_id="x" * 257)


def test_without_a_seed_each_request_gets_its_own(tokenizer: Tokenizer) -> None:
    seeds = {to_engine_requests([1], SamplingParams(), LIMITS, tokenizer)[0].sampling.seed for _ in range(4)}
    assert len(seeds) == 4 and None not in seeds


def test_priority_needs_the_policy(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="priority is 3"):
        to_engine_requests([1], SamplingParams(), LIMITS, tokenizer, priority=3)
    limits = RequestLimits(max_model_len=64, vocab_size=500, priority_policy=True)
    assert to_engine_requests([1], SamplingParams(), limits, tokenizer, priority=3)[0].priority == 3


def test_bad_words_are_banned_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    bare, spaced = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("b", " b"))
    assert len(spaced) == 2, "two tokens: not the same word"
    assert bad_words_token_ids(("b",), tokenizer) == (bare,)
    # " world" is one token, "world" five: only the plain spelling is of the word's length.
    assert bad_words_token_ids((" world",), tokenizer) == (tuple(tokenizer.encode("world", add_special_tokens=False)),)


def test_engine_requests_survive_the_wire(tokenizer: Tokenizer) -> None:
    request = to_engine_requests([1, 2], SamplingParams(logit_bias={3: 1.0}, stop=("x",)), LIMITS, tokenizer)[0]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request)) == request
