"""Outputs of a model that knows nothing but what is allowed."""

import random

from serving.decoding.grammar.matcher import GrammarMatcher
from tests.decoding.grammar.toy import Grammars

MOST_TOKENS = 4000
CLOSING = ('"', "@", ".", "}]", ",")  # first letters of what brings the end nearer, within strings and around them


def random_output(grammars: Grammars, matcher: GrammarMatcher, rng: random.Random) -> list[int]:
    """Draws from the allowed tokens, the longer the rather those that close something, until eos is drawn or forced;
    what is forced is taken. The ids without eos."""
    ids: list[int] = []
    while len(ids) < MOST_TOKENS:
        step = matcher.forced()
        if not step:
            allowed = grammars.allowed(matcher)
            assert not matcher.error, matcher.error
            hurry = rng.random() < 0.2 + len(ids) / 100
            step = [rng.choice(_closing(grammars, allowed) if hurry else allowed)]
        matcher.accept(step)
        ids += step
        if grammars.eos in step:
            assert step[-1] == grammars.eos
            return ids[:-1]
    raise AssertionError(f"no end after {MOST_TOKENS} tokens: {grammars.tokenizer.decode(ids[:100])!r}...")


def _closing(grammars: Grammars, allowed: list[int]) -> list[int]:
    if grammars.eos in allowed:
        return [grammars.eos]
    for first in CLOSING:
        if some := [i for i in allowed if grammars.tokenizer.token_text(i)[:1] in set(first)]:
            return some
    return allowed
