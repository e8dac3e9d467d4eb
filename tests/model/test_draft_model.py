"""A draft model that is the target itself guesses what the target says, whatever happened to the sequence before."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.build import choose_kernels
from model.speculative.common import SparePages
from model.speculative.draft_model import DraftModel
from model.speculative.drafter import Settled
from model.transformer import Transformer
from tests.model.harness import GOLDENS, all_logits, batch, kv_pages, load
from tests.model.sampling_cases import rows

PAGE, ROWS, DRAFTS = 8, 2, 3


@pytest.fixture(scope="module")
def target() -> Transformer:
    return load(GOLDENS / "llama-gqa-tied")


def greedy(target: Transformer, tokens: Sequence[int], count: int) -> list[int]:
    """What the target goes on with."""
    tokens = list(tokens)
    for _ in range(count):
        step = batch([(tokens, 0)], num_tokens=64, num_rows=1)
        logits, _ = all_logits(target, kv_pages(target), step)
        tokens.append(int(jnp.argmax(logits[len(tokens) - 1])))
    return tokens[-count:]


class Drafting:
    """Feeds a drafter steps that look as the engine's."""

    def __init__(self, target: Transformer, sampling: str = "greedy"):
        kernels = choose_kernels(target.config, target.rules, jnp.dtype(jnp.float32), attention_backend="xla",
                                 page_size=PAGE)  # fmt: skip
        spares = SparePages(rows=ROWS, guesses=DRAFTS, page_size=PAGE, groups=1)
        drafter = DraftModel(target, kernels, spares, max_drafts=DRAFTS, sampling=sampling)
        shape = drafter.state_shapes(1 + 8 * ROWS)
        self.state = jnp.full(shape.shape, jnp.nan, shape.dtype)  # what was never written must not count
        self.propose = jax.jit(partial(drafter.propose, num_drafts=DRAFTS, embedding=target.embedding[...],
                                       output_matrix=target.output_matrix))  # fmt: skip

    def step(self, *of_rows: tuple[Sequence[int], int, int, int], fields: Sequence[dict] = ({}, {})):
        """of_rows: (tokens fed, where they start, how many of the last are rejected drafts, the token that follows).
        Returns the drafts."""
        step = batch([(tokens, start) for tokens, start, _, _ in of_rows], num_tokens=32, num_rows=ROWS)
        used = -(-step.kv_lens[:, None] // PAGE)  # a row has the pages of this step's tokens, no more
        step = step._replace(page_table=jnp.where(jnp.arange(step.page_table.shape[1]) < used, step.page_table, 0))
        rejected, token = (jnp.asarray([row[i] for row in of_rows], jnp.int32) for i in (2, 3))
        settled = Settled(features=jnp.zeros((32, 1)), next_tokens=jnp.zeros(32, jnp.int32),
                          last=step.cu_q_lens[1:] - 1 - rejected, lens=step.kv_lens - rejected, token=token,
                          samples=jnp.ones(ROWS, bool))  # fmt: skip
        drafts, self.state = self.propose(self.state, settled, step, rows(*fields))
        return drafts


GREEDY = [{"temperature": 0.0}] * ROWS


def test_chunks_full_and_partial_acceptance_and_another_rows_pages(target):
    rng = np.random.default_rng(0)
    a, b = rng.integers(3, 120, 13).tolist(), rng.integers(3, 120, 7).tolist()
    after_a, after_b = greedy(target, a, 8), greedy(target, b, 12)
    drafting = Drafting(target)
    step = partial(drafting.step, fields=GREEDY)
    drafts = step((a[:5], 0, 0, a[5]), (b, 0, 0, after_b[0])).tokens  # a's prompt goes on
    assert drafts[1].tolist() == after_b[1:4]
    drafts = step((a[5:], 5, 0, after_a[0]), (after_b[:4], 7, 0, after_b[4])).tokens  # all of b's are accepted
    assert drafts.tolist() == [after_a[1:4], after_b[5:8]]
    wrong = [(x + 1) % 128 for x in after_a]
    drafts = step((after_a[:2] + wrong[2:4], 13, 2, after_a[2]), (after_b[4:5] + wrong[:3], 11, 3, after_b[5])).tokens
    assert drafts.tolist() == [after_a[3:6], after_b[6:9]]
    drafts = step((after_a[2:5], 15, 0, after_a[5]), (after_b[5:9], 12, 0, after_b[9])).tokens
    assert drafts[0, :2].tolist() == after_a[6:8] and drafts[1, :2].tolist() == after_b[10:12]
