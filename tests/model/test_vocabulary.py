"""A vocabulary in slices over devices gives what one device gives, and no row of logits is gathered for it."""

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from model.sampling import SamplingState
from model.vocabulary import Vocabulary, embed
from tests.model.sampling_cases import ALL, NUM_LOGPROBS, VOCAB, WHOLE, flags, logits_of, rows, run, sample_once, state
from tests.tolerances import LOGPROBS_FLOAT32

SHARDS = (2, 4)
OPTIONS = [
    {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 1}, {"top_k": 9, "seed": 3}, {"top_p": 0.8, "seed": 4},
    {"top_k": 40, "top_p": 0.6, "min_p": 0.01}, {"temperature": 0.0, "repetition_penalty": 1.5}, {"min_p": 0.3},
    {"frequency_penalty": 1.0, "presence_penalty": 0.5, "temperature": 1.4}, {"temperature": 0.0},
]  # fmt: skip


SLICED, ALIKE = PartitionSpec(None, "tensor"), PartitionSpec()
STATE: Any = SamplingState(SLICED, SLICED, SLICED, ALIKE)


def sampled_over(shards: int):
    """`sample` with the vocabulary in slices, compiled, of all rows of OPTIONS."""
    def step(logits, many, on, slots):
        return sample_once(logits, many, on, slots, Vocabulary(size=VOCAB, shards=shards, axis="tensor"))

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:shards]), ("tensor",))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(SLICED, ALIKE, ALIKE, STATE),
                                 out_specs=(ALIKE, ALIKE, STATE), check_vma=False))  # fmt: skip


def used_state(slots: int) -> SamplingState:
    rng, shape = np.random.default_rng(20), (slots, VOCAB)
    return SamplingState(*map(jnp.asarray, (rng.standard_normal(shape).astype(np.float32), rng.random(shape) < 0.1,
                                            rng.integers(0, 3, shape).astype(np.int32),
                                            rng.integers(-(2**31), 2**31, (slots, 1, -(-VOCAB // 32)), np.int32))))


@pytest.mark.parametrize("shards", SHARDS)
def test_slices_give_the_same_tokens(shards: int):
    logits = jnp.asarray(logits_of(12, rows=len(OPTIONS))).at[0, [40, 120, 290]].set(20.0)  # equals, on three devices
    logits = logits.at[-1, 299].set(30.0)
    many, on_slices = rows(*({"slot": i} | one for i, one in enumerate(OPTIONS))), sampled_over(shards)
    for on in (ALL, flags(), flags(random=True, top_k=True, top_p=True, logprobs=True), flags(penalized=True)):
        token, logprobs, after = run(logits, many, on, used_state(len(OPTIONS)))
        again, logprobs_again, after_again = on_slices(logits, many, on, used_state(len(OPTIONS)))
        np.testing.assert_array_equal(again, token)
        jax.tree.map(np.testing.assert_array_equal, after_again, after)
        for name in ("rank", "top_ids"):
            np.testing.assert_array_equal(getattr(logprobs_again, name), getattr(logprobs, name))
        for name in ("logprob", "top_logprobs"):  # sums in another order
            np.testing.assert_allclose(getattr(logprobs_again, name), getattr(logprobs, name), atol=LOGPROBS_FLOAT32)
    plain = on_slices(logits, many, flags(), used_state(len(OPTIONS)))[0]
    assert (plain[0], plain[-1]) == (40, 299)


def test_draws_on_slices_are_those_of_one_device():
    count = 500
    many = rows(*({"output_index": i, "top_k": i % 40, "top_p": 0.5 + (i % 7) / 14} for i in range(count)))
    wide = jnp.broadcast_to(jnp.asarray(logits_of(13)), (count, VOCAB))
    np.testing.assert_array_equal(sampled_over(4)(wide, many, ALL, state())[0], run(wide, many, ALL, state())[0])


def test_no_row_of_logits_crosses_devices():
    """Whatever a row asks for: what is exchanged is a few numbers a row."""
    count, shards = 3, 4
    text = sampled_over(shards).lower(jnp.zeros((count, VOCAB)), rows(*[{}] * count), ALL, state()).compile().as_text()
    found = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (all-reduce|all-gather|all-to-all|collective-permute|"
                       r"reduce-scatter)(?:-start)?\(", text)  # fmt: skip
    assert len(found) >= 8
    widest = max(math.prod(int(n) for n in dims.split(",") if n) for dims, _ in found)
    assert widest <= shards * count * (2 * NUM_LOGPROBS + 1) < count * VOCAB
    assert {kind for _, kind in found} == {"all-reduce", "all-gather"}


def test_embedding_in_slices():
    matrix = jnp.asarray(np.random.default_rng(14).standard_normal((VOCAB, 16)), jnp.bfloat16)
    tokens = jnp.asarray([0, 74, 75, 299, 150, 149])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("tensor",))
    some = partial(embed, vocabulary=Vocabulary(size=VOCAB, shards=4, axis="tensor"))
    got = jax.shard_map(some, mesh=mesh, in_specs=(PartitionSpec("tensor"), ALIKE), out_specs=ALIKE, check_vma=False)
    np.testing.assert_array_equal(got(matrix, tokens), embed(matrix, tokens, WHOLE))
    np.testing.assert_array_equal(embed(matrix, tokens, WHOLE), matrix[tokens])
