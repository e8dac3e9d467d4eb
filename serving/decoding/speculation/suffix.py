"""SuffixDecoding (Oliaro, Jia, Campos, Qiao; NeurIPS 2025): what followed the last tokens before, here or in outputs of
past requests.

One tree of contexts for each sequence, prompt and output, and two for the outputs of past requests: when the newer one
is full it becomes the older one, and what that held is forgotten. Each length of a match proposes the likeliest
continuation, of at most `factor` tokens for each token that matches and as long as its probability, by counts, is at
least `min_prob`. The proposal with the most expected tokens is taken.
"""

import numpy as np

from serving.decoding.speculation.config import SpeculativeConfig
from serving.decoding.speculation.context_tree import ContextTree
from serving.decoding.speculation.continuation import Continuation, grow
from serving.engine.plan import Draft

MOST_READ = 2048  # tokens taken in at once, some 10 ms: other sequences wait meanwhile
MOST_KEPT = 500_000  # tokens of past outputs, some 200 MB


class SuffixDrafter:
    """See `serving.decoding.speculation.drafter.Drafter`."""

    def __init__(self, config: SpeculativeConfig):
        self._config = config
        self._depth = config.suffix_decoding_max_tree_depth
        self._branches = 2 if config.suffix_decoding_tree else 1
        self._sequences: dict[str, ContextTree] = {}
        self._past = PastOutputs(self._depth, config.suffix_decoding_max_cached_requests)

    def propose(self, request_id: str, tokens: np.ndarray, most: int) -> Draft | None:
        own = self._sequences.get(request_id)
        if own is None:
            own = self._sequences[request_id] = ContextTree(self._depth)
        num_read = len(own.text)
        for token in tokens[num_read : num_read + MOST_READ].tolist():
            own.append(token)
        if len(own.text) < len(tokens):
            return None
        context = tokens[-self._depth :].tolist()
        best = self._improve(Continuation(), own, context, most, endless=True)
        for tree in self._past.trees:
            best = self._improve(best, tree, context, most, endless=False)
        if not best.tokens:
            return None
        parents = np.array(best.parents, np.int32) if self._branches > 1 else None
        return Draft(np.array(best.tokens, np.int32), parents)

    def forget(self, request_id: str, tokens: np.ndarray, prompt_len: int) -> None:
        self._sequences.pop(request_id, None)
        self._past.add(tokens[max(prompt_len, len(tokens) - MOST_READ) :].tolist())

    def _improve(
        self, best: Continuation, tree: ContextTree, context: list[int], most: int, *, endless: bool
    ) -> Continuation:
        """`best`, or a better one from this tree."""
        config, places = self._config, tree.match(context)
        for length in range(len(places), 0, -1):
            limit = min(most, int(config.suffix_decoding_max_spec_factor * length))
            if limit <= best.expected:
                break  # nor can shorter matches be better
            place = places[length - 1]
            if length < len(places) and tree.total(place) == tree.total(places[length]):
                continue  # occurrences of the longer match, all of them
            grown = grow(
                tree,
                context[-length:],
                place,
                limit,
                min_prob=config.suffix_decoding_min_token_prob,
                branches=self._branches,
                endless=endless,
            )
            if grown.expected > best.expected:
                best = grown
        return best


class PastOutputs:
    """Of the newest requests that are over: the last ones for sure, at most `most_requests` and MOST_KEPT tokens."""

    def __init__(self, depth: int, most_requests: int):
        self.trees: list[ContextTree] = []  # the newest first
        self._depth = depth
        self._num_trees = min(2, most_requests)
        self._most_requests = most_requests // max(self._num_trees, 1)  # in a tree
        self._num_requests = 0  # in the newest

    def add(self, output: list[int]) -> None:
        if not self._num_trees or not output:
            return
        is_full = self._num_requests >= self._most_requests
        if not self.trees or is_full or len(self.trees[0].text) + len(output) >= MOST_KEPT // 2:
            self.trees = [ContextTree(self._depth), *self.trees][: self._num_trees]
            self._num_requests = 0
        tree = self.trees[0]
        for token in output:
            tree.append(token)
        tree.end_text()
        self._num_requests += 1
