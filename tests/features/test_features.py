"""docs/features.md's table, cell by cell: any two features at once give what a roomy engine without them gives.

All requests of an engine run together, so that a cell has every other feature around it, too.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.decoding.speculation.config import SpeculativeConfig
from serving.errors import ConfigError
from serving.llm import LLM, SamplingParams
from serving.request import StructuredOutputs
from tests.features.engines import ON_A_MESH, ROOMY, TIGHT, VOCAB, Drafters, Outcome, run
from tests.features.table import CELLS, DIVIDED, DRAFTERS, HAPPENING, REFUSED, REQUESTED, state, table
from tests.tolerances import LOGITS_FLOAT32

DOCS = Path(__file__).parents[2] / "docs" / "features.md"
GOLDENS = Path(__file__).parents[1] / "goldens"
SHAPE = r"(red|green|blue) is the answer: [a-f]{1,4}[0-9]"
FIELDS: dict[str, dict[str, Any]] = {
    "n > 1": dict(n=2),
    "logprobs": dict(logprobs=3),
    "prompt logprobs": dict(prompt_logprobs=2),
    "penalties": dict(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
    "bias, bans": dict(logit_bias={900: 3.0, 1000: -100.0}, min_tokens=5, bad_words=("re", "th")),
    "stop strings": dict(stop=("e", "ing")),
    "seed": dict(temperature=0.9, top_p=0.95, seed=7),
    "grammar": dict(structured_outputs=StructuredOutputs(regex=SHAPE)),
    "fast-forward": dict(structured_outputs=StructuredOutputs(regex=SHAPE)),
}
PAIRS = [(a, b) for a in REQUESTED for b in REQUESTED if REQUESTED.index(a) <= REQUESTED.index(b)]
MESHES = {"tensor": "tensor=2,data=2", "data": "tensor=2,data=2"}
# What must have happened in an engine for its cells to mean anything.
FACTS = {"chunked prefill": "chunks", "prefix cache": "cached", "preemption": "preemption", "overlap": "overlapped",
         "fast-forward": "forced"}  # fmt: skip


def requests() -> list[tuple[list[int], SamplingParams]]:
    """One for each pair of what a request may ask for, two to a prompt, with a beginning that all share."""
    rng = np.random.default_rng(0)
    shared = rng.integers(20, VOCAB, 17).tolist()
    made = []
    for number, (first, second) in enumerate(PAIRS):
        again = rng.integers(20, VOCAB, 5).tolist()
        prompt = [*shared, number // 2 + 20, *again, *again, *again[: 1 + number % 4]]
        made.append((prompt, SamplingParams(**{"temperature": 0, "max_tokens": 24, **FIELDS[first], **FIELDS[second]})))
    return made


@pytest.fixture(scope="module")
def outcome_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None, str, bool], Outcome]:
    drafters, known = Drafters(tmp_path_factory.mktemp("drafters")), {}

    def get(drafter: str | None, mesh: str, tight: bool) -> Outcome:
        """Of an engine with room for all and nothing beside, or of one in which everything happens."""
        target = drafters.target(drafter)
        key = (drafter if tight else target, mesh, tight)
        if key not in known:
            sizes = ROOMY if not tight else TIGHT if mesh == "1x1" else ON_A_MESH
            speculative = None
            if drafter and tight:
                speculative = SpeculativeConfig.of(drafters.config(drafter, off_at=3))
            known[key] = run(target, requests(), mesh=mesh, speculative_config=speculative, **sizes)
        return known[key]

    return get


def marked(first: str, second: str) -> Any:
    """Drafters on a mesh take minutes to compile: some in CI, all of them in `scripts/check --parallelism`."""
    long = second in DIVIDED and first in set(DRAFTERS) - {"ngram", "eagle3"}
    marks = [pytest.mark.slow, *([pytest.mark.matrix] if long else [])]
    return pytest.param(first, second, id=f"{first} x {second}", marks=marks)


@pytest.mark.parametrize("first, second", [marked(*cell) for cell in CELLS if state(*cell) != REFUSED])
def test_cell(first: str, second: str, outcome_of: Callable[[str | None, str, bool], Outcome]):
    drafter = next((name for name in (first, second) if name in DRAFTERS), None)
    mesh = next((MESHES[name] for name in (first, second) if name in DIVIDED), "1x1")
    plain, outcome = outcome_of(drafter, "1x1", False), outcome_of(drafter, mesh, True)
    for name in (first, second):
        if name in FACTS:
            assert outcome.facts[FACTS[name]] > 0, f"nothing of {name} has happened: {outcome.facts}"
    if drafter is not None:
        assert outcome.facts["drafts"] > 0
    asked = {name for name in (first, second) if name in REQUESTED}
    chosen = [i for i, pair in enumerate(PAIRS) if asked <= set(pair)]
    assert chosen
    for once, again in zip(plain.outputs, outcome.outputs, strict=True):
        for i in chosen:
            compare(once[i], again[i])
    if "prefix cache" in (first, second):
        assert any(outcome.outputs[1][i].num_cached_tokens for i in chosen)


def compare(expected: Any, got: Any) -> None:
    assert len(got.outputs) == len(expected.outputs)
    close(expected.prompt_logprobs, got.prompt_logprobs)
    for one, other in zip(expected.outputs, got.outputs, strict=True):
        assert other.token_ids == one.token_ids and other.finish_reason == one.finish_reason
        close(one.logprobs, other.logprobs)


def close(expected: Any, got: Any) -> None:
    """Log-probabilities, where they were asked for."""
    assert (expected is None) == (got is None)
    for one, other in zip(expected or (), got or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert other.token_id == one.token_id and len(other.top_ids) == len(one.top_ids)
            np.testing.assert_allclose(other.logprob, one.logprob, atol=LOGITS_FLOAT32)


@pytest.mark.slow
def test_what_follows_a_grammar(outcome_of: Callable[[str | None, str, bool], Outcome]):
    """So that equal outputs are not equally wrong."""
    outputs = outcome_of(None, "1x1", True).outputs[0]
    for i, pair in enumerate(PAIRS):
        for one in outputs[i].outputs if {"grammar", "fast-forward"} & set(pair) else ():
            stopped = "stop strings" in pair or one.finish_reason == "length"
            assert stopped or re.fullmatch(SHAPE, one.text.removeprefix("\ufffd"))  # a prompt may end in mid-character


def test_an_engine_has_one_drafter():
    with pytest.raises(ConfigError, match="must be an object"):
        SpeculativeConfig.parse('[{"method": "ngram"}, {"method": "suffix"}]')
    assert {cell for cell in CELLS if state(*cell) == REFUSED} == {
        (a, b) for a, b in CELLS if a in DRAFTERS and b in DRAFTERS}  # fmt: skip


@pytest.mark.parametrize("golden, mesh, what", [
    ("mistral-window", "1x1", "attention windows"), ("llama-gqa-tied", "context=2", "a context axis"),
    ("llama-gqa-tied", "pipeline=3", "pipeline stages"),
])  # fmt: skip
def test_where_drafts_cannot_be_trees(golden: str, mesh: str, what: str, tokenizer: str):
    tree = SpeculativeConfig.of({"method": "suffix", "suffix_decoding_tree": True})
    with pytest.raises(ConfigError, match=f"trees do not go with {what}.*; a chain does"):
        LLM(str(GOLDENS / golden), tokenizer=tokenizer, mesh=mesh, speculative_config=tree, progress=False)


def test_the_table_in_the_docs_is_this_one():
    assert table() in DOCS.read_text()
    assert len(HAPPENING) + len(REQUESTED) + len(DRAFTERS) + len(DIVIDED) == 23
