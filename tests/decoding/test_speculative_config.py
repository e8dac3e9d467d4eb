"""`--speculative-config`: what each key may be, and one line for whatever is wrong."""

import json
from dataclasses import fields

import pytest

from serving.config import EngineConfig
from serving.decoding.speculation.config import FLAG, METHODS_OF, SpeculativeConfig
from serving.errors import ConfigError
from serving.flags import parse_flags

NGRAM = {"method": "ngram", "num_speculative_tokens": 8}
EAGLE = {"method": "eagle", "model": "/heads", "num_speculative_tokens": 8}
TABLE = "num_speculative_tokens_per_batch_size"


def test_flag_reaches_the_engine():
    given = NGRAM | {"prompt_lookup_max": 4, TABLE: {"1-16": 3, "256-4096": 0, "64-128": 2}}
    config = parse_flags([FLAG, json.dumps(given)]).engine.speculative_config
    assert config == SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=8,
        prompt_lookup_max=4,
        num_speculative_tokens_per_batch_size=((1, 16, 3), (64, 128, 2), (256, 4096, 0)),
    )
    assert config is not None and config.on_host and config.lookup == (4, 4) and config.lengths == (2, 3)
    assert config == SpeculativeConfig.of(given | {TABLE: [[1, 16, 3], [256, 4096, 0], [64, 128, 2]]})
    assert parse_flags([]).engine.speculative_config is None and EngineConfig().speculative_config is None


@pytest.mark.parametrize(
    ("given", "lengths", "most"),
    [
        (NGRAM, (1, 3, 8), 8),
        (NGRAM | {"num_speculative_tokens": 2}, (1, 2), 2),
        (NGRAM | {"adaptive": False}, (8,), 8),
        ({"method": "suffix"}, (3, 8, 24), 24),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 2}, (3, 8, 24), 24),
        (EAGLE | {"speculative_token_tree": "[(0,), (0, 0), (1,)]", "num_speculative_tokens": 3}, (3,), 3),
        (EAGLE | {"speculative_token_tree": [[0, 0], [0]], "num_speculative_tokens": None}, (2,), 2),
        (EAGLE | {"draft_sample_method": "greedy"}, (1, 3, 8), 8),  # what it does, and may be said
        ({"method": "dflash", "model": "d", "num_speculative_tokens": 15}, (15,), 15),
        ({"method": "mtp", "num_speculative_tokens": 1}, (1,), 1),
    ],
)
def test_lengths_to_compile(given, lengths, most):
    config = SpeculativeConfig.of(given)
    assert (config.lengths, config.most) == (lengths, most)


def test_bounds_of_the_lookup_follow_each_other():
    def lookup(**keys):
        return SpeculativeConfig.of(NGRAM | keys).lookup

    assert lookup() == (2, 5)
    assert lookup(prompt_lookup_max=3) == lookup(prompt_lookup_min=3) == (3, 3)
    assert lookup(prompt_lookup_min=2, prompt_lookup_max=7) == (2, 7)


def test_trees():
    assert SpeculativeConfig.of({"method": "suffix", "suffix_decoding_tree": True}).has_tree
    assert SpeculativeConfig.of(EAGLE | {"eagle_topk": 4, "eagle_num_steps": 3}).has_tree
    assert not SpeculativeConfig.of(EAGLE).has_tree
    tree = SpeculativeConfig.of({"method": "medusa", "model": "m", "speculative_token_tree": [[1], [0, 0], [0]]})
    assert tree.speculative_token_tree == ((0,), (1,), (0, 0))  # parents first, level by level


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", ("is not JSON", "'{'")),
        ("[]", ("must be an object", "'[]'")),
        ({}, ('needs "method"', "suffix")),
        ({"metod": "ngram"}, ("no key 'metod'", "method", "eagle_topk")),
        ({"method": "lookahead"}, ('method is "lookahead"', "ngram, suffix, draft_model")),
        ({"method": ["ngram"]}, ('method is ["ngram"]', "must be one of")),
        ({"method": "ngram"}, ('needs "num_speculative_tokens"', "4 is a good start")),
        ({"method": "eagle3", "num_speculative_tokens": 3}, ('"method": "eagle3" needs "model"',)),
        (NGRAM | {"num_speculative_tokens": 0}, ("num_speculative_tokens is 0", "must be in 1 to 64")),
        (NGRAM | {"num_speculative_tokens": True}, ("num_speculative_tokens is true", "a whole number")),
        (NGRAM | {"num_speculative_tokens": 2.0}, ("num_speculative_tokens is 2.0", "a whole number")),
        (NGRAM | {"adaptive": 1}, ("adaptive is 1", "true or false")),
        (NGRAM | {"prompt_lookup_max": 33}, ("prompt_lookup_max is 33", "1 to 32")),
        (NGRAM | {"prompt_lookup_max": 2, "prompt_lookup_min": 3}, ("prompt_lookup_min is 3", "at most", "2")),
        (NGRAM | {"model": "x"}, ('model is "x"', 'no meaning with "method": "ngram"', "eagle3")),
        (NGRAM | {"eagle_topk": 2}, ("eagle_topk is 2", "no meaning", "eagle, eagle3")),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, ("1.5", "must be in 0 to 1")),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, ("is 0.0", "over 0")),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": 1e999}', ("is Infinity", "over 0 and at most 64")),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 10**400}, ("is Infinity", "over 0 and at most 64")),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, ("is 1", "2 to 64")),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, ("is -1", "at least 0")),
        (EAGLE | {"draft_sample_method": "probabilistic"}, ('is "probabilistic"', 'best tokens: give "greedy"')),
        (NGRAM | {"draft_sample_method": "greedy"}, ("no meaning", "draft_model, medusa")),
        (EAGLE | {"eagle_num_steps": 2}, ("eagle_num_steps is 2", "give eagle_topk")),
        (EAGLE | {"eagle_topk": 2, "eagle_num_steps": 1000}, ("eagle_num_steps is 1000", "at most the 8 drafts")),
        (NGRAM | {TABLE: {"1": 2}, "adaptive": True}, ("adaptive is true", TABLE)),
        (EAGLE | {"speculative_token_tree": [[0], [1, 0]]}, ("but speculative_token_tree has 2",)),
        (EAGLE | {"num_speculative_tokens": 2, "speculative_token_tree": [[0], [1, 0]]}, ("[1] is missing",)),
        (EAGLE | {"num_speculative_tokens": 2, "speculative_token_tree": [[0], [0]]}, ("each path once",)),
        (EAGLE | {"speculative_token_tree": "import os"}, ("must be a list of paths",)),
        (EAGLE | {"speculative_token_tree": [[0], [-1]]}, ("0 and more",)),
        (EAGLE | {"speculative_token_tree": 7}, ("speculative_token_tree is 7", "a list of paths")),
        (NGRAM | {TABLE: {"1-16": 3, "16-20": 1}}, ("do not overlap", "16 is in two")),
        (NGRAM | {TABLE: {"1-x": 3}}, ('"1-16" or "64"', '"1-x"')),
        (NGRAM | {TABLE: {"5-2": 3}}, ("ranges of 1 sequence and more",)),
        (NGRAM | {TABLE: {"1-2": 9}}, ("1 to num_speculative_tokens, 8",)),
        (NGRAM | {TABLE: {"1-2": 0}}, ("1 to num_speculative_tokens, 8",)),
        (NGRAM | {TABLE: {str(i): i for i in range(1, 6)}}, ("4 numbers of drafts",)),
        (NGRAM | {TABLE: 3}, (f"{TABLE} is 3", 'an object, as {"1-16": 3}')),
    ],
)
def test_what_is_wrong_is_said_in_one_line(given, words):
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.parse(given if isinstance(given, str) else json.dumps(given))
    message = str(caught.value)
    assert message.startswith(FLAG) and "\n" not in message
    for word in words:
        assert word in message, message


def test_keys_of_methods_are_keys():
    assert METHODS_OF.keys() <= {field.name for field in fields(SpeculativeConfig)}
