"""Grammars over the fake runner's tokens: which of them may come next is a function of the output so far."""

import zlib
from collections.abc import Sequence

import numpy as np

from tests.engine.fake_runner import EOS, VOCAB, Language

MOST_FORCED = 6  # by one call


def random_language(seed: int) -> Language:
    """One that often leaves no choice, and ends now and then."""

    def allowed(outputs: list[int]) -> set[int]:
        key = _hash(seed, outputs[-2:], len(outputs))
        if len(outputs) > 6 and key % 17 == 0:
            return set(EOS)
        if key % 3 == 0:
            return {2 + key // 3 % (VOCAB - 2)}
        several = {token for token in range(2, VOCAB) if _hash(key, token) % 3}
        return several | set(EOS) if key % 11 == 0 else several

    return allowed


class FakeMatcher:
    """A `serving.decoding.matcher.Matcher`. fast_forward: whether it tells what is forced, beside the end."""

    error = ""

    def __init__(self, language: Language, fast_forward: bool = True):
        self._allowed, self._fast_forward = language, fast_forward
        self._outputs: list[int] = []

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            assert token in self._allowed(self._outputs), "it is told what it does not allow"
            self._outputs.append(int(token))

    def forced(self) -> list[int]:
        forced: list[int] = []
        while len(forced) < MOST_FORCED and len(only := self._allowed(self._outputs + forced)) == 1:
            if only == set(EOS):
                return forced or list(EOS)
            if not self._fast_forward:
                break
            forced += only
        return forced

    def masks(self, tokens: np.ndarray, parents: np.ndarray, out: np.ndarray) -> np.ndarray:
        valid = np.zeros(len(tokens), bool)
        paths: list[list[int] | None] = [None] * len(tokens) + [self._outputs]  # the last is the parent -1
        out[0] = _packed(self._allowed(self._outputs))
        for i, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
            before = paths[parent]
            valid[i] = before is not None and token in self._allowed(before)
            if before is not None and valid[i] and token not in EOS:
                paths[i] = [*before, token]
                out[i + 1] = _packed(self._allowed([*before, token]))
        return valid


def _hash(*key: object) -> int:
    return zlib.crc32(repr(key).encode())


def _packed(tokens: set[int]) -> np.ndarray:
    return np.array([sum(1 << token for token in tokens)], np.uint32).view(np.int32)
