"""Rejection sampling gives the target's distribution, by chi-square, and accepts as often as theory says."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from scipy import stats

from model.rejection import Verdict, draw_draft, reject
from model.sampling import SamplingRows, in_lanes, race
from model.vocabulary import Vocabulary
from tests.model.sampling_cases import flags, rows

COUNT, DRAFTS, MOST = 20_000, 2, 8
P, Q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.5, 0.3])


def many(count: int = COUNT, **fields) -> SamplingRows:
    """Rows with a seed each."""
    same = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), rows(fields))
    return same._replace(seed=jnp.stack([jnp.zeros(count, jnp.int32), jnp.arange(count)], axis=1))


def p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    counts = np.bincount(tokens, minlength=len(expected))
    possible = expected > 0
    assert counts[~possible].sum() == 0
    return stats.chisquare(counts[possible], expected[possible] * len(tokens) / expected.sum()).pvalue


def after(state, token, size: int):
    """Contexts are numbered: the empty one is 0, its successors 1 to size, theirs follow."""
    return state * size + token + 1


def contexts(size: int, length: int) -> int:
    """How many are shorter than this."""
    return (size**length - 1) // (size - 1)


@partial(jax.jit, static_argnames=("vocabulary", "verify"))
def speculate(p, q, state, num_drafts, of: SamplingRows, vocabulary: Vocabulary, verify=reject):
    """A step of rows in these contexts. p, q: [contexts, v], of the target and the drafter."""
    drafts, drawn_from, states = [], [], [state]
    for depth in range(DRAFTS):
        token, probabilities = draw_draft(jnp.log(q[states[-1]]), depth, of, flags(random=True), vocabulary)
        drafts, drawn_from = [*drafts, token], [*drawn_from, probabilities]
        states.append(after(states[-1], token, vocabulary.size))
    weights = p[jnp.stack(states, axis=1)]
    best = jnp.stack([vocabulary.best(weights[:, i])[1] for i in range(DRAFTS + 1)], axis=1)
    drafts = jnp.stack(drafts, axis=1)
    accepted, token = verify(weights, best, drafts, jnp.stack(drawn_from, axis=1), num_drafts, of, vocabulary)
    tokens = jnp.where(jnp.arange(DRAFTS + 1) == accepted[:, None], token[:, None], jnp.pad(drafts, ((0, 0), (0, 1))))
    return drafts, accepted, tokens


def first_tokens(p, q, verify=reject, drafts: int = DRAFTS):
    """(first drafts, whether each was accepted, first tokens) of COUNT rows."""
    padded = [np.pad(x, (0, MOST - len(x))) for x in (p, q)]  # one shape to compile
    tables = [jnp.asarray(np.tile(x, (contexts(MOST, DRAFTS + 1), 1)), jnp.float32) for x in padded]
    zeros = jnp.zeros(COUNT, jnp.int32)
    guesses, accepted, tokens = speculate(*tables, zeros, zeros + drafts, many(), Vocabulary(size=MOST), verify)
    return np.asarray(guesses[:, 0]), np.asarray(accepted) > 0, np.asarray(tokens[:, 0])


def resample_from_target(weights, best, drafts, q, num_drafts, of, vocabulary) -> Verdict:
    """The usual mistake."""
    verdict = reject(weights, best, drafts, q, num_drafts, of, vocabulary)
    return verdict._replace(token=race(in_lanes(weights[:, 0], fill=0), of, vocabulary))


def test_the_worked_case_of_three_tokens():
    guesses, accepted, tokens = first_tokens(P, Q)
    assert p_value(guesses, Q) > 1e-3
    assert p_value(tokens, P) > 1e-3
    assert abs(accepted.mean() - 0.6) < 4 * np.sqrt(0.6 * 0.4 / COUNT)
    wrong = first_tokens(P, Q, resample_from_target)[2]
    assert p_value(wrong, P) < 1e-9
    assert p_value(wrong, np.array([0.44, 0.42, 0.14])) > 1e-3


@pytest.mark.parametrize("size", range(3, MOST + 1))
def test_any_target_and_drafter(size):
    rng = np.random.default_rng(size)
    p, q = rng.dirichlet(np.full(size, 0.7), 2)
    p[0], q[1] = 0, 0  # what the target forbids (a grammar, top_k) the drafter may draw, and the reverse
    p, q = p / p.sum(), q / q.sum()
    _, accepted, tokens = first_tokens(p, q)
    assert p_value(tokens, p) > 1e-3
    rate = np.minimum(p, q).sum()
    assert abs(accepted.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / COUNT)


def test_three_tokens_of_steps_that_go_on_where_the_last_one_ended():
    size, length = 3, 3
    rng = np.random.default_rng(1)
    shape = contexts(size, length + DRAFTS)
    p, q = (jnp.asarray(rng.dirichlet(np.ones(size), shape), jnp.float32) for _ in range(2))
    of, whole = many(), Vocabulary(size=size)
    state, count = np.zeros(COUNT, np.int32), np.zeros(COUNT, np.int32)
    lengths = []
    while (count < length).any():
        num_drafts = np.where(count < length, DRAFTS, 0)
        now = of._replace(output_index=jnp.asarray(count))
        step = speculate(p, q, jnp.asarray(state), jnp.asarray(num_drafts), now, whole)
        accepted, tokens = map(np.asarray, step[1:])
        lengths.append(accepted[count < length])
        for depth in range(DRAFTS + 1):
            goes_on = (depth <= accepted) & (count < length)
            state = np.where(goes_on, after(state, tokens[:, depth], size), state)
            count = count + goes_on
    first = contexts(size, length)  # the first of the contexts of this length
    expected = np.zeros(size**length)
    for i in range(len(expected)):
        chance, at = 1.0, 0
        for token in np.unravel_index(i, (size,) * length):
            chance, at = chance * p[at, token], after(at, int(token), size)
        assert at == first + i
        expected[i] = chance
    assert p_value(state - first, expected) > 1e-3
    assert set(np.concatenate(lengths)) == {0, 1, 2}  # every kind of end was met


def test_a_drafter_that_is_the_target_is_always_right():
    assert first_tokens(P, P)[1].all()


def test_a_row_without_drafts_gets_what_it_would_without_speculation():
    tokens = first_tokens(P, Q, drafts=0)[2]
    weights = in_lanes(jnp.broadcast_to(jnp.asarray(P, jnp.float32), (COUNT, 3)), fill=0)
    np.testing.assert_array_equal(tokens, race(weights, many(), Vocabulary(size=MOST)))


def some_rows(count: int, size: int):
    rng = np.random.default_rng(7)
    p, q = (jnp.asarray(rng.dirichlet(np.ones(size), contexts(size, DRAFTS + 1)), jnp.float32) for _ in range(2))
    of = many(count)._replace(temperature=jnp.asarray(np.arange(count) % 3 / 2, jnp.float32))  # some are greedy
    return p, q, jnp.zeros(count, jnp.int32), jnp.asarray(np.arange(count) % (DRAFTS + 1), jnp.int32), of


def test_a_row_gets_the_same_whatever_else_is_in_the_batch_and_greedy_rows_the_best():
    p, q, state, num_drafts, of = some_rows(60, 8)
    whole = Vocabulary(size=8)
    step = speculate(p, q, state, num_drafts, of, whole)
    picked = np.random.default_rng(0).permutation(60)[:7]
    some = jax.tree.map(lambda x: x[picked], of)
    again = speculate(p, q, state[picked], num_drafts[picked], some, whole)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[picked]), again, step)
    _, accepted, tokens = map(np.asarray, step)
    for row in np.flatnonzero(np.asarray(of.temperature) == 0):
        at = 0
        for depth in range(accepted[row] + 1):
            assert tokens[row, depth] == jnp.argmax(p[at])
            at = after(at, int(tokens[row, depth]), 8)


def test_two_slices_of_the_vocabulary_give_the_same():
    size = 64
    p, q, state, num_drafts, of = some_rows(200, size)
    step = speculate(p, q, state, num_drafts, of, Vocabulary(size=size))
    sliced, alike = PartitionSpec(None, "tensor"), PartitionSpec()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    over = partial(speculate, vocabulary=Vocabulary(size=size, shards=2, axis="tensor"))
    compiled = jax.jit(jax.shard_map(over, mesh=mesh, in_specs=(sliced, sliced, *[alike] * 3), out_specs=alike,
                                     check_vma=False)).lower(p, q, state, num_drafts, of).compile()  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, compiled(p, q, state, num_drafts, of), step)
    exchanged = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (?:all-\w+|reduce-scatter|collective-permute)", compiled.as_text())
    assert len(exchanged) >= 3
    assert max(math.prod(map(int, dims.split(","))) for dims in exchanged if dims) < 200 * size / 2  # no row of logits
