"""Drafters on the host through the real step: nothing that they guess changes what comes out."""

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest

from serving.decoding.speculation.config import SpeculativeConfig
from serving.decoding.speculation.drafter import Drafter
from serving.decoding.speculation.lengths import FixedLength
from serving.decoding.speculation.ngram import NgramDrafter
from serving.decoding.speculation.suffix import SuffixDrafter
from serving.engine.plan import Draft
from serving.engine.speculating import SpeculationParts
from serving.llm import LLM, SamplingParams
from tests.runner import drafting, test_greedy_goldens

Pair = tuple[list[int], list[int]]  # prompt and output
SUFFIX_TREE = {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_tree": True, "adaptive": False}


class Told:
    """Guesses what `continuation` says of all known tokens and an index after them; a tree has noise around it."""

    def __init__(self, continuation: Callable[[list[int], int], int], tree: bool = False):
        self._continuation, self._tree, self._rng = continuation, tree, Random(0)

    def propose(self, request_id: str, tokens: np.ndarray, most: int) -> Draft | None:
        known, guessed = tokens.tolist(), []
        for _ in range(most if not self._tree else (most + 1) // 2):
            guessed.append(self._continuation([*known, *guessed], len(guessed)))
        if not self._tree:
            return Draft(np.array(guessed, np.int32))
        mixed, parents, last = [], [], -1
        for token in guessed:  # before each token of the chain a sibling that is wrong
            wrong = (token + 1 + self._rng.randrange(5)) % 100
            mixed, parents = [*mixed, wrong, token], [*parents, last, last]
            last = len(mixed) - 1
        return Draft(np.array(mixed[:most], np.int32), np.array(parents[:most], np.int32))

    def forget(self, request_id: str, tokens: np.ndarray, prompt_len: int) -> None:
        pass


def told(outputs: Sequence[Pair], change: Callable[[int], int] = lambda token: token):
    """From all requests that may come: the token that is right, or another one."""

    def continuation(known: list[int], guessed: int) -> int:
        for prompt, output in outputs:
            done = len(known) - len(prompt)
            whole = [*prompt, *output]
            if 0 <= done < len(output) and known[: len(known) - guessed] == whole[: len(known) - guessed]:
                return change(output[done])
        return 0

    return continuation


def use(llm: LLM, drafter: Drafter, tree: bool) -> None:
    speculation = llm.service.engine.scheduler.speculation  # type: ignore[attr-defined]
    speculation._parts = SpeculationParts(length=FixedLength(4), drafter=drafter, tree_tokens=32 if tree else 0)


def drafters(outputs: Sequence[Pair], vocab: int, tree: bool) -> dict[str, tuple[Drafter, float]]:
    """By name, with the accepted share of drafts that it has at least."""
    rng = Random(1)
    made: dict[str, tuple[Drafter, float]] = {
        "ngram": (NgramDrafter(1, 3), 0),
        "suffix": (SuffixDrafter(SpeculativeConfig.of({"method": "suffix"})), 0),
        "good": (Told(told(outputs)), 0.9),
        "random": (Told(lambda known, guessed: rng.randrange(vocab)), 0),
        "adversarial": (Told(told(outputs, lambda token: (token + 1) % vocab)), 0),
        "ends": (Told(lambda known, guessed: 2), 0),  # the end of a sequence, over and over
    }
    if tree:
        made |= {"good tree": (Told(told(outputs), tree=True), 0.3),
                 "suffix tree": (SuffixDrafter(SpeculativeConfig.of(SUFFIX_TREE)), 0)}  # fmt: skip
    return made


@pytest.mark.slow
def test_same_tokens_with_any_drafter(tokenizer: str):
    """Greedy, drawn and penalized requests together, in a pool that chunks prompts and finds prefixes."""
    with drafting.engine(tokenizer, None) as llm:
        plain = drafting.tokens(drafting.run(llm))
    outputs = list(zip(drafting.PROMPTS, plain, strict=True))
    with drafting.engine(tokenizer, SUFFIX_TREE) as llm:
        for name, (drafter, share) in drafters(outputs, drafting.V, tree=True).items():
            use(llm, drafter, tree="tree" in name)
            before = llm.service.engine.stats
            assert drafting.tokens(drafting.run(llm)) == plain, name
            after = llm.service.engine.stats
            drafts = after.draft_tokens - before.draft_tokens
            accepted = after.accepted_tokens - before.accepted_tokens
            assert drafts > 0 and accepted >= share * drafts, (name, accepted, drafts)
            if name == "adversarial":
                assert accepted == 0


@pytest.mark.slow
@pytest.mark.optimized
def test_the_real_model_says_what_it_always_said():
    """Transformers' greedy tokens, with drafters good and bad."""
    prompts = test_greedy_goldens.PROMPTS[:2]
    outputs = [(prompt["prompt_token_ids"], prompt["output_token_ids"][:24]) for prompt in prompts]
    config = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=32)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    made = drafters(outputs, 49152, tree=False)
    with test_greedy_goldens.engine(speculative_config=config, **sizes) as llm:
        for name in ("ngram", "good", "random", "adversarial"):
            use(llm, made[name][0], tree=False)
            before = llm.service.engine.stats
            found = drafting.tokens(test_greedy_goldens.run(llm, prompts, greedy))
            assert found == [output for _, output in outputs], name
            after = llm.service.engine.stats
            assert after.draft_tokens > before.draft_tokens, name
            if name == "good":
                assert after.steps - before.steps < 12
