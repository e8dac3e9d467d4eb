"""The `LLM` class on the peers' workload, in one process: what the engine does without HTTP."""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

from scripts.bench_lib import report
from scripts.bench_lib.serve import random_prompt


def main(args: argparse.Namespace) -> None:
    from serving.llm import LLM, Prompt
    from serving.request import SamplingParams

    start = time.perf_counter()
    llm = LLM(model=args.model, dtype=args.dtype, max_model_len=2048, max_num_seqs=max(args.concurrency),
              enable_prefix_caching=False)
    ready_seconds = time.perf_counter() - start
    print(f"ready after {ready_seconds:.1f} s", flush=True)
    generator = random.Random(args.seed)

    def rate(streams: int, input_tokens: int, output_tokens: int, counted: int) -> float:
        """Counted tokens a request, over the seconds of one batch."""
        prompts: list[Prompt] = [{"prompt_token_ids": random_prompt(generator, input_tokens)} for _ in range(streams)]
        sampling = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return streams * counted / (time.perf_counter() - begin)

    levels = []
    for streams in args.concurrency:
        rate(streams, args.input_len, args.output_len, args.output_len)  # warm-up, dropped
        rates = [rate(streams, args.input_len, args.output_len, args.output_len) for _ in range(args.rounds)]
        median = statistics.median(rates)
        print(f"pageloom {args.dtype} streams={streams} output tok/s median {median:.1f} "
              f"{[round(value, 1) for value in rates]}", flush=True)
        levels.append({"concurrency": streams, "output_tokens_per_second": round(median, 1),
                       "output_tokens_per_second_by_round": [round(value, 1) for value in rates]})
    prefill = None
    if args.prefill_prompts:
        rate(args.prefill_prompts, args.prefill_len, 1, args.prefill_len)
        prefill = rate(args.prefill_prompts, args.prefill_len, 1, args.prefill_len)
        print(f"pageloom {args.dtype} prefill tok/s {prefill:.0f}", flush=True)
    path = report.save_json(Path(args.out), report.header(
        "offline", ["python", "-m", "scripts.bench", *sys.argv[1:]], dtype=args.dtype, ready_seconds=ready_seconds,
        levels=levels, prefill=prefill and round(prefill, 1)))
    print(f"Saved {path}")
