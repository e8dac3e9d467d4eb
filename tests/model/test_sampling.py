"""Sampling against plain numpy: what may be drawn, how often, and that nobody else in the batch matters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.sampling import BANNED, SamplingState, race, target_logprobs
from model.vocabulary import Vocabulary
from tests.model.sampling_cases import ALL, NUM_LOGPROBS, VOCAB, WHOLE, flags, logits_of, rows, run, state


def draws(logits: np.ndarray, count: int = 4000, **fields) -> np.ndarray:
    """Tokens of `count` rows with equal logits and different output indices."""
    many = rows(*(fields | {"output_index": i} for i in range(count)))
    wide = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, VOCAB))
    return np.asarray(run(wide, many, ALL, state())[0])


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def kept_by_definition(logits: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    probability = softmax(logits)
    order = np.argsort(-probability)
    kept = [int(t) for t in order if probability[t] >= min_p * probability[order[0]]]
    if top_k:
        kept = kept[:top_k]
    total = probability[kept].sum()
    mass, result = 0.0, []
    for token in kept:
        result.append(token)
        mass += probability[token]
        if mass >= top_p * total:
            break
    return set(result)


@pytest.mark.parametrize("options", [
    {"top_k": 1}, {"top_k": 7}, {"top_k": VOCAB + 5}, {"top_p": 0.1}, {"top_p": 0.9}, {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.5}, {"top_k": 10, "top_p": 0.8, "min_p": 0.05}, {"top_p": 1e-6},
], ids=str)  # fmt: skip
def test_only_the_kept_tokens_are_drawn_and_all_of_them(options):
    logits = logits_of(1)
    kept = kept_by_definition(logits, **options)
    drawn = set(draws(logits, **options).tolist())
    assert drawn <= kept
    probability = softmax(logits)
    mass = probability[list(kept)].sum()
    expected = {t for t in kept if probability[t] / mass > 5e-3}  # missed in 4000 draws once in 5e8
    assert expected <= drawn


def test_frequencies_follow_the_distribution():
    logits = np.full(VOCAB, -1e9, np.float32)
    logits[[3, 140, 299]] = np.log([0.6, 0.3, 0.1])
    counts = np.bincount(draws(logits, count=20_000), minlength=VOCAB)
    expected = 20_000 * np.array([0.6, 0.3, 0.1])
    chi_square = ((counts[[3, 140, 299]] - expected) ** 2 / expected).sum()
    assert counts.sum() == counts[[3, 140, 299]].sum()
    assert chi_square < 13.8  # 2 degrees of freedom, 0.1%


def test_what_was_filtered_out_is_never_drawn():
    rng = np.random.default_rng(10)
    weight = np.exp(-rng.exponential(3, (64, 40 * 128))).astype(np.float32)
    weight[rng.random(weight.shape) < 0.99] = 0
    weight[:16] = np.eye(16, weight.shape[1], 77) * 1.2e-38  # so far off that some arrivals overflow
    whole = Vocabulary(size=weight.shape[1])
    draw = jax.jit(
        lambda weight, index: race(weight.reshape(64, 40, 128), rows(*[{"output_index": index}] * 64), whole)
    )
    for index in range(50):
        token = np.asarray(draw(jnp.asarray(weight), index))
        assert (weight[np.arange(64), token] > 0).all()


@pytest.mark.parametrize("fields", [{"output_index": 1}, {"seed": 1}], ids=str)
def test_draws_of_equal_tokens_are_uniform_over_indices_and_over_seeds(fields):
    [(name, _)] = fields.items()
    count = 30_000
    drawn = []
    for start in range(0, count, 3000):
        many = rows(*({name: i} for i in range(start, start + 3000)))
        drawn.append(np.asarray(run(jnp.zeros((3000, VOCAB)), many, ALL, state())[0]))
    counts = np.bincount(np.concatenate(drawn), minlength=VOCAB)
    expected = count / VOCAB
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = VOCAB - 1
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5  # four standard deviations
    pairs = np.concatenate(drawn).astype(float)
    assert abs(np.corrcoef(pairs[:-1], pairs[1:])[0, 1]) < 0.03


def test_noise_of_the_size_of_rounding_does_not_change_draws():
    """Logits of one row differ by about 1e-6 from step shape to step shape; a flat distribution is the worst case."""
    rng = np.random.default_rng(11)
    logits = rng.standard_normal((512, 49_152)).astype(np.float32)
    noisy = logits + rng.uniform(-1e-6, 1e-6, logits.shape).astype(np.float32)
    many = rows(*({"seed": i} for i in range(512)))
    dense = (jnp.zeros((1, logits.shape[1]), dtype) for dtype in (jnp.float32, bool, jnp.int32))
    big = SamplingState(*dense, jnp.zeros((1, 1, logits.shape[1] // 32), jnp.int32))
    tokens = [np.asarray(run(x, many, flags(random=True), big)[0]) for x in (logits, noisy)]
    np.testing.assert_array_equal(*tokens)


def test_temperature_sharpens():
    logits = np.zeros(VOCAB, np.float32)
    logits[5] = 2.0
    probability = softmax(logits / 0.5)[5]
    share = (draws(logits, temperature=0.5) == 5).mean()
    assert abs(share - probability) < 0.03


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-3])
def test_tiny_temperatures_are_greedy_and_finite(temperature):
    logits = logits_of(2)
    assert set(draws(logits, count=50, temperature=temperature).tolist()) == {int(logits.argmax())}


def test_a_row_is_the_same_alone_and_in_any_batch():
    logits = logits_of(3, rows=8)
    fields = [
        {"seed": i, "output_index": i * 7, "temperature": 0.5 + i / 4, "top_p": 0.9, "top_k": i} for i in range(8)
    ]
    together = np.asarray(run(logits, rows(*fields), ALL, state())[0])
    alone = [int(run(logits[i : i + 1], rows(fields[i]), ALL, state())[0][0]) for i in range(8)]
    assert together.tolist() == alone


def test_seed_and_index_both_count():
    logits = np.zeros((1, VOCAB), np.float32)
    draw = lambda **fields: int(run(logits, rows(fields), ALL, state())[0][0])  # noqa: E731
    assert draw(seed=1) == draw(seed=1)
    assert len({draw(seed=s, output_index=i) for s in range(5) for i in range(5)}) > 15


def test_bias_bans_and_allows_only_in_its_slot():
    logits = logits_of(4, rows=2)
    best = logits.argmax(-1)
    bias = state().bias.at[1, int(best[1])].set(BANNED)
    tokens = run(logits, rows({"temperature": 0.0, "slot": 0}, {"temperature": 0.0, "slot": 1}), ALL,
                 state()._replace(bias=bias))[0]
    assert int(tokens[0]) == best[0]
    assert int(tokens[1]) == np.argsort(logits[1])[-2]
    only = jnp.full(VOCAB, BANNED).at[7].set(0.0)
    biased = state()._replace(bias=state().bias.at[0].set(only))
    assert int(run(logits[:1], rows({"temperature": 1.0}), ALL, biased)[0][0]) == 7


def test_penalties_by_definition():
    logits = logits_of(5, rows=1)
    counts, seen = np.zeros(VOCAB, np.int32), np.zeros(VOCAB, bool)
    counts[[3, 9]], seen[[9, 20]] = [2, 1], True
    options = {"repetition_penalty": 1.7, "frequency_penalty": 0.4, "presence_penalty": 0.9}
    touched = seen | (counts > 0)
    want = np.where(touched, np.where(logits[0] > 0, logits[0] / 1.7, logits[0] * 1.7), logits[0])
    want = want - 0.4 * counts - 0.9 * (counts > 0)
    empty = state(4)
    start = empty._replace(prompt_seen=empty.prompt_seen.at[2].set(seen),
                           output_counts=empty.output_counts.at[2].set(counts))  # fmt: skip
    token, _, after = run(logits, rows(options | {"temperature": 0.0, "slot": 2}), ALL, start)
    assert int(token[0]) == want.argmax()
    assert int(after.output_counts[2, int(token[0])]) == counts[int(token[0])] + 1
    assert int(after.output_counts.sum()) == counts.sum() + 1


def test_extreme_penalties_act():
    """A greedy row with the largest frequency penalty never repeats while there is something else."""
    logits, current, drawn = logits_of(6, rows=1) / 10, state(), []
    for _ in range(20):
        token, _, current = run(logits, rows({"temperature": 0.0, "frequency_penalty": 2.0}), ALL, current)
        drawn.append(int(token[0]))
    assert len(set(drawn)) == 20


def test_options_that_are_off_cost_and_change_nothing():
    logits = logits_of(7, rows=3)
    token, logprobs, after = run(logits, rows({}, {}, {}), flags(), state())
    np.testing.assert_array_equal(token, logits.argmax(-1))
    assert not np.asarray(logprobs.logprob).any() and not np.asarray(after.output_counts).any()


def test_logprobs_are_of_the_raw_distribution():
    logits = logits_of(8, rows=2)
    biased = state()._replace(bias=state().bias.at[0, 11].set(100.0))
    token, logprobs, _ = run(logits, rows({"temperature": 0.0}, {"temperature": 0.0, "slot": 1}), ALL, biased)
    assert int(token[0]) == 11
    for row in range(2):
        want = np.log(softmax(logits[row]))
        order = np.argsort(-want)
        assert float(logprobs.logprob[row]) == pytest.approx(want[int(token[row])], abs=1e-5)
        assert int(logprobs.rank[row]) == list(order).index(int(token[row])) + 1
        np.testing.assert_array_equal(logprobs.top_ids[row], order[:NUM_LOGPROBS])
        np.testing.assert_allclose(logprobs.top_logprobs[row], want[order[:NUM_LOGPROBS]], atol=1e-5)


def test_target_logprobs_in_chunks_equal_the_whole():
    rng = np.random.default_rng(9)
    hidden, matrix = rng.standard_normal((32, 8), np.float32), rng.standard_normal((VOCAB, 8), np.float32)
    targets = rng.integers(0, VOCAB, 32).astype(np.int32)
    project = lambda x: x @ matrix.T  # noqa: E731
    got = target_logprobs(jnp.asarray(hidden), targets, jnp.asarray(True), project, num_logprobs=NUM_LOGPROBS,
                         vocabulary=WHOLE)
    want = np.stack([np.log(softmax(hidden[t] @ matrix.T))[targets[t]] for t in range(32)])
    np.testing.assert_allclose(got.logprob, want, atol=1e-4)
    off = target_logprobs(jnp.asarray(hidden), targets, jnp.asarray(False), project, num_logprobs=NUM_LOGPROBS,
                         vocabulary=WHOLE)
    assert not np.asarray(off.logprob).any()


def test_argmax_takes_the_first_of_equals_and_survives_nan():
    x = jnp.asarray([[0.0, 3.0, 3.0], [jnp.nan, 1.0, 2.0], [-jnp.inf, -jnp.inf, -jnp.inf]])
    got = np.asarray(Vocabulary(size=3).best(x)[1])
    assert got[0] == 1 and got[2] == 0 and 0 <= got[1] < 3
