"""What drafters learn from: the target's hidden states over the whole text, computed once and kept in a file.

Axis letters: N tokens of the text, T of a step, S rows of a step, D model dim, F features (those of the taps), V vocab.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from tqdm import tqdm

from model.batch import StepBatch
from model.config import ModelConfig
from model.transformer import Transformer
from scripts.speculator_training.text import Sequence_
from serving.loading import LoadedModel

STEP_TOKENS, STEP_ROWS = 2048, 32
LOGITS_AT_ONCE = 128


def default_taps(config: ModelConfig) -> tuple[int, ...]:
    """The layers whose inputs EAGLE-3 takes."""
    n = config.num_layers
    return tuple(min(max(layer, 0), n) for layer in (2, n // 2, n - 3))


@dataclass(frozen=True)
class Features:
    """Of sequence q the tokens starts[q] .. starts[q + 1] - 1."""

    starts: np.ndarray  # int64 [Q + 1]
    taps: np.memmap  # bfloat16 [N, F]
    hidden: np.memmap  # bfloat16 [N, D], normed
    best: np.memmap  # int32 [N], the target's likeliest next token

    @property
    def arrays(self) -> tuple[np.memmap, ...]:
        return self.taps, self.hidden, self.best


def compute(folder: Path, loaded: LoadedModel, sequences: Sequence[Sequence_], taps: tuple[int, ...]) -> Features:
    """The features of the sequences, read from the folder as far as they are there: it may have been made for fewer or
    for more of the same text."""
    config = loaded.model.config
    starts = np.cumsum([0, *(len(sequence.tokens) for sequence in sequences)])
    folder.mkdir(parents=True, exist_ok=True)
    progress, of = folder / "progress.json", list(taps)
    done = _done(progress, of, starts)
    mode = "r+" if done else "w+"
    N, D = int(starts[-1]), config.hidden_size
    files = Features(
        starts,
        np.memmap(folder / "taps.bin", ml_dtypes.bfloat16, mode, shape=(N, len(taps) * D)),
        np.memmap(folder / "hidden.bin", ml_dtypes.bfloat16, mode, shape=(N, D)),
        np.memmap(folder / "best.bin", np.int32, mode, shape=(N,)),
    )
    if done >= len(sequences):
        return files
    run = _Forward(loaded, taps, max(map(len, (sequence.tokens for sequence in sequences))))
    with tqdm(total=N, initial=int(starts[done]), unit=" tokens", desc="Computing features") as bar:
        for first, stop in _steps(starts, done):
            at = slice(int(starts[first]), int(starts[stop]))
            rows = [sequence.tokens for sequence in sequences[first:stop]]
            for out, values in zip(files.arrays, run(rows), strict=True):
                out[at] = values[: at.stop - at.start]
            for out in files.arrays:
                out.flush()
            _write(progress, json.dumps({"taps": of, "starts": starts[: stop + 1].tolist()}))
            bar.update(at.stop - at.start)
    return files


def _done(progress: Path, taps: list[int], starts: np.ndarray) -> int:
    """How many sequences were computed, of those wanted or more."""
    if not progress.exists():
        return 0
    found = json.loads(progress.read_text())
    both = min(len(found["starts"]), len(starts))
    return len(found["starts"]) - 1 if found["taps"] == taps and found["starts"][:both] == starts[:both].tolist() else 0


def tap_scales(found: Features, num_taps: int, sample: int = 4096) -> np.ndarray:
    """[F]: the usual size of each tap's numbers, as a power of two, by which division is exact. The median: a text's
    first token is often a thousand times larger."""
    chosen = np.linspace(0, len(found.taps) - 1, min(sample, len(found.taps)), dtype=np.int64)
    squares = np.square(found.taps[chosen].astype(np.float32)).reshape(len(chosen), num_taps, -1)
    sizes = np.median(np.sqrt(squares.mean(axis=2)), axis=0)
    return np.repeat(np.exp2(np.round(np.log2(np.maximum(sizes, 1e-6)))), squares.shape[2]).astype(np.float32)


def _steps(starts: np.ndarray, done: int) -> Iterator[tuple[int, int]]:
    """Whole sequences, as many as fit into a step; one that does not fit has a step of its own."""
    while done < len(starts) - 1:
        fit = int(np.searchsorted(starts, starts[done] + STEP_TOKENS, side="right")) - 1
        stop = min(max(done + 1, fit), done + STEP_ROWS)
        yield done, stop
        done = stop


def _write(file: Path, text: str) -> None:
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)


class _Forward:
    """Whole sequences through the model that serves, as one step of prompts."""

    def __init__(self, loaded: LoadedModel, taps: tuple[int, ...], longest: int):
        self._model, self._taps = loaded.model, taps
        self._num_tokens = -(-max(STEP_TOKENS, longest) // LOGITS_AT_ONCE) * LOGITS_AT_ONCE
        layout = loaded.kernels.kv_layout(1)
        self._page_size, self._row_pages = layout.page_size, -(-longest // layout.page_size)
        num_pages = 1 + STEP_ROWS + self._num_tokens // layout.page_size
        layout = loaded.kernels.kv_layout(num_pages)
        rules = loaded.model.rules
        self._pages = jnp.zeros(layout.shape, loaded.dtype, device=rules.sharding(layout.axes, layout.shape))

    def __call__(self, rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Taps [T, F], hidden states [T, D] and likeliest next tokens [T] of the rows, one after the other; then
        padding."""
        features, hidden, best, self._pages = _run(self._model, self._pages, self._batch(rows), self._taps)
        return np.asarray(features), np.asarray(hidden), np.asarray(best)

    def _batch(self, rows: Sequence[Sequence[int]]) -> StepBatch:
        T, S = self._num_tokens, STEP_ROWS
        tokens, positions = np.zeros(T, np.int32), np.zeros(T, np.int32)
        lens, table = np.zeros(S, np.int32), np.zeros((S, self._row_pages), np.int32)
        at, page = 0, 1
        for row, new in enumerate(rows):
            count = -(-len(new) // self._page_size)
            tokens[at : at + len(new)], positions[at : at + len(new)] = new, np.arange(len(new))
            table[row, :count], lens[row] = page + np.arange(count), len(new)
            at, page = at + len(new), page + count
        cu_q_lens = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        distribution = np.array([0, len(rows), len(rows)], np.int32)
        return StepBatch(
            tokens=jnp.asarray(tokens), positions=jnp.asarray(positions), page_table=jnp.asarray(table),
            kv_lens=jnp.asarray(lens), cu_q_lens=jnp.asarray(cu_q_lens), distribution=jnp.asarray(distribution),
        )  # fmt: skip


@partial(nnx.jit, static_argnums=3, donate_argnums=1)
def _run(model: Transformer, pages: jax.Array, batch: StepBatch, taps: tuple[int, ...]):
    hidden, features, pages, _ = model.with_features(pages, batch, taps)

    def best(hidden: jax.Array) -> jax.Array:
        return jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)

    likeliest = jax.lax.map(best, hidden.reshape(-1, LOGITS_AT_ONCE, hidden.shape[1])).reshape(-1)
    narrow = jnp.bfloat16
    return features.astype(narrow), hidden.astype(narrow), likeliest, pages
