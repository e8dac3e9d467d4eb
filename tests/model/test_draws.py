"""A drafter's tokens: drawn from its own distribution, or coupled with what the target will draw."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from model.sampling import SamplingRows, in_lanes, race
from model.speculative.draws import draw_drafts
from model.vocabulary import Vocabulary
from sharding.mesh import make_mesh, parse_mesh
from sharding.rules import axis_rules
from tests.model.sampling_cases import rows

COUNT, DEPTH = 20_000, 2
P, Q = np.array([0.6, 0.3, 0.1, 0.0], np.float32), np.array([0.2, 0.5, 0.3, 0.0], np.float32)
RULES = axis_rules(make_mesh(parse_mesh("1x1")), num_heads=1, num_kv_heads=1)


def many(**fields) -> SamplingRows:
    same = jax.tree.map(lambda x: jnp.repeat(x, COUNT, axis=0), rows(fields))
    return same._replace(seed=jnp.stack([jnp.zeros(COUNT, jnp.int32), jnp.arange(COUNT)], axis=1))


@partial(jax.jit, static_argnames="kind")
def drawn(kind, of: SamplingRows):
    """Of rows whose logits are those of Q."""
    hidden, matrix = jnp.ones((COUNT, 1)), jnp.log(jnp.maximum(Q, 1e-30))[:, None]
    return draw_drafts(kind, RULES, hidden, matrix, lambda m, h: h @ m.T, of, jnp.asarray(DEPTH))


def targets(of: SamplingRows) -> np.ndarray:
    """What the target will draw there."""
    weights = in_lanes(jnp.broadcast_to(jnp.asarray(P), (COUNT, len(P))), fill=0)
    return np.asarray(race(weights, of._replace(output_index=of.output_index + DEPTH), Vocabulary(size=len(P))))


def rate(p: np.ndarray, q: np.ndarray) -> float:
    p, q = p[p > 0], q[p > 0]
    return sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(len(p)))


def test_coupled_tokens_are_of_the_drafter_and_meet_the_targets_as_often_as_theory_says():
    of = many()
    tokens, q = drawn("coupled", of)
    assert q is None
    counts = np.bincount(tokens, minlength=4)
    assert counts[3] == 0 and stats.chisquare(counts[:3], Q[:3] * COUNT).pvalue > 1e-3
    expected, rejection = rate(P, Q), np.minimum(P, Q).sum()
    assert rejection / (2 - rejection) <= expected <= rejection and abs(expected - 0.578) < 1e-3
    assert abs((np.asarray(tokens) == targets(of)).mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / COUNT)


def test_probabilistic_tokens_come_with_their_distribution_and_without_the_targets_numbers():
    of = many()
    tokens, q = drawn("probabilistic", of)
    assert q is not None
    np.testing.assert_allclose(q, np.broadcast_to(Q, q.shape), atol=1e-6)
    assert stats.chisquare(np.bincount(tokens, minlength=3), Q[:3] * COUNT).pvalue > 1e-3
    table = np.histogram2d(np.asarray(tokens), targets(of), bins=[range(4), range(4)])[0]
    assert stats.chi2_contingency(table).pvalue > 1e-3  # independent


def test_options_of_the_row_hold_and_a_greedy_row_gets_the_best():
    for kind in ("greedy", "probabilistic", "coupled"):
        assert (np.asarray(drawn(kind, many(temperature=0.0))[0]) == 1).all()
    for kind in ("probabilistic", "coupled"):
        tokens, q = drawn(kind, many(top_k=2))
        assert set(np.unique(tokens)) == {1, 2}
        if q is not None:
            np.testing.assert_allclose(q[0], [0, 0.625, 0.375, 0], atol=1e-6)
