"""Forced tokens are spelled as the model's tokenizer spells the whole output, whatever the tokenizer."""

import json
import random

import pytest

from checkpoints.default_model import default_model_path
from serving.errors import InvalidRequest
from serving.tokenizer.load import load_tokenizer
from serving.tokenizer.tokenizer import Tokenizer
from tests.decoding.grammar.schema_cases import SCHEMAS, obj
from tests.decoding.grammar.toy import Grammars, toy_tokenizer
from tests.decoding.grammar.walk import random_output


@pytest.fixture(scope="module")
def smollm2() -> Grammars:
    return Grammars(load_tokenizer(default_model_path()), padding=100)


@pytest.fixture(scope="module")
def llama(tokenizer: str) -> Grammars:
    """SentencePiece: texts begin with a space that an output in the middle of one does not have."""
    return Grammars(load_tokenizer(tokenizer))


def rest_of_text(grammars: Grammars, text: str) -> list[int]:
    """The text's ids after a line end, with which no tokenizer here joins it."""
    before = grammars.encode("\n")
    ids = grammars.encode("\n" + text)
    assert ids[: len(before)] == before
    return ids[len(before) :]


def count_forced(grammars: Grammars, ids: list[int], **outputs: object) -> int:
    """Follows the ids; where something is forced, it has to be what comes next."""
    matcher, done, count = grammars.matcher(**outputs), 0, 0
    while done < len(ids):
        forced = matcher.forced()
        assert ids[done : done + len(forced)] == forced, grammars.tokenizer.decode(ids[:done])
        if not forced:
            assert ids[done] in grammars.allowed(matcher)
        matcher.accept(forced or [ids[done]])
        done, count = done + max(len(forced), 1), count + len(forced)
    assert grammars.eos in grammars.allowed(matcher)
    return count


@pytest.mark.parametrize("family", ["smollm2", "llama"])
def test_forced_tokens_are_those_of_the_whole_text(family: str, request: pytest.FixtureRequest) -> None:
    grammars, toy, rng = request.getfixturevalue(family), Grammars(toy_tokenizer()), random.Random(3)
    forced = total = 0
    for schema in SCHEMAS.values():
        for _ in range(4):
            ids = random_output(toy, toy.matcher(json=schema), rng)
            text = toy.tokenizer.decode(ids)
            spelled = rest_of_text(grammars, text)
            if b"".join(map(grammars.tokenizer.token_bytes, spelled)) != text.encode():
                continue  # SmolLM2 has no token for some bytes
            forced += count_forced(grammars, spelled, json=schema)
            total += len(spelled)
    assert forced > total / 8, f"{forced} of {total}"


def test_an_extraction_is_half_forced(smollm2: Grammars) -> None:
    value = {"name": "Ada Lovelace", "email": "ada@example.com", "age": 36, "skills": ["python"],
             "address": {"street": "12 St James's Square", "city": "London", "zip": "10115"}}
    ids = smollm2.encode(json.dumps(value))
    forced = count_forced(smollm2, ids, json=SCHEMAS["extraction"])
    assert forced >= 0.45 * len(ids), f"{forced} of {len(ids)}"


@pytest.mark.parametrize("family", ["smollm2", "llama"])
def test_a_name_that_goes_on_is_not_cut_short(family: str, request: pytest.FixtureRequest) -> None:
    """`{"order` is forced, but a token that spans its end would never be reached from there."""
    grammars = request.getfixturevalue(family)
    schema = {"anyOf": [obj(orderId={"const": 1}), obj(orderName={"const": 1})]}
    for key in ("orderId", "orderName"):
        count_forced(grammars, rest_of_text(grammars, json.dumps({key: 1})), json=schema)


def test_text_that_reads_like_a_special_token_is_none(smollm2: Grammars) -> None:
    end = smollm2.tokenizer.special_token_ids["<|im_end|>"]
    matcher = smollm2.matcher(json={"const": "a<|im_end|>b"})
    forced = matcher.forced()
    assert end not in forced and smollm2.tokenizer.decode(forced, skip_special_tokens=False) == '"a<|im_end|>b"'
    assert end not in smollm2.allowed(smollm2.matcher(regex="(?s:.*)"))[:-1] or smollm2.eos == end


def test_ids_without_a_token_are_never_allowed(smollm2: Grammars) -> None:
    size = smollm2.tokenizer.vocab_size
    assert smollm2.vocab_size == size + 100
    assert max(smollm2.allowed(smollm2.matcher(regex="(?s:.*)"))) < size


def test_a_tokenizer_may_have_more_tokens_than_the_model() -> None:
    grammars = Grammars(toy_tokenizer(), padding=-1)  # `<|end|>` is lost
    with pytest.raises(InvalidRequest, match="end-of-sequence"):
        grammars.matcher(regex="a")
    tokenizer = toy_tokenizer()
    smaller = Tokenizer(tokenizer.backend, special_tokens={}, eos_ids=[0], chat_templates={})
    grammars = Grammars(smaller, padding=-40)  # words are lost, bytes are left
    assert grammars.allowed(grammars.matcher(regex="[a-z]+")) == list(range(ord("a"), ord("z") + 1))
