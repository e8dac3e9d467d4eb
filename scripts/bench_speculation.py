"""What speculation is worth: tokens a second with several ways to draft and with none, side by side.

    python -m scripts.bench_speculation                                      # off, ngram, suffix
    python -m scripts.bench_speculation --config '{"method": "eagle3", "model": "heads", "num_speculative_tokens": 4}'

For each number of streams the engines are in this process and take turns, each round with new prompts that all of them
get, greedily: several for each stream, the next one as soon as one ends. A rate is of a whole round, prompts included;
the median over rounds is told, and its ratio to none. Accepted: tokens that a draft brought a sequence's step on
average, where there was one. Tables are printed, a JSON file and a picture saved.
"""

import argparse
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from operator import ne
from pathlib import Path
from random import Random

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from scripts.bench_lib import report
from scripts.bench_lib.speculation_prompts import WORKLOADS
from serving.decoding.speculation.config import SpeculativeConfig
from serving.errors import ConfigError
from serving.llm import LLM
from serving.request import SamplingParams

OFF = "off"
PROMPTS = 4  # of a round, for each stream
DEFAULTS = (
    '{"method": "ngram", "num_speculative_tokens": 8}',
    '{"method": "suffix", "num_speculative_tokens": 8}',
)


class Bench:
    """What was measured of engines with these names."""

    def __init__(self, names: list[str], max_tokens: int, temperature: float):
        self._names = names
        self._sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
        self.rates: dict[tuple[str, int, str], list[float]] = defaultdict(list)  # workload, streams, engine
        self.drafts: dict[tuple[str, int, str], list[tuple[int, int, int]]] = defaultdict(list)
        self.outputs = self.outputs_differ = 0  # with speculation; those that are not the first engine's

    def round(self, engines: dict[str, LLM], workload: str, streams: int, seed: int, *, count: bool = True) -> None:
        prompts = WORKLOADS[workload](Random(f"{seed} {streams}"), PROMPTS * streams)
        names = self._names
        turn = seed % len(names)
        outputs = {}
        for name in names[turn:] + names[:turn]:  # whoever comes first has no advantage
            llm = engines[name]
            before, began = llm.service.engine.stats, time.perf_counter()
            results = llm.chat(prompts, self._sampling, use_tqdm=False)
            outputs[name] = [result.outputs[0].token_ids for result in results]
            seconds, after = time.perf_counter() - began, llm.service.engine.stats
            tokens = sum(map(len, outputs[name]))
            if count:
                self.rates[workload, streams, name].append(tokens / seconds)
                self.drafts[workload, streams, name].append(
                    (after.num_drafts - before.num_drafts, after.accepted_tokens - before.accepted_tokens, tokens)
                )
        self.outputs += len(prompts) * (len(names) - 1)
        for name in names[1:]:
            self.outputs_differ += sum(map(ne, outputs[name], outputs[names[0]]))

    def rows(self, workload: str, streams: int) -> list[dict]:
        base = statistics.median(self.rates[workload, streams, self._names[0]])
        rows = []
        for name in self._names:
            rates = self.rates[workload, streams, name]
            drafts, accepted, tokens = map(sum, zip(*self.drafts[workload, streams, name], strict=True))
            rows.append({
                "workload": workload, "streams": streams, "engine": name,
                "tokens_per_second": round(statistics.median(rates), 1), "by_round": [round(rate, 1) for rate in rates],
                "ratio": round(statistics.median(rates) / base, 3),
                "accepted_per_draft": round(accepted / drafts, 2) if drafts else None,
                "accepted_share": round(accepted / tokens, 3) if tokens else None,
            })  # fmt: skip
        return rows


def label(config: str) -> str:
    return SpeculativeConfig.parse(config).method


def show(console: Console, rows: list[dict], engines: list[str]) -> None:
    for workload in dict.fromkeys(row["workload"] for row in rows):
        table = Table(title=f"{workload}: output tokens/s (ratio to off; accepted of a draft, their share of all)")
        table.add_column("streams", justify="right")
        for name in engines:
            table.add_column(name, justify="right")
        for streams in dict.fromkeys(row["streams"] for row in rows):
            cells = []
            for row in rows:
                if (row["workload"], row["streams"]) == (workload, streams):
                    accepted = row["accepted_per_draft"]
                    drafts = "" if accepted is None else f"; {accepted:.2f}, {row['accepted_share']:.0%}"
                    ratio = "" if row["engine"] == engines[0] else f" ({row['ratio']:.2f}x{drafts})"
                    cells.append(f"{row['tokens_per_second']:.1f}{ratio}")
            table.add_row(str(streams), *cells)
        console.print(table)


def draw(path: Path, rows: list[dict], engines: list[str]) -> None:
    """Ratios over the number of streams; needs matplotlib (the bench extra)."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    size = 5.5 * len(workloads), 4
    figure, axes = plt.subplots(1, len(workloads), figsize=size, layout="constrained", squeeze=False)
    for axis, workload in zip(axes[0], workloads, strict=True):
        for name in engines:
            points = [row for row in rows if (row["workload"], row["engine"]) == (workload, name)]
            axis.plot([row["streams"] for row in points], [row["ratio"] for row in points], marker="o", label=name)
        streams = sorted({row["streams"] for row in rows})
        axis.set_xscale("log", base=2)
        axis.set_xticks(streams, [str(count) for count in streams])
        axis.set(title=workload, xlabel="streams at once", ylabel=f"tokens/s, {engines[0]} = 1", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="as for python -m serve")
    parser.add_argument("--config", action="append", metavar="JSON",
                        help="a --speculative-config to compare; may be repeated (default: ngram and suffix)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    args = parser.parse_args()
    if min(args.rounds, args.max_tokens, *args.streams) < 1 or max(args.streams) > 80:
        parser.error("--rounds, --max-tokens and --streams must be at least 1, --streams at most 80")
    try:
        args.config = {label(config): config for config in args.config or DEFAULTS}
    except ConfigError as error:
        parser.error(str(error))
    return args


def start(args: argparse.Namespace, streams: int, config: SpeculativeConfig | None) -> LLM:
    return LLM(model=args.model, dtype=args.dtype, max_num_seqs=streams, max_model_len=512, block_size=16,
               num_pages=1 + 32 * streams, speculative_config=config, progress=False)  # fmt: skip


def measure(args: argparse.Namespace, bench: Bench, configs: dict[str, SpeculativeConfig | None], streams: int,
            advance: Callable[[], None]) -> None:  # fmt: skip
    with ExitStack() as stack:
        engines = {name: stack.enter_context(start(args, streams, config)) for name, config in configs.items()}
        for seed in range(args.rounds + 1):  # the first time is a warm-up
            for workload in args.workloads:
                bench.round(engines, workload, streams, seed, count=seed > 0)
                advance()


def main() -> None:
    args, console = parse(), Console()
    report.check_picture()
    configs = {OFF: None, **{name: SpeculativeConfig.parse(config) for name, config in args.config.items()}}
    bench = Bench(list(configs), args.max_tokens, args.temperature)
    plan = [(workload, streams) for workload in args.workloads for streams in args.streams]
    try:
        with Progress(console=console) as progress:
            task = progress.add_task("Rounds, each with all engines", total=len(plan) * (args.rounds + 1))
            for streams in args.streams:
                measure(args, bench, configs, streams, advance=lambda: progress.advance(task))
                gc.collect()  # an engine has thousands of mappings, of which a process may have 65,530
    except ConfigError as error:
        sys.exit(f"error: {error}")
    rows = [row for workload, streams in plan for row in bench.rows(workload, streams)]
    show(console, rows, list(configs))
    if not args.temperature:
        console.print(f"Outputs that differ from those without speculation: {bench.outputs_differ} of {bench.outputs}")
    path = report.save_json(args.out, report.header(
        "speculation", ["python", "-m", "scripts.bench_speculation", *sys.argv[1:]], configs=args.config, rows=rows,
        rounds=args.rounds, max_tokens=args.max_tokens, outputs=bench.outputs,
        outputs_differ=bench.outputs_differ))  # fmt: skip
    picture = path.with_suffix(".png")
    draw(picture, rows, list(configs))
    console.print(f"Saved {path} and {picture}")


if __name__ == "__main__":
    main()
