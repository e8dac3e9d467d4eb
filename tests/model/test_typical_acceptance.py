"""Typical acceptance against its definition, path by path, and what it does to a distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from model.sampling import SamplingRows, in_lanes
from model.typical_acceptance import Typical, accept_typical
from model.verification import DraftRows, Positions, accept, positions_of
from model.vocabulary import Vocabulary

TREE = np.array([-1, 0, 1, 0, -1, 4, 4], np.int32)
CHAIN = np.arange(-1, 6, dtype=np.int32)
K, J = len(TREE), len(TREE) + 1
PUBLISHED = Typical()


def case(seed: int, rows: int, vocab: int, parents: np.ndarray) -> tuple[np.ndarray, Positions, np.ndarray]:
    """(p [S, J, V], positions, how many drafts each row has)."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, J, vocab)) * rng.choice([0.5, 2.0, 5.0], size=(rows, 1, 1))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    p[0, 0] = np.eye(vocab)[0]  # nothing else is possible
    count = rng.integers(0, K + 1, rows).astype(np.int32)
    count[:3] = K
    tokens, ends = [], [0]
    for n in count:
        tokens += [0, *rng.integers(0, vocab, n)]
        ends.append(len(tokens))
    drafts = DraftRows(jnp.asarray(count), jnp.zeros(rows, jnp.int32), jnp.asarray(np.tile(parents, (rows, 1))))
    where = jax.jit(positions_of, static_argnums=3)
    positions = where(drafts, jnp.asarray(tokens, jnp.int32), jnp.asarray(ends, jnp.int32), K)
    return p.astype(np.float32), positions, count


def sampling_rows(temperature: np.ndarray) -> SamplingRows:
    size = len(temperature)
    ints = jnp.zeros(size, jnp.int32)
    fields = dict.fromkeys(SamplingRows._fields, ints) | dict(
        seed=jnp.zeros((size, 2), jnp.int32), temperature=jnp.asarray(temperature, jnp.float32))
    return SamplingRows(**fields)


def accepted_tokens(p, positions: Positions, temperature: np.ndarray, typical=PUBLISHED) -> list[list[int]]:
    """Of each row the accepted drafts and the token after them; checks the path on the way."""
    weights = in_lanes(jnp.asarray(p.reshape(-1, p.shape[-1])) * 3, fill=0)  # p up to a factor
    best = jnp.asarray(p.argmax(-1), jnp.int32)
    judge = jax.jit(accept_typical, static_argnames=("typical", "vocabulary"))
    tokens, accepted = judge(weights, best, positions, sampling_rows(temperature), typical=typical,
                             vocabulary=Vocabulary(size=p.shape[-1]))  # fmt: skip
    found = []
    for row, count in enumerate(np.asarray(accepted.number)):
        path = np.asarray(accepted.path)[row, : count + 1]
        assert path[0] == 0 and (np.asarray(positions.parents)[row][path[1:] - 1] == path[:-1]).all()
        kept = next((i for i in range(count) if path[i + 1] != i + 1), count)
        assert accepted.kept[row] == kept
        assert (np.asarray(positions.drafts)[row][path[1:] - 1] == np.asarray(tokens)[row, :count]).all()
        found.append(np.asarray(tokens)[row, : count + 1].tolist())
    return found


def by_definition(p: np.ndarray, drafts: np.ndarray, parents: np.ndarray, greedy: bool, typical: Typical) -> list[int]:
    """One row, every path on its own."""
    candidates: list[tuple[int, float, list[int]]] = [(0, 0.0, [])]
    for node in range(len(drafts)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        likelihood, fine = 0.0, True
        for draft in path:
            at = p[parents[draft] + 1].astype(np.float64)
            entropy = -sum(x * np.log(x) for x in at if x > 0)
            chance = at[drafts[draft]]
            threshold = min(typical.epsilon, typical.delta * np.exp(-entropy))
            fine &= bool(drafts[draft] == at.argmax()) if greedy else bool(chance > threshold)
            likelihood += float(np.log(chance)) if chance > 0 else -np.inf
        if fine:
            candidates.append((len(path), likelihood, path))
    _, _, path = max(candidates, key=lambda found: found[:2])
    return [*drafts[path].tolist(), int(p[path[-1] + 1 if path else 0].argmax())]


@pytest.mark.parametrize("vocab", [3, 8, 200])
@pytest.mark.parametrize("parents", [TREE, CHAIN], ids=["tree", "chain"])
def test_the_longest_typical_path_is_accepted(vocab: int, parents: np.ndarray):
    p, positions, count = case(vocab, 60, vocab, parents)
    temperature = np.where(np.arange(60) % 4 == 3, 0.0, 0.8)
    drafts = np.asarray(positions.drafts)
    found = accepted_tokens(p, positions, temperature)
    for row, tokens in enumerate(found):
        n = count[row]
        assert tokens == by_definition(p[row], drafts[row, :n], parents, temperature[row] == 0, PUBLISHED)
    if vocab < 100:
        assert {len(tokens) for tokens in found} >= {1, 2, 3}


def test_slices_of_the_vocabulary_give_the_same():
    p, positions, _ = case(5, 60, 200, TREE)
    rows, best = sampling_rows(np.where(np.arange(60) % 4 == 3, 0.0, 0.8)), jnp.asarray(p.argmax(-1), jnp.int32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("tensor",))

    def judge(p, best, positions, rows):
        return accept_typical(in_lanes(p, fill=0), best, positions, rows, PUBLISHED,
                              Vocabulary(size=200, shards=4, axis="tensor"))  # fmt: skip

    alike, sliced = PartitionSpec(), PartitionSpec(None, "tensor")
    on_slices = jax.jit(jax.shard_map(judge, mesh=mesh, in_specs=(sliced, alike, alike, alike), out_specs=alike,
                                      check_vma=False))  # fmt: skip
    tokens, accepted = on_slices(jnp.asarray(p.reshape(-1, 200)), best, positions, rows)
    found = [row[: n + 1].tolist() for row, n in zip(np.asarray(tokens), np.asarray(accepted.number), strict=True)]
    assert found == accepted_tokens(p, positions, np.asarray(rows.temperature))


def test_greedy_rows_are_exact():
    p, positions, _ = case(1, 40, 3, TREE)
    best = jnp.asarray(p.argmax(-1), jnp.int32)
    exact = accept(best, positions)
    found = accepted_tokens(p, positions, np.zeros(40))
    assert [len(tokens) - 1 for tokens in found] == exact.number.tolist() and max(exact.number) > 1
    for tokens, wanted in zip(found, np.asarray(exact.of_path(best)), strict=True):
        assert tokens == wanted[: len(tokens)].tolist()


def test_thresholds_come_from_entropy():
    """Four equally likely tokens: H = log 4, so the threshold is min(0.09, 0.3 / 4 = 0.075)."""
    p = np.full((1, J, 40), 1e-9, np.float32)
    p[:, :, :4] = [0.25, 0.25, 0.25, 0.25]
    p[:, 1, :4] = [0.78, 0.08, 0.07, 0.07]  # the second draft: H = 0.768, the threshold min(0.09, 0.139)
    tokens = jnp.asarray([0, 3, 1, 0, 0, 0, 0, 0], jnp.int32)
    drafts = DraftRows(jnp.asarray([K]), jnp.zeros(1, jnp.int32), None)
    positions = positions_of(drafts, tokens, jnp.asarray([0, K + 1]), K)
    assert accepted_tokens(p, positions, np.ones(1)) == [[3, 0]]
    assert accepted_tokens(p, positions, np.ones(1), Typical(epsilon=0.079)) == [[3, 1, 0, 0, 0, 0, 0, 0]]
    assert accepted_tokens(p, positions, np.ones(1), Typical(delta=1.01)) == [[3, 0]]
    assert accepted_tokens(p, positions, np.ones(1), Typical(epsilon=0.26, delta=1.01)) == [[0]]


def test_it_does_not_keep_the_distribution():
    """A draft of 10% is always taken: the distance from the target's distribution is 0.9."""
    p = np.tile(np.array([0.6, 0.3, 0.1], np.float32), (1, 2, 1))
    positions = positions_of(DraftRows(jnp.asarray([1]), jnp.zeros(1, jnp.int32), None), jnp.asarray([0, 2]),
                             jnp.asarray([0, 2]), 1)  # fmt: skip
    [tokens] = accepted_tokens(p, positions, np.ones(1))
    first = np.eye(3)[tokens[0]]
    assert tokens == [2, 0]
    assert np.isclose(np.abs(first - p[0, 0]).sum() / 2, 0.9)


def test_without_drafts_the_best_token_follows():
    p = np.array([[[0.2, 0.5, 0.3]]], np.float32)
    positions = positions_of(None, jnp.asarray([0]), jnp.asarray([0, 1]), 0)
    assert accepted_tokens(p, positions, np.ones(1)) == [[1]]
