"""Which drafts are accepted, what a tree's tokens see, and that what comes out has the target's distribution."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.next_tokens import sample
from model.verification import (
    DraftRows,
    accept,
    allowed_tokens,
    following_tokens,
    positions_of,
    settled_order,
    tree_mask,
)
from tests.model.sampling_cases import WHOLE, flags, rows
from tests.model.sampling_cases import state as empty_state

K, VOCAB = 6, 3
CHI_SQUARE = {2: 13.82, 8: 26.12}  # exceeded once in a thousand tries, by degrees of freedom


@st.composite
def families(draw):
    """Rows of known tokens with drafts behind: (known, draft tokens, parents) of each."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, K))
        parents = [draw(st.integers(-1, i - 1)) for i in range(count)]
        tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count))
        made.append((draw(st.integers(1, 5)), tokens, parents))
    return made


def packed(made):
    """(drafts, tokens, cu_q_lens, by_index) as a step has them; known tokens are all 7."""
    lengths = [known + len(tokens) for known, tokens, _ in made]
    tokens = jnp.asarray([t for known, drafts, _ in made for t in [7] * known + drafts] + [9] * 4, jnp.int32)
    cu_q_lens = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    parents = np.zeros((len(made), K), np.int32)
    for row, (_, _, of_row) in enumerate(made):
        parents[row, : len(of_row)] = of_row
    number = jnp.asarray([len(of_row) for _, of_row, _ in made], jnp.int32)
    by_index = jnp.asarray([i for n in lengths for i in range(n)] + [0] * 4, jnp.int32)
    return DraftRows(number, jnp.full(len(made), 5, jnp.int32), jnp.asarray(parents)), tokens, cu_q_lens, by_index


def ancestors(parents: list[int], draft: int) -> list[int]:
    """Itself last."""
    return [] if draft < 0 else [*ancestors(parents, parents[draft]), draft]


@settings(max_examples=30, deadline=None)
@given(made=families(), data=st.data())
def test_the_accepted_path(made, data):
    drafts, tokens, cu_q_lens, _ = packed(made)
    positions = positions_of(drafts, tokens, cu_q_lens, K)
    sampled = np.asarray(data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=K + 1, max_size=K + 1),
                                            min_size=len(made), max_size=len(made))))  # fmt: skip
    accepted = accept(jnp.asarray(sampled), positions)
    on_path = np.asarray(accepted.of_path(jnp.asarray(sampled)))
    after = np.asarray(following_tokens(tokens, accepted, positions, jnp.asarray(on_path),
                                        jnp.ones(len(made), bool), jnp.zeros(len(made), bool), drafts))  # fmt: skip
    order = np.asarray(settled_order(accepted, positions, len(tokens)))
    for row, (known, of_row, parents) in enumerate(made):
        path, at = [], -1  # by definition
        while fitting := [i for i, p in enumerate(parents) if p == at and of_row[i] == sampled[row, at + 1]]:
            at = fitting[0]
            path.append(at)
        kept = next((i for i, draft in enumerate(path) if draft != i), len(path))
        assert int(accepted.number[row]) == len(path) and int(accepted.kept[row]) == kept
        expected = [of_row[i] for i in path] + [int(sampled[row, at + 1])]
        assert on_path[row, : len(expected)].tolist() == expected
        last = int(cu_q_lens[row]) + known - 1
        assert after[last : last + len(expected)].tolist() == expected
        assert order[last + 1 : last + 1 + len(path)].tolist() == [last + 1 + i for i in path]
        assert np.asarray(positions.depth)[row, 1 : len(of_row) + 1].tolist() == [
            len(ancestors(parents, i)) for i in range(len(of_row))]  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(made=families())
def test_a_tokens_ancestors_are_what_it_sees(made):
    drafts, tokens, cu_q_lens, by_index = packed(made)
    positions = positions_of(drafts, tokens, cu_q_lens, K)
    seen, placed = tree_mask(positions, drafts, cu_q_lens, by_index, 2)
    at = 0
    for known, of_row, parents in made:
        for index in range(known + len(of_row)):
            draft = index - known
            visible = list(range(min(index + 1, known))) + [known + i for i in ancestors(parents, draft)]
            words = sum(int(word) << (32 * i) for i, word in enumerate(np.asarray(seen)[at]))
            assert [i for i in range(64) if words >> i & 1] == visible
            assert int(placed[at]) == len(visible) - 1
            at += 1


def test_chains_need_no_parents():
    made = [(2, [0, 1, 2], [-1, 0, 1]), (1, [], []), (3, [2], [-1])]
    drafts, tokens, cu_q_lens, _ = packed(made)
    tree, chain = (positions_of(d, tokens, cu_q_lens, K) for d in (drafts, drafts._replace(parents=None)))
    sampled = jnp.asarray([[0, 1, 0, 0, 0, 0, 0], [1] * 7, [2, 0, 0, 0, 0, 0, 0]])
    for a, b in zip(accept(sampled, tree), accept(sampled, chain), strict=True):
        np.testing.assert_array_equal(a, b)


TARGET = np.array([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [0.5, 0.25, 0.25]])  # after: start, 0, 1, 2


@pytest.mark.parametrize("drafts, parents", [
    ([0, 2], None), ([2, 2], None), ([1, 0], [-1, -1]), ([2, 1, 0, 0], [-1, -1, -1, 1]), ([1, 1, 2], [-1, 0, 0]),
], ids=str)  # fmt: skip
def test_two_tokens_have_the_targets_joint_distribution(drafts, parents):
    """However bad the drafts are. Where a row ends before two tokens, the next step samples with the next index."""
    count, most = 6000, len(drafts)
    parents = list(range(-1, most - 1)) if parents is None else parents
    tokens = jnp.tile(jnp.asarray([7, *drafts], jnp.int32), count)
    cu_q_lens = jnp.arange(count + 1, dtype=jnp.int32) * (most + 1)
    draft_rows = DraftRows(jnp.full(count, most, jnp.int32), jnp.zeros(count, jnp.int32),
                           jnp.tile(jnp.asarray(parents, jnp.int32), (count, 1)))  # fmt: skip
    positions = positions_of(draft_rows, tokens, cu_q_lens, most)
    many = rows(*({"seed": i} for i in range(count)))
    logits = np.full((1 + most, WHOLE.size), -1e9, np.float32)
    logits[:, :VOCAB] = np.log(TARGET[[0, *(1 + np.asarray(drafts))]])
    on = flags(random=True)
    run = jax.jit(lambda logits, many, positions: sample(logits, many, positions, on, empty_state(), num_logprobs=1,
                                                         vocabulary=WHOLE)[0])  # fmt: skip
    first = run(jnp.tile(jnp.asarray(logits), (count, 1)), many, positions)
    sampled, accepted = np.asarray(first.tokens), np.asarray(first.accepted.number)
    again = rows(*({"seed": i, "output_index": 1} for i in range(count)))
    after = np.full((count, WHOLE.size), -1e9, np.float32)
    after[:, :VOCAB] = np.log(TARGET[1 + sampled[:, 0]])
    nothing = positions_of(None, jnp.zeros(count, jnp.int32), jnp.arange(count + 1, dtype=jnp.int32), 0)
    later = np.asarray(run(jnp.asarray(after), again, nothing).tokens)[:, 0]
    second = np.where(accepted > 0, sampled[:, min(1, most)], later)
    assert (second == later).all(), "the same seed gives the same token, drafted or not"
    pairs = np.bincount(sampled[:, 0] * VOCAB + second, minlength=VOCAB**2)
    expected = np.array([TARGET[0, a] * TARGET[1 + a, b] for a, b in itertools.product(range(VOCAB), repeat=2)]) * count
    assert ((pairs - expected) ** 2 / expected).sum() < CHI_SQUARE[VOCAB**2 - 1]
    taken = sum(TARGET[0, t] for t in {t for t, p in zip(drafts, parents, strict=True) if p < 0})
    assert abs((accepted > 0).mean() - taken) < 0.03


def test_a_mask_bars_all_other_tokens():
    allowed = np.random.default_rng(0).random((5, 300)) < 0.1
    words = np.packbits(np.pad(allowed, ((0, 0), (0, 20))), axis=1, bitorder="little").view(np.int32)
    np.testing.assert_array_equal(allowed_tokens(jnp.asarray(words), 0, 300), allowed)
    np.testing.assert_array_equal(allowed_tokens(jnp.asarray(words), jnp.int32(100), 50), allowed[:, 100:150])
