"""What a grammar costs and what fast-forward gains: people are extracted from texts, as JSON with a schema.

    python -m scripts.bench_structured

Two engines in this process take turns, one that appends what the grammar forces and one that samples it (every token
then has one choice, and a step of its own); the second also writes as many tokens without a grammar. All are greedy.
A rate is of whole batches, prompts included; the median over rounds is told. Then the host's part: what compiling the
schema takes, and a mask.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from random import Random

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from scripts.bench_lib import report
from serving.decoding.grammar.build import grammar_of
from serving.decoding.grammar.compiler import Compiler
from serving.decoding.grammar.tokens import vocabulary
from serving.llm import LLM
from serving.request import SamplingParams, StructuredOutputs

NAMES = ("Ada Lovelace", "Alan Turing", "Grace Hopper", "Edsger Dijkstra", "Barbara Liskov", "Donald Knuth")
CITIES = ("London", "Zurich", "New York", "Austin", "Boston", "Palo Alto")
JOBS = ("engineer", "teacher", "nurse", "painter")
SCHEMA = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 40},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"enum": [*JOBS, "other"]},
        "is_employed": {"type": "boolean"},
        "contact": {
            "type": "object",
            "properties": {
                "email_address": {"type": "string", "pattern": "^[a-z.]{1,30}@[a-z]{1,20}\\.com$"},
                "city_of_residence": {"type": "string", "maxLength": 20},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["email_address", "city_of_residence", "postal_code"],
            "additionalProperties": False,
        },
        "languages": {"type": "array", "items": {"enum": ["English", "German"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["full_name", "age_in_years", "occupation", "is_employed", "contact", "languages"],
    "additionalProperties": False,
}
OUTPUTS = StructuredOutputs(json=SCHEMA)
MAX_TOKENS = 160


def prompt(rng: Random) -> str:
    name, city, job = rng.choice(NAMES), rng.choice(CITIES), rng.choice(JOBS)
    first = name.split()[0]
    return (f"{name}, aged {rng.randrange(20, 80)}, works as a {job} in {city}, {rng.randrange(10000, 99999)}. {first} "
            f"speaks English and German and answers mail at {first.lower()}@example.com.\n\nThe same as JSON:\n")


class Bench:
    """Rates and steps by number of streams and way."""

    def __init__(self, engines: dict[str, LLM]):
        self._engines = engines
        self.found: dict[tuple[int, str], list[dict[str, float]]] = defaultdict(list)
        self.outputs_differ = self.invalid = 0

    def round(self, streams: int, batches: int, seed: int) -> None:
        rng = Random(f"{seed} {streams}")
        prompts = [[prompt(rng) for _ in range(streams)] for _ in range(batches)]
        texts: dict[str, list[str]] = {}
        lengths: list[int] = []
        names = list(self._engines)
        for name in names[seed % 2 :] + names[: seed % 2]:  # whoever comes first has no advantage
            outputs = self._run(name, prompts, streams, SamplingParams(
                temperature=0, max_tokens=MAX_TOKENS, structured_outputs=OUTPUTS), name)  # fmt: skip
            texts[name] = [output.text for output in outputs]
            lengths = [len(output.token_ids) for output in outputs]
            self.invalid += sum(not _is_json(output.text) for output in outputs)
        self.outputs_differ += sum(one != other for one, other in zip(*texts.values(), strict=True))
        free = SamplingParams(temperature=0, max_tokens=round(statistics.mean(lengths)), ignore_eos=True)
        self._run(names[1], prompts, streams, free, "no grammar")

    def _run(self, name: str, prompts: list[list[str]], streams: int, sampling: SamplingParams, way: str) -> list:
        llm = self._engines[name]
        before, began = llm.service.engine.stats, time.perf_counter()
        outputs = [one.outputs[0] for batch in prompts for one in llm.generate(batch, sampling, use_tqdm=False)]
        seconds, after = time.perf_counter() - began, llm.service.engine.stats
        tokens = sum(len(output.token_ids) for output in outputs)
        self.found[streams, way].append({
            "tokens_per_second": tokens / seconds,
            "requests_per_second": len(outputs) / seconds,
            "steps_per_batch": (after.steps - before.steps) / len(prompts),
            "forced_share": (after.forced_tokens - before.forced_tokens) / tokens,
            "tokens_per_request": tokens / len(outputs),
        })  # fmt: skip
        return outputs

    def rows(self) -> list[dict]:
        return [{"streams": streams, "way": way, **{
            key: round(statistics.median(one[key] for one in rounds[1:]), 3) for key in rounds[0]}}
            for (streams, way), rounds in self.found.items()]  # fmt: skip


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def host_times(llm: LLM) -> dict[str, float]:
    """Microseconds: of a first compile with a ready vocabulary, of a known grammar, of a mask."""
    tokenizer, size = llm.service.tokenizer, llm.service.engine.info.vocab_size
    began = time.perf_counter()
    known = vocabulary(tokenizer, size)
    times = {"vocabulary": time.perf_counter() - began}
    grammar = grammar_of(OUTPUTS, tokenizer.special_token_ids)
    firsts, masks, row = [], [], np.zeros((1, -(-size // 32)), np.int32)
    none = np.zeros(0, np.int32)
    for _ in range(9):
        compiler = Compiler(lambda: known)
        began = time.perf_counter()
        compiler.compile(grammar).result()
        firsts.append(time.perf_counter() - began)
        began = time.perf_counter()
        matcher = compiler.compile(grammar).result()
        times["known grammar"] = time.perf_counter() - began
        text = '{"full_name": "Ada Lovelace", "age_in_years": 36, "occupation": "other", "is_employed": true'
        for token in tokenizer.encode(text, add_special_tokens=False):
            began = time.perf_counter()
            matcher.masks(none, none, row)
            masks.append(time.perf_counter() - began)
            matcher.accept([token])
        compiler.close()
    times |= {"compile": statistics.median(firsts), "mask": statistics.median(masks), "slowest mask": max(masks)}
    return {name: round(seconds * 1e6, 1) for name, seconds in times.items()}


def show(console: Console, rows: list[dict]) -> None:
    table = Table(title="Extraction with a schema")
    names = ("tokens_per_second", "requests_per_second", "steps_per_batch", "forced_share", "tokens_per_request")
    for column in ("streams", "way", *(name.replace("_", " ") for name in names)):
        table.add_column(column, justify="left" if column == "way" else "right")
    for row in rows:
        table.add_row(str(row["streams"]), row["way"], *(f"{row[name]:.2f}" for name in names))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="as for python -m serve")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    args, console = parser.parse_args(), Console()
    if min(args.rounds, *args.streams) < 1:
        parser.error("--rounds and --streams must be at least 1")
    options = {"model": args.model, "dtype": args.dtype, "max_num_seqs": max(args.streams), "max_model_len": 512,
               "num_pages": 1 + 32 * max(args.streams), "block_size": 16, "enable_prefix_caching": False}  # fmt: skip
    engines: dict[str, LLM] = {}
    try:
        for name, forces in (("fast-forward", True), ("all sampled", False)):
            console.print(f"[bold]Starting {name}[/]")
            engines[name] = LLM(**options, structured_outputs_config={"enable_fast_forward": forces})
        bench = Bench(engines)
        with Progress(console=console) as progress:
            task = progress.add_task("Rounds", total=len(args.streams) * (args.rounds + 1))
            for seed in range(args.rounds + 1):  # the first is a warm-up
                for streams in args.streams:
                    bench.round(streams, -(-4 // streams), seed)
                    progress.advance(task)
        times = host_times(engines["fast-forward"])
    finally:
        for llm in engines.values():
            llm.close()
    rows = bench.rows()
    show(console, rows)
    console.print(f"On the host, microseconds: {times}")
    console.print(f"Outputs that differ between the engines: {bench.outputs_differ}; cut off: {bench.invalid}")
    path = report.save_json(args.out, report.header(
        "structured", ["python", "-m", "scripts.bench_structured", *sys.argv[1:]], rows=rows, host_microseconds=times,
        rounds=args.rounds, outputs_differ=bench.outputs_differ))  # fmt: skip
    console.print(f"Saved {path}")


if __name__ == "__main__":
    main()
