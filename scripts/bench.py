"""Measures speed on a common workload: random prompts, greedy, end of sequence ignored, a warm-up round dropped.

    python -m scripts.bench serve                               # starts a server, sweeps the number of streams
    python -m scripts.bench serve --url http://127.0.0.1:8000   # a running one
    python -m scripts.bench serve -- --dtype float32            # flags for the server it starts
    python -m scripts.bench offline --dtype bfloat16            # the LLM class
    python -m scripts.bench loop --dtype bfloat16               # a bare JAX loop: the limit

Results are printed and saved under bench-results/.
"""

import argparse
import sys

from scripts.bench_lib.client import BenchError


def counts(text: str) -> list[int]:
    values = [int(item) for item in text.split(",")]
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive numbers with commas between them")
    return values


def positive(text: str) -> int:
    return counts(text)[0]


def parse(arguments: list[str]) -> argparse.Namespace:
    own, server_args = arguments, []
    if "--" in arguments:
        cut = arguments.index("--")
        own, server_args = arguments[:cut], arguments[cut + 1 :]
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--concurrency", type=counts, default=[1, 2, 4, 8, 16, 32], help="streams at once")
    common.add_argument("--input-len", type=positive, default=32, help="prompt tokens")
    common.add_argument("--output-len", type=positive, default=64, help="output tokens")
    common.add_argument("--rounds", type=positive, default=3, help="measured rounds a level")
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--out", default="bench-results", help="folder for results")
    parser = argparse.ArgumentParser(prog="python -m scripts.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", parents=[common], help="over HTTP, streaming")
    serve.add_argument("--url", help="a running server; without it one is started")
    offline = commands.add_parser("offline", parents=[common], help="the LLM class in this process")
    offline.add_argument("--model", default="", help="as for python -m serve")
    for command in (serve, offline):
        command.add_argument("--prefill-prompts", type=int, default=4, help="prompts of the prefill test; 0: none")
        command.add_argument("--prefill-len", type=positive, default=1024, help="tokens of each of them")
    loop = commands.add_parser("loop", parents=[common], help="a bare JAX decode loop of the default model's shapes")
    for command in (offline, loop):
        command.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    args = parser.parse_args(own)
    args.server_args = server_args
    if server_args and (args.command != "serve" or args.url):
        parser.error("flags after -- are for a server that `serve` starts itself")
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    try:
        if args.command == "serve":
            from scripts.bench_lib import serve as command
        elif args.command == "offline":
            from scripts.bench_lib import offline as command
        else:
            from scripts.bench_lib import loop as command
        command.main(args)
    except BenchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
