"""The stages in turn: text, features, training, measuring, writing."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from checkpoints.default_model import default_model_path
from scripts.speculator_training import features, text
from scripts.speculator_training.batches import Corpus
from scripts.speculator_training.eagle3 import Eagle3
from scripts.speculator_training.export import stored_dtype, write_folder
from scripts.speculator_training.medusa import Medusa
from scripts.speculator_training.method import Frozen, Method, Params, Target
from scripts.speculator_training.objective import Acceptance, acceptance
from scripts.speculator_training.prompts import built_in
from scripts.speculator_training.text import Sequence_
from scripts.speculator_training.training import Plan, train
from serving.config import EngineConfig
from serving.errors import InvalidRequest
from serving.llm import LLM
from serving.loading import load_model
from serving.request import SamplingParams

WORK = Path.home() / ".cache" / "pageloom" / "speculators"
ABOUT = "training.json"


class Refused(Exception):
    """One line that says what is wrong with what was asked."""


def run(options: argparse.Namespace) -> None:
    """Raises Refused, ConfigError, CheckpointError or TextError."""
    if (options.output / "config.json").exists() and not (options.output / ABOUT).exists():
        raise Refused(f"--output {options.output}: holds another model; name a new folder")
    model = options.model or str(default_model_path(progress=True))
    work = options.work or WORK / Path(model).resolve().stem
    sequences = _text(options, model, work)
    loaded = load_model(EngineConfig(model=model, dtype=options.dtype), progress=True)
    target = Target.of(loaded)
    taps = features.default_taps(target.config)
    found = features.compute(work / "features", loaded, sequences, taps)
    method = make_method(options, target, loaded.dtype, taps, found)
    corpus = Corpus(sequences, found, method.needs_taps)
    report = fit(options, method, target, corpus, work)
    print_table(report)
    print(f"Wrote {options.output}", file=sys.stderr)


def _text(options: argparse.Namespace, model: str, work: Path) -> list[Sequence_]:
    asked = built_in(options.seed) if options.prompts is None else _lines(options.prompts)
    recipe = text.Recipe(model=Path(model).name, prompts=str(options.prompts or "built-in"),
                         max_tokens=options.max_tokens, seed=options.seed)  # fmt: skip
    return text.write_text(work / "text.jsonl", recipe, asked, options.text_tokens,
                           lambda: writer(model, options.dtype))  # fmt: skip


def _lines(file: Path) -> list[str]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"--prompts {file}: {error}") from error
    return [line for line in lines if line]


@contextmanager
def writer(model: str, dtype: Any) -> Iterator[text.Target]:
    """The engine, asked through the chat template where the model has one."""
    with LLM(model, dtype=dtype) as llm:

        def write(prompts: Sequence[str], sampling: Sequence[SamplingParams]) -> list[tuple[list[int], list[int]]]:
            try:
                if llm.service.tokenizer.chat_template is None:
                    outputs = llm.generate(prompts, sampling, use_tqdm=False)
                else:
                    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
                    outputs = llm.chat(messages, sampling, use_tqdm=False)
            except InvalidRequest as error:  # a prompt and its answer are longer than the context
                raise Refused(f"--prompts or --max-tokens: {error}") from error
            return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]

        yield write


def make_method(options: argparse.Namespace, target: Target, dtype: jnp.dtype, taps: tuple[int, ...],
            found: features.Features) -> Method:
    if options.method == "medusa":
        return Medusa(target, options.num_speculative_tokens, dtype)
    size = min(options.draft_vocab_size, target.config.vocab_size)
    scales = features.tap_scales(found, len(taps))
    return Eagle3(target, options.num_speculative_tokens, dtype, options.intermediate_size, size, taps, scales)


def fit(options: argparse.Namespace, method: Method, target: Target, corpus: Corpus, work: Path) -> dict[str, Any]:
    """Trains, measures and writes the folder. Returns its `training.json`."""
    if len(corpus.train()) < options.batch_size:
        raise Refused(f"--text-tokens {options.text_tokens}: {len(corpus.train())} answers to train on, without those "
                      f"held out, fill no batch of {options.batch_size}; give more tokens, or a lower --batch-size")
    drafted = most_frequent([corpus.sequences[i] for i in corpus.train()], options.draft_vocab_size,
                            target.config.vocab_size)
    frozen = Frozen(target.embedding, target.output, jnp.asarray(drafted))
    whole = frozen if method.needs_taps else Frozen(target.embedding, target.output,
                                                    jnp.arange(target.config.vocab_size))
    plan = Plan(epochs=options.epochs, batch_size=options.batch_size, learning_rate=options.learning_rate,
                seed=options.seed)  # fmt: skip
    temperatures = sorted({sequence.temperature for sequence in corpus.sequences})

    def measure(params: Params) -> dict[str, Acceptance]:
        return {f"{temperature}": acceptance(params, whole, corpus.batches(chosen, options.batch_size), method)
                for temperature in temperatures if len(chosen := corpus.held_out(temperature))}

    def after_epoch(epoch: int, params: Params) -> None:
        lengths = ", ".join(f"{one.length:.3f} at {where}" for where, one in measure(params).items())
        print(f"\nEpoch {epoch}: tokens a step on held-out text, by temperature: {lengths}", file=sys.stderr)

    state = train(work / f"{options.method}.npz", plan, method, target, frozen, corpus, after_epoch)
    tensors = method.tensors(state.params, drafted)
    dtypes = {name: stored_dtype(tensor, options.float8) for name, tensor in tensors.items()}
    stored = {name: jnp.asarray(np.asarray(value).astype(dtypes[name]), jnp.float32)
              for name, value in state.params.items()}
    report = {
        "method": options.method, "target": options.model or "default", "date": time.strftime("%Y-%m-%d"),
        "text_tokens": sum(sequence.num_written for sequence in corpus.sequences), "plan": asdict(plan),
        "steps": state.step, "training_seconds": round(state.seconds),
        "parameters": sum(value.size for value in state.params.values()),
        "held_out": {where: asdict(one) for where, one in measure(stored).items()},
    }  # fmt: skip
    tensors = {name: tensor.astype(dtypes[name]) for name, tensor in tensors.items()}
    write_folder(options.output, method.config(), tensors, report)
    return report


def most_frequent(sequences: Sequence[Sequence_], count: int, vocab_size: int) -> np.ndarray:
    """The ids most often written, ascending; where the text has fewer, with the lowest other ids."""
    counts = Counter(token for sequence in sequences for token in sequence.tokens[sequence.prompt_len :])
    order = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return np.sort(np.array(order[:count], np.int32))


def print_table(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['method']}: acceptance on held-out text, each draft's if all before it were accepted")
    depth = max(len(one["accepted"]) for one in report["held_out"].values())
    for column in ("temperature", "positions", *(f"draft {i + 1}" for i in range(depth)), "tokens a step"):
        table.add_column(column, justify="right")
    for temperature, one in report["held_out"].items():
        table.add_row(temperature, str(one["positions"]), *(f"{share:.1%}" for share in one["accepted"]),
                      f"{one['length']:.2f}")  # fmt: skip
    Console().print(table)
