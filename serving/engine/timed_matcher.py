"""Counts what grammars cost the engine's thread."""

import time
from collections.abc import Sequence

import numpy as np

from serving.decoding.matcher import Matcher
from serving.request import EngineStats


class TimedMatcher:
    """A matcher whose time is added to `stats.grammar_seconds`; it is part of what planning and updating take."""

    def __init__(self, matcher: Matcher, stats: EngineStats):
        self._matcher, self._stats = matcher, stats

    @property
    def error(self) -> str:
        return self._matcher.error

    def accept(self, token_ids: Sequence[int]) -> None:
        began = time.perf_counter()
        self._matcher.accept(token_ids)
        self._add(began)

    def forced(self) -> list[int]:
        began = time.perf_counter()
        forced = self._matcher.forced()
        self._add(began)
        return forced

    def masks(self, tokens: np.ndarray, parents: np.ndarray, out: np.ndarray) -> np.ndarray:
        began = time.perf_counter()
        valid = self._matcher.masks(tokens, parents, out)
        self._add(began)
        return valid

    def _add(self, began: float) -> None:
        self._stats.grammar_seconds += time.perf_counter() - began
