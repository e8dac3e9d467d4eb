"""Inputs that broke other engines, against the real server. One test a bug; docstrings give the right behaviour."""

import itertools
import json
import math
import threading

import httpx
import pytest

from tests.e2e.servers import Server

STORY = "Once upon a time, in a small village by the sea,"


def stream(server: Server, **body) -> list[dict]:
    """The choices of a streamed completion, in order."""
    body = {"temperature": 0, "return_token_ids": True, **body, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200, response.read()
        return [json.loads(line[6:])["choices"][0] for line in response.iter_lines() if line.startswith("data: {")]


def refused(server: Server, path: str = "/v1/completions", **body) -> dict:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("stop", ["DEFGHIJ", "IJKLMNOP", "XYZ12", "no such text"])
def test_stop_strings_are_never_streamed_in_part(server: Server, stop: str):
    """stop "DEFGHIJ" after "ABC": possible beginnings of a stop string are held back."""
    prompt = "The letters of the alphabet are ABCDEFGHIJKLMNOPQRSTUVWXYZ. Once more, the alphabet: ABC"
    whole = server.complete(prompt, max_tokens=24, ignore_eos=True)["text"]
    assert whole.startswith("DEFGHIJKLMNOPQRSTUVWXYZ")
    expected = whole.split(stop)[0]
    choices = stream(server, prompt=prompt, max_tokens=24, ignore_eos=True, stop=[stop])
    seen = ""
    for choice in choices:
        seen += choice["text"]
        assert expected.startswith(seen)
    assert seen == expected
    end = ("stop", stop) if stop in whole else ("length", None)
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == end


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_cuts_ids_logprobs_and_text_at_the_same_place(server: Server, streamed: bool):
    whole = server.complete(STORY, max_tokens=32)
    for at in (9, 10, 11, 25):
        stop = whole["text"][at : at + 5]
        body = {"prompt": STORY, "max_tokens": 32, "stop": stop, "logprobs": 1}
        choices = stream(server, **body) if streamed else [server.complete(**body)]
        tokens = sum((choice["logprobs"]["tokens"] for choice in choices), [])
        ids = sum((choice["token_ids"] for choice in choices), [])
        numbers = sum((choice["logprobs"]["token_logprobs"] for choice in choices), [])
        text = "".join(choice["text"] for choice in choices)
        assert text == whole["text"][: whole["text"].index(stop)]
        assert "".join(tokens) == text
        assert len(tokens) == len(ids) == len(numbers)
        assert ids == whole["token_ids"][: len(ids)]


def test_a_long_run_of_incomplete_utf8_keeps_flowing(server: Server):
    """A bias toward a byte token: the window stays bounded, output keeps flowing, time per token does not grow."""
    byte = server.tokenize("\U00013080")[0]
    assert server.post("/detokenize", {"tokens": [byte]}).json()["prompt"] == "\ufffd"
    choices = stream(server, prompt="x", max_tokens=400, ignore_eos=True, logit_bias={str(byte): 100})
    assert sum((choice["token_ids"] for choice in choices), []) == [byte] * 400
    ends = itertools.accumulate(len(choice["token_ids"]) for choice in choices)
    first = sum(len(choice["text"]) for choice, end in zip(choices, ends, strict=True) if end <= 200)
    assert "".join(choice["text"] for choice in choices).strip("\ufffd") == ""
    assert first >= 100, "text is held back for ever"


def test_echo_with_logprobs(server: Server):
    """First logprob null; tokens concatenate to the text; offsets are right."""
    prompt = "\n1. Carol has 20"
    choice = server.complete(prompt, echo=True, logprobs=1, max_tokens=8)
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(-50 < value <= 0 for value in logprobs["token_logprobs"][1:])
    assert len(logprobs["tokens"]) == len(server.tokenize(prompt)) + 8
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"].startswith(token, offset)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_few_or_no_tokens(server: Server, max_tokens: int):
    """Log-probabilities of the prompt, no crash. What lm-eval sends."""
    prompt = "The capital of France is Paris"
    choice = server.complete(prompt, echo=True, logprobs=1, max_tokens=max_tokens)
    size = len(server.tokenize(prompt))
    numbers = choice["logprobs"]["token_logprobs"]
    assert len(numbers) == size + max_tokens
    whole = server.complete(prompt, echo=True, logprobs=1, max_tokens=8)["logprobs"]["token_logprobs"]
    assert numbers[1:size] == pytest.approx(whole[1:size], abs=1e-4)
    assert numbers[size - 1] > -2  # " Paris" is no surprise


@pytest.mark.parametrize("prompt", ["", [""], ["x", ""], [], [[]]])
def test_an_empty_prompt(server: Server, prompt: object):
    """400 on a model without BOS."""
    assert refused(server, prompt=prompt)["param"].startswith("prompt")


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-30])
def test_temperatures_near_zero(server: Server, temperature: float):
    """Close to greedy, no NaN."""
    greedy = server.complete(STORY, max_tokens=24)
    choice = server.complete(STORY, max_tokens=24, temperature=temperature, seed=1, logprobs=2, top_p=0.95, min_p=0.05)
    assert choice["token_ids"] == greedy["token_ids"]
    assert all(math.isfinite(value) for value in choice["logprobs"]["token_logprobs"])


@pytest.mark.parametrize(
    "field", [{"logit_bias": {"191222": -100}}, {"stop_token_ids": [191222]}, {"allowed_token_ids": [191222]},
              {"logit_bias": {"49152": 1}}, {"allowed_token_ids": [0, 49152]}, {"prompt": [49152]},
              {"stop_token_ids": [-1]}], ids=str)  # fmt: skip
def test_ids_out_of_the_vocabulary(server: Server, field: dict):
    assert refused(server, **{"prompt": "x", **field})["param"].startswith(next(iter(field)))


def test_too_many_logprobs(server: Server):
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1000000}
    error = refused(server, "/v1/chat/completions", **chat)
    assert error["param"] == "top_logprobs" and "20" in error["message"]
    assert refused(server, prompt="x", logprobs=1000000)["param"] == "logprobs"
    assert refused(server, prompt="x", prompt_logprobs=1000000)["param"] == "prompt_logprobs"


def test_two_live_requests_with_the_same_id(server: Server):
    """A unique id inside; never a crash or a mix."""
    prompts = [f"{name} went to the market and bought" for name in ("Mia", "Tom", "Zoe", "Ben")]
    expected = [server.complete(prompt, max_tokens=32)["token_ids"] for prompt in prompts]
    outputs: list[list[int] | None] = [None] * len(prompts)

    def ask(i: int) -> None:
        outputs[i] = server.complete(prompts[i], max_tokens=32, request_id="the-same")["token_ids"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == expected


@pytest.mark.parametrize("size", [1024, 1025, 30_000])
def test_a_prompt_longer_than_the_context(server: Server, size: int):
    error = refused(server, prompt=[5] * size)
    assert error["param"] == "prompt" and str(size) in error["message"] and "1024" in error["message"]
    chat = [{"role": "user", "content": "word " * size}]
    assert "1024" in refused(server, "/v1/chat/completions", messages=chat)["message"]


@pytest.mark.slow
def test_prompt_logprobs_of_34_prompts_in_a_tiny_pool(server: Server, small_pool: Server):
    """34 prompts with prompt_logprobs=2, preempted again and again: equal to a run that was not."""
    prompts = [[(7 * i + 31 * j) % 4000 + 100 for j in range(40 + 3 * i)] for i in range(34)]
    body = {"prompt": prompts, "prompt_logprobs": 2, "max_tokens": 30, "ignore_eos": True, "temperature": 0,
            "return_token_ids": True}  # fmt: skip
    before = small_pool.metrics()["vllm:num_preemptions_total"]
    answers = [one.post("/v1/completions", body, timeout=500).json()["choices"] for one in (small_pool, server)]
    assert small_pool.metrics()["vllm:num_preemptions_total"] > before
    for prompt, ours, expected in zip(prompts, *answers, strict=True):
        assert ours["token_ids"] == expected["token_ids"]
        assert ours["prompt_logprobs"][0] is None
        both = zip(prompt, ours["prompt_logprobs"], expected["prompt_logprobs"], strict=True)
        for token, mine, theirs in itertools.islice(both, 1, None):
            assert len(mine) in (2, 3)
            assert mine[str(token)]["logprob"] == pytest.approx(theirs[str(token)]["logprob"], abs=1e-3)
            # In order, whatever the tokens are: of 3,009 second and third ones two are 5e-5 apart.
            best, wanted = (sorted(entry["logprob"] for entry in one.values()) for one in (mine, theirs))
            assert best == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("token", [2**63, 2**31, 49152, -1])
def test_detokenizing_an_impossible_id(server: Server, token: int):
    """400 also for 2^63."""
    assert refused(server, "/detokenize", tokens=[token])["param"].startswith("tokens")


def test_extreme_penalties_act(server: Server):
    """They change the output, each in its own way."""
    prompt = "one two one two one two one two one two"
    plain = server.complete(prompt, max_tokens=24, ignore_eos=True)["token_ids"]
    assert len(set(plain)) < 12
    used = set(server.tokenize(prompt))
    outputs = {}
    for name, value in (("presence_penalty", 2), ("frequency_penalty", 2), ("repetition_penalty", 50)):
        outputs[name] = server.complete(prompt, max_tokens=24, ignore_eos=True, **{name: value})["token_ids"]
        assert outputs[name] != plain
        assert len(set(outputs[name])) > len(set(plain))
    assert len(set(outputs["repetition_penalty"])) == 24 and not used & set(outputs["repetition_penalty"])
    negative = server.complete(prompt, max_tokens=24, ignore_eos=True, frequency_penalty=-2)["token_ids"]
    assert len(set(negative)) <= len(set(plain))


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_small_schema_ends_before_min_tokens(server: Server, logprobs: int | None):
    """min_tokens 64 bans what alone may follow the JSON: the grammar's end wins."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    choice = server.complete(STORY, min_tokens=64, max_tokens=80, logprobs=logprobs,
                             structured_outputs={"json": schema})
    assert choice["text"] in ('{"a": true}', '{"a": false}') and choice["finish_reason"] == "stop"


def test_lengths_in_a_schema_count_code_points(server: Server):
    """"\\uD83D\\uDE00" is one character of maxLength 1, though two code units and four bytes."""
    schema = {"type": "string", "minLength": 1, "maxLength": 1, "pattern": "[\U0001f600-\U0001f610]"}
    text = server.complete("A smiling face:", max_tokens=20, structured_outputs={"json": schema})["text"]
    assert len(text) == 3 and "\U0001f600" <= json.loads(text) <= "\U0001f610"


@pytest.mark.parametrize("field", ["structured_outputs", "guided_json", "suffix", "kv_transfer_params", "pancake"])
def test_fields_without_an_effect_are_refused(server: Server, field: str):
    """Whatever is not there yet, or not as it is given: 400 that names the field, never silence."""
    assert field in refused(server, prompt="x", **{field: {"a": 1}})["message"]
