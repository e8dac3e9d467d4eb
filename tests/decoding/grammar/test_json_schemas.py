"""Whatever is drawn from the masks of a JSON schema parses and follows the schema."""

import json
import random

import jsonschema
import pytest

from tests.decoding.grammar.schema_cases import SCHEMAS
from tests.decoding.grammar.toy import Grammars, toy_tokenizer
from tests.decoding.grammar.walk import random_output

FORMATS = jsonschema.FormatChecker(["ipv4", "email", "uuid"])


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(toy_tokenizer())


def check(schema: object, text: str) -> object:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    value = json.loads(text, parse_constant=no_constant)
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    if isinstance(schema, dict) and isinstance(schema.get("items"), list):
        kind = jsonschema.Draft7Validator
    kind(schema, format_checker=FORMATS).validate(value)
    return value


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_outputs_follow_the_schema(grammars: Grammars, name: str) -> None:
    rng = random.Random(name)
    texts = set()
    for _ in range(25):
        ids = random_output(grammars, grammars.matcher(json=SCHEMAS[name]), rng)
        texts.add(b"".join(map(grammars.tokenizer.token_bytes, ids)).decode())  # UTF-8 in every case
    for text in texts:
        check(SCHEMAS[name], text)
