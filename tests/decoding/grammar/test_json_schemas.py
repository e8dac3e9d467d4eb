"""Whatever is drawn from the masks of a JSON schema parses and follows the schema."""

import random

import pytest

from serving.errors import InvalidRequest
from tests.decoding.grammar.random_schemas import random_schema
from tests.decoding.grammar.schema_cases import SCHEMAS, check
from tests.decoding.grammar.toy import Grammars, toy_tokenizer
from tests.decoding.grammar.walk import random_output


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(toy_tokenizer())


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_outputs_follow_the_schema(grammars: Grammars, name: str) -> None:
    rng = random.Random(name)
    texts = set()
    for _ in range(25):
        ids = random_output(grammars, grammars.matcher(json=SCHEMAS[name]), rng)
        texts.add(b"".join(map(grammars.tokenizer.token_bytes, ids)).decode())  # UTF-8 in every case
    for text in texts:
        check(SCHEMAS[name], text)


def test_random_schemas_are_refused_or_followed(grammars: Grammars) -> None:
    followed = 0
    for seed in range(250):
        rng = random.Random(seed)
        schema = random_schema(rng, 3)
        try:
            matchers = [grammars.matcher(json=schema) for _ in range(3)]
        except InvalidRequest:
            continue
        for matcher in matchers:
            check(schema, grammars.tokenizer.decode(random_output(grammars, matcher, rng)))
        followed += 1
    assert followed > 150
