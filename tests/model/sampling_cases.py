"""Rows, flags and states for the tests of sampling."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from model.next_tokens import sample
from model.sampling import SamplingFlags, SamplingRows, SamplingState, TokenLogprobs
from model.verification import positions_of
from model.vocabulary import Vocabulary

VOCAB, NUM_LOGPROBS = 300, 5  # not a multiple of 128 lanes
DEFAULTS = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0,
                presence_penalty=0.0, seed=0, output_index=0, slot=0, masked=False)  # fmt: skip

WHOLE = Vocabulary(size=VOCAB)


def sample_once(logits: jax.Array, many: SamplingRows, on: SamplingFlags, slots: SamplingState, vocabulary: Vocabulary
                ) -> tuple[jax.Array, TokenLogprobs, SamplingState]:  # fmt: skip
    """Of rows without drafts."""
    num_rows = len(logits)
    positions = positions_of(None, jnp.zeros(num_rows, jnp.int32), jnp.arange(num_rows + 1, dtype=jnp.int32), 0)
    sampled, after = sample(logits, many, positions, on, slots, num_logprobs=NUM_LOGPROBS, vocabulary=vocabulary)
    return sampled.tokens[:, 0], jax.tree.map(lambda x: x[:, 0], sampled.logprobs), after


run = jax.jit(partial(sample_once, vocabulary=WHOLE))


def rows(*fields: dict) -> SamplingRows:
    merged = [DEFAULTS | one for one in fields]
    column = lambda name, dtype: jnp.asarray([one[name] for one in merged], dtype)  # noqa: E731
    floats = {name: column(name, jnp.float32) for name in SamplingRows._fields
              if name.endswith(("penalty", "_p")) or name == "temperature"}  # fmt: skip
    seed = jnp.stack([jnp.zeros(len(merged), jnp.int32), column("seed", jnp.int32)], axis=1)
    return SamplingRows(slot=column("slot", jnp.int32), samples=jnp.ones(len(merged), bool),
                        masked=column("masked", bool), seed=seed,
                        output_index=column("output_index", jnp.int32), top_k=column("top_k", jnp.int32), **floats)


def state(slots: int = 4) -> SamplingState:
    shape = (slots, VOCAB)
    mask = jnp.zeros((slots, 1, -(-VOCAB // 32)), jnp.int32)
    return SamplingState(jnp.zeros(shape), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32), mask)


def flags(**on: bool) -> SamplingFlags:
    return SamplingFlags(*(jnp.asarray(on.get(name, False)) for name in SamplingFlags._fields))


ALL = flags(random=True, top_k=True, top_p=True, biased=True, penalized=True, logprobs=True)


def logits_of(seed: int, rows: int | None = None) -> np.ndarray:
    shape = (VOCAB,) if rows is None else (rows, VOCAB)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 2
