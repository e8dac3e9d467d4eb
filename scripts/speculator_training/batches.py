"""Whole sequences of the text, padded to one length.

Axis letters: B sequences, L tokens of a padded sequence, D model dim, F features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from scripts.speculator_training.features import Features
from scripts.speculator_training.text import Sequence_

HELD_OUT = 16  # every so many prompts one is held out


class Batch(NamedTuple):
    tokens: Int[Array, "B L"]
    lens: Int[Array, " B"]
    drafted: Bool[Array, "B L"]  # here the engine would draft: after the prompt's last token and all after it
    best: Int[Array, "B L"]  # the target's likeliest next token
    hidden: Float[Array, "B L D"]
    taps: Float[Array, "B L F"]


def ahead(x: jax.Array, count: int) -> jax.Array:
    """[B, L, ...]: of each position what stands `count` after it; zeros after the last."""
    return jnp.pad(x[:, count:], ((0, 0), (0, count), *((0, 0),) * (x.ndim - 2)))


@dataclass(frozen=True)
class Corpus:
    """The text with its features. with_taps: whether batches have them; a Medusa head does without."""

    sequences: Sequence[Sequence_]
    features: Features
    with_taps: bool

    @property
    def padded_len(self) -> int:
        return -(-max(len(sequence.tokens) for sequence in self.sequences) // 32) * 32

    def train(self) -> np.ndarray:
        return np.array([i for i, sequence in enumerate(self.sequences) if not _is_held_out(sequence)], np.int64)

    def held_out(self, temperature: float) -> np.ndarray:
        """Those written at this temperature."""
        return np.array([i for i, sequence in enumerate(self.sequences)
                         if _is_held_out(sequence) and sequence.temperature == temperature], np.int64)  # fmt: skip

    def epoch(self, seed: int, epoch: int, batch_size: int) -> list[np.ndarray]:
        """The sequences of each batch. What does not fill one is left to other epochs."""
        order = np.random.default_rng((seed, epoch)).permutation(self.train())
        return [order[i : i + batch_size] for i in range(0, len(order) - batch_size + 1, batch_size)]

    def batches(self, chosen: np.ndarray, batch_size: int) -> Iterator[Batch]:
        """All of them in turn; the last batch is filled up with empty sequences."""
        for i in range(0, len(chosen), batch_size):
            yield self.batch(chosen[i : i + batch_size], batch_size)

    def batch(self, chosen: np.ndarray, batch_size: int) -> Batch:
        B, L, features = batch_size, self.padded_len, self.features
        widths = (features.hidden.shape[1], features.taps.shape[1] if self.with_taps else 0)
        tokens, best, lens = np.zeros((B, L), np.int32), np.zeros((B, L), np.int32), np.zeros(B, np.int32)
        drafted = np.zeros((B, L), bool)
        hidden, taps = (np.zeros((B, L, width), ml_dtypes.bfloat16) for width in widths)
        for row, i in enumerate(chosen):
            sequence, at = self.sequences[i], slice(int(features.starts[i]), int(features.starts[i + 1]))
            count = lens[row] = len(sequence.tokens)
            tokens[row, :count], drafted[row, sequence.prompt_len - 1 : count] = sequence.tokens, True
            best[row, :count], hidden[row, :count] = features.best[at], features.hidden[at]
            if self.with_taps:
                taps[row, :count] = features.taps[at]
        return Batch(*(np.asarray(x) for x in (tokens, lens, drafted, best, hidden, taps)))  # type: ignore[arg-type]


def _is_held_out(sequence: Sequence_) -> bool:
    """Of neighbours, which have all temperatures, all or none."""
    return sequence.prompt // 2 % HELD_OUT == 0
