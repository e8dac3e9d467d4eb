"""Text that the target writes itself, made once: a file of one sequence a line, which a later run continues."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from serving.request import SamplingParams

# In turn. Half as benchmarks and extraction ask, half as chats do; what a small model writes at 1 is noise.
TEMPERATURES = (0.0, 0.8)
CHUNK = 96  # prompts between two saves


class TextError(Exception):
    """One line that says what is wrong with the saved text, or with what it is made of."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the text depends on. Saved with it, so that another run does not mix two kinds."""

    model: str
    prompts: str  # a file, or "built-in"
    max_tokens: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Sequence_:
    """A prompt and what the target wrote after it."""

    prompt: int  # its number
    temperature: float
    prompt_len: int
    tokens: list[int]

    @property
    def num_written(self) -> int:
        return len(self.tokens) - self.prompt_len


class Target(Protocol):
    """What writes: of each prompt (number, text, sampling) the prompt's and the written tokens."""

    def __call__(self, prompts: Sequence[str], sampling: Sequence[SamplingParams]
                 ) -> list[tuple[list[int], list[int]]]: ...  # fmt: skip


def write_text(file: Path, recipe: Recipe, prompts: Sequence[str], num_tokens: int,
               target: Callable[[], AbstractContextManager[Target]]) -> list[Sequence_]:  # fmt: skip
    """The first sequences of the file that have num_tokens written tokens together. If it has too few, further prompts
    are answered. target: loads it, only if something is to be written. Raises TextError."""
    sequences = list(_read(file, recipe)) if file.exists() else _begin(file, recipe)
    count = sum(sequence.num_written for sequence in sequences)
    if count >= num_tokens:
        return _first(sequences, num_tokens)
    with target() as write, tqdm(total=num_tokens, initial=count, unit=" tokens", desc="Writing text") as bar:
        while count < num_tokens:
            first = len(sequences)
            chunk = prompts[first : first + CHUNK]
            if not chunk:
                raise TextError(f"{len(prompts)} prompts gave {count} tokens, {num_tokens} are wanted; give more "
                                "prompts (--prompts FILE), longer answers (--max-tokens) or a lower --text-tokens")
            sampling = [_sampling(recipe, first + place) for place in range(len(chunk))]
            new = [Sequence_(prompt=first + place, temperature=how.temperature, prompt_len=len(prompt),
                             tokens=[*prompt, *written])
                   for place, (how, (prompt, written)) in enumerate(zip(sampling, write(chunk, sampling), strict=True))]
            with file.open("a") as out:
                out.write("".join(json.dumps(asdict(sequence)) + "\n" for sequence in new))
            sequences += new
            count += sum(sequence.num_written for sequence in new)
            bar.update(min(count, num_tokens) - bar.n)
    return _first(sequences, num_tokens)


def _first(sequences: list[Sequence_], num_tokens: int) -> list[Sequence_]:
    counts = itertools.accumulate(sequence.num_written for sequence in sequences)
    return sequences[: 1 + next(place for place, count in enumerate(counts) if count >= num_tokens)]


def _sampling(recipe: Recipe, prompt: int) -> SamplingParams:
    """A seed of its own, so that the text does not depend on the batch it was written in."""
    return SamplingParams(temperature=TEMPERATURES[prompt % len(TEMPERATURES)], max_tokens=recipe.max_tokens,
                          seed=recipe.seed * 1_000_003 + prompt)  # fmt: skip


def _begin(file: Path, recipe: Recipe) -> list[Sequence_]:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(recipe)) + "\n")
    return []


def _read(file: Path, recipe: Recipe) -> Iterator[Sequence_]:
    """Cuts off the half line that a killed run left."""
    lines = file.read_bytes().split(b"\n")
    if lines[-1]:
        with file.open("rb+") as out:
            out.truncate(out.seek(0, 2) - len(lines[-1]))
    if len(lines) < 2 or json.loads(lines[0]) != asdict(recipe):
        raise TextError(f"{file} was made of {lines[0].decode(errors='replace')[:200]}, not of "
                        f"{json.dumps(asdict(recipe))}; name another --work folder, or remove it")
    for line in lines[1:-1]:
        yield Sequence_(**json.loads(line))
