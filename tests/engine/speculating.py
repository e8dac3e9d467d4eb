"""Drafters for the fake runner, good and bad ones, on the host and on the device."""

from collections.abc import Sequence
from random import Random

import numpy as np

from serving.engine.plan import Draft, StepPlan, StepResult
from tests.engine.fake_runner import VOCAB, FakeRunner


class RandomLength:
    """Draws a new number of drafts for every step, and checks what it is told."""

    def __init__(self, rng: Random, lengths: Sequence[int]):
        self._rng, self._lengths = rng, lengths
        self.rows_seen = 0

    @property
    def least_chance(self) -> float:
        return self._rng.choice((0.0, 0.0, 0.3, 0.7))

    def choose(self, num_rows: int, may_try: bool = True) -> int:
        return self._rng.choice(self._lengths)

    def observe_step(self, num_rows: int, num_drafts: int, mean_drafts: float, seconds: float) -> None:
        raise AssertionError("the core tells this, not the scheduler")

    def observe_rows(self, num_drafts: int, accepted: Sequence[int]) -> None:
        assert 0 < num_drafts <= max(self._lengths) and all(0 <= count <= num_drafts for count in accepted)
        self.rows_seen += len(accepted)


class Guesser:
    """Knows what will be sampled, and tells it with a chance of `accuracy` for each token of a chain. A tree has that
    chain in it, among branches of noise in any order."""

    def __init__(self, runner: FakeRunner, rng: Random, accuracy: float, trees: bool = False):
        self._runner, self._rng, self._accuracy, self._trees = runner, rng, accuracy, trees
        self.known: dict[str, list[int]] = {}  # what it was shown of each live sequence
        self.num_forgotten = 0

    def propose(self, request_id: str, tokens: np.ndarray, most: int) -> Draft | None:
        assert tokens.dtype == np.int32 and most > 0
        _, true = self._runner.requests[request_id]
        before, known = self.known.get(request_id, []), tokens.tolist()
        assert known[: len(before)] == before
        self.known[request_id] = known
        return self.guess(true, len(known), most)

    def forget(self, request_id: str, tokens: np.ndarray, prompt_len: int) -> None:
        self.known.pop(request_id, None)
        self.num_forgotten += 1

    def guess(self, true: list[int], start: int, most: int) -> Draft | None:
        rng, count = self._rng, self._rng.randint(0, most) if self._trees else most
        chain = [
            true[at] if at < len(true) and rng.random() < self._accuracy else rng.randrange(VOCAB)
            for at in range(start, start + count)
        ]
        if not self._trees:
            return Draft(np.array(chain, np.int32)) if chain else None
        tokens: list[int] = []
        parents: list[int] = []
        siblings: set[tuple[int, int]] = set()
        last = -1
        for token in chain:
            while len(tokens) < most - 1 and rng.random() < 0.4:
                noise = rng.randrange(-1, len(tokens)), rng.randrange(VOCAB)
                if noise not in siblings and noise != (last, token):
                    siblings.add(noise)
                    parents.append(noise[0])
                    tokens.append(noise[1])
            if len(tokens) == most or (last, token) in siblings:
                break
            siblings.add((last, token))
            parents.append(last)
            tokens.append(token)
            last = len(tokens) - 1
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32)) if tokens else None


class DraftingRunner(FakeRunner):
    """Sends drafts along with the results, as a drafter on the device would, for all rows that sample."""

    def __init__(self, rng: Random, accuracy: float, trees: bool, **limits):
        super().__init__(**limits)
        self.drafts_on_device = True
        self._guesser = Guesser(self, rng, accuracy, trees)

    def dispatch(self, plan: StepPlan) -> tuple[int, StepResult]:
        handle, result = super().dispatch(plan)
        for i, row in enumerate(plan.rows):
            true = self.requests[row.request_id][1]
            start = row.start + row.num_tokens - row.num_drafts + len(result.token_ids[i])
            if row.samples and plan.draft_length:
                result.drafts[i] = self._guesser.guess(true, start, plan.draft_length)
        return handle, result
