"""A sequence's place in its grammar, kept by llguidance."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from serving.decoding.grammar.explain import first_line
from serving.decoding.grammar.tokens import Vocabulary


class GrammarMatcher:
    """A `serving.decoding.matcher.Matcher`. Of one sequence, used by one thread at a time.

    llguidance gives up on a grammar whose parse grows beyond its limits. `error` then says why, and only an
    end-of-sequence token is allowed any more.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, *, fast_forward: bool = True,
                 rolls_back: bool = True):
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._fast_forward, self._rolls_back = fast_forward, rolls_back
        self.error = ""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Moves on by output tokens. Nothing is checked after the end."""
        for token_id in token_ids:
            if self.error or self._is_at_end():
                return
            if not self._matcher.consume_token(token_id):
                self.error = first_line(self._matcher.get_error()) or f"token {token_id} does not fit the grammar"

    def forced(self) -> list[int]:
        """Tokens that have to follow, spelled as the tokenizer would: the last ones of the forced text are left out
        where a token could go on beyond it."""
        if self._is_at_end():
            return [self._vocabulary.eos_ids[0]]
        if self._fast_forward and (tokens := self._matcher.compute_ff_tokens()):
            tokens = tokens[: self._matcher.validate_tokens(tokens)]
            size = self._vocabulary.size  # a model may have fewer tokens than its tokenizer
            unknown = (i for i, token in enumerate(tokens) if token >= size)
            return tokens[: next(unknown, len(tokens))]
        if self._matcher.is_accepting() and not (self._row() & ~self._vocabulary.eos_row).any():
            return [self._vocabulary.eos_ids[0]]
        return []

    def masks(self, tokens: np.ndarray, parents: np.ndarray, out: np.ndarray) -> np.ndarray:
        """See `Matcher`. An end-of-sequence token is allowed where the grammar may end; nothing is after it."""
        valid = np.zeros(len(tokens), bool)
        children: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
        for i, parent in enumerate(parents.tolist()):
            children[parent + 1].append(i)
        out[0] = self._row()
        self._walk(0, tokens.tolist(), children, out, valid)
        return valid

    def _walk(self, node: int, tokens: list[int], children: list[list[int]], out: np.ndarray,
              valid: np.ndarray) -> None:
        """Fills in what follows tokens[node - 1], or the present state where node is 0."""
        for child in children[node]:
            token = tokens[child]
            valid[child] = 0 <= token < self._vocabulary.size and out[node, token // 32] >> token % 32 & 1
            if not valid[child] or token in self._vocabulary.eos_ids:
                out[child + 1] = self._vocabulary.eos_row
                continue
            here = self._matcher
            if not self._rolls_back:
                self._matcher = here.deep_copy()
            if self._matcher.try_consume_tokens([token]) == 1:
                out[child + 1] = self._row()
                self._walk(child + 1, tokens, children, out, valid)
                if self._rolls_back:
                    here.rollback(1)
            elif self._is_at_end():  # it has given up just now
                out[child + 1] = self._vocabulary.eos_row
                valid[child] = False
            else:
                raise AssertionError(f"token {token} is in the mask and refused: {self._matcher.get_error()}")
            self._matcher = here

    def _row(self) -> np.ndarray:
        """int32 [W]: the bits of what may follow now."""
        if self._is_at_end():
            return self._vocabulary.eos_row
        known = self._vocabulary.known_row
        row = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(known)] & known
        if not row.any():
            self.error = "no token of the model's vocabulary goes on as the grammar wants"
        return self._vocabulary.eos_row if self._is_at_end() else row  # it may have given up just now

    def _is_at_end(self) -> bool:
        if not self.error and self._matcher.is_error():
            self.error = first_line(self._matcher.get_error())
        return bool(self.error) or self._matcher.is_stopped()
