"""The service under load: rounds of synthetic prompts, all streams of a round at once."""

import argparse
import asyncio
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scripts.bench_lib import report
from scripts.bench_lib.client import Client, Timing
from scripts.bench_lib.server import engine_split, model_name, running_server, scrape
from scripts.bench_lib.stats import Level, summarize

TOKEN_RANGE = (100, 40000)  # the peers' workload


def random_prompt(generator: random.Random, length: int) -> list[int]:
    return [generator.randrange(*TOKEN_RANGE) for _ in range(length)]


async def run_round(client: Client, generator: random.Random, streams: int, input_tokens: int, output_tokens: int,
                    ) -> tuple[float, list[Timing]]:
    """(seconds, timings) of `streams` requests sent at once. Prompts are new each time: no prefix hits."""
    prompts = [random_prompt(generator, input_tokens) for _ in range(streams)]
    start = time.perf_counter()
    timings = await asyncio.gather(*(client.complete(prompt, output_tokens) for prompt in prompts))
    return time.perf_counter() - start, timings


async def run_level(client: Client, url: str, generator: random.Random, streams: int, args: argparse.Namespace,
                    progress: Progress) -> Level:
    task = progress.add_task(f"{streams} streams", total=args.rounds + 1)
    await run_round(client, generator, streams, args.input_len, args.output_len)  # warm-up, dropped
    progress.advance(task)
    before, cpu, start = scrape(url), time.process_time(), time.perf_counter()
    rounds = []
    for _ in range(args.rounds):
        rounds.append(await run_round(client, generator, streams, args.input_len, args.output_len))
        progress.advance(task)
    share = (time.process_time() - cpu) / (time.perf_counter() - start)
    return summarize(streams, rounds, share, engine_split(before, scrape(url)))


async def run_prefill(client: Client, generator: random.Random, args: argparse.Namespace, progress: Progress) -> dict:
    task = progress.add_task("prefill", total=args.rounds + 1)
    rates = []
    for index in range(args.rounds + 1):
        seconds, timings = await run_round(client, generator, args.prefill_prompts, args.prefill_len, 1)
        progress.advance(task)
        if index:  # the first one warms up
            rates.append(sum(timing.input_tokens for timing in timings) / seconds)
    return {"prompts": args.prefill_prompts, "input_len": args.prefill_len,
            "input_tokens_per_second": round(sorted(rates)[len(rates) // 2], 1),
            "by_round": [round(rate, 1) for rate in rates]}


def main(args: argparse.Namespace) -> None:
    report.check_picture()
    console = Console(width=None if sys.stdout.isatty() else 140)  # a log file has room for the table
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        ready_seconds = None
        url = args.url
        if url is None:
            console.print(" ".join(("Starting python -m serve", *args.server_args)))
            url, ready_seconds = stack.enter_context(running_server(args.server_args, folder / "server.log"))
            console.print(f"Ready after {ready_seconds:.1f} s")
        url = url.rstrip("/")
        model = model_name(url)
        client = Client(url, model)
        generator = random.Random(args.seed)
        progress = stack.enter_context(Progress(
            TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds"),
            TimeElapsedColumn(), console=console))

        async def measure() -> tuple[list[Level], dict | None]:
            levels = [await run_level(client, url, generator, streams, args, progress)
                      for streams in args.concurrency]
            prefill = await run_prefill(client, generator, args, progress) if args.prefill_prompts else None
            return levels, prefill

        levels, prefill = asyncio.run(measure())

    report.print_levels(console, levels)
    if prefill:
        console.print(f"Prefill of {args.prefill_prompts} x {args.prefill_len} tokens: "
                      f"{prefill['input_tokens_per_second']:.0f} input tok/s")
    result = report.header(
        "serve", ["python", "-m", "scripts.bench", *sys.argv[1:]], model=model, input_len=args.input_len,
        output_len=args.output_len, rounds=args.rounds, ready_seconds=ready_seconds,
        levels=[level.to_json() for level in levels], prefill=prefill)
    path = report.save_json(folder, result)
    picture = path.with_suffix(".png")
    report.save_picture(picture, levels, f"{model}: {args.input_len} tokens in, {args.output_len} out "
                                         f"({result['machine']['cores']} cores, commit {result['commit']})")
    console.print(f"Saved {path} and {picture}")
