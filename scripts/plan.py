"""Plans a service for hardware that is not there: what fits, which mesh is best, what a step costs.

    python -m scripts.plan --model scripts/planning/configs/llama-3-8b.json --topology v6e:2x4
    python -m scripts.plan --model path/to/model --topology v7x:2x2x1 --mesh tensor=4,data=2 --json plan.json
    .venv-gpu/bin/python -m scripts.plan --model path/to/config.json --topology h200:1x1x8 --plot plan.png

Without --mesh it ranks all meshes by formula and compiles the engine's own steps for the best few; their numbers are
the compiler's. docs/planning.md explains what is counted and what is assumed.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# What the engine takes on an accelerator when nobody says otherwise (serving/build.py).
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 2048


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m scripts.plan", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--model", required=True, metavar="PATH", help="a Hugging Face config.json, or its folder")
    made.add_argument("--topology", required=True, metavar="KIND:SIZE", help="v6e:2x4, v7x:2x2x1, h200:1x1x8, cpu:8")
    made.add_argument("--mesh", metavar="TxD", help="as the service takes it; without it all meshes are compared")
    made.add_argument("--enable-expert-parallel", action="store_true", help="with --mesh: experts over all its devices")
    made.add_argument("--context", type=int, metavar="TOKENS", help="of each sequence while it decodes "
                      "(default: half of --max-model-len, at most 4096)")  # fmt: skip
    made.add_argument("--prompt", type=int, metavar="TOKENS", help="of a prompt whose first token is waited for "
                      "(default: 1024, or less)")  # fmt: skip
    made.add_argument("--batches", default="1,4,16,64,256,1024", metavar="N,N,...",
                      help="sequences in flight on the whole mesh (default: %(default)s)")  # fmt: skip
    made.add_argument("--rank", choices=("throughput", "latency"), default="throughput",
                      help="tokens/s at the best batch, or the step of a single sequence")  # fmt: skip
    made.add_argument("--compile", type=int, default=3, metavar="N",
                      help="compile the N best meshes; 0: formula only (default: 3)")  # fmt: skip
    made.add_argument("--max-model-len", type=int, metavar="TOKENS",
                      help="context length (default: the model's, at most 8192)")  # fmt: skip
    made.add_argument("--max-num-seqs", type=int, default=MAX_NUM_SEQS, metavar="N",
                      help="sequences in a step of each data group (default: %(default)s)")  # fmt: skip
    made.add_argument("--max-num-batched-tokens", type=int, default=MAX_NUM_BATCHED_TOKENS, metavar="N",
                      help="tokens in a step of each data group (default: %(default)s)")  # fmt: skip
    made.add_argument("--block-size", type=int, metavar="TOKENS", help="tokens in a KV page (default: the service's)")
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    made.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="of memory that may be used")
    made.add_argument("--json", metavar="FILE", help="write every number")
    made.add_argument("--plot", metavar="FILE.png", help="draw memory and tokens/s of each mesh")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    _prepare(args.topology)
    from model.families.common import UnsupportedModel
    from scripts.planning.topology import PlanError
    from sharding.mesh import MeshError

    try:
        run(args)
    except (PlanError, MeshError, UnsupportedModel, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0


def _prepare(topology: str) -> None:
    """Before jax starts: as many simulated devices as the topology asks for."""
    from scripts.aot.targets import prepare_environment

    prepare_environment()
    kind, _, size = topology.partition(":")
    if kind == "cpu" and size.isdigit():
        flag = f"--xla_force_host_platform_device_count={size}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def run(args: argparse.Namespace) -> None:
    from rich.console import Console

    from scripts.planning.compiling import compile_plan, compiler_devices, progress_bar
    from scripts.planning.placement import MeshLayout, devices_of, place
    from scripts.planning.plan import plan_mesh
    from scripts.planning.report import as_json, print_mesh, print_ranking
    from scripts.planning.search import check, layouts, ranked, suggestions
    from scripts.planning.topology import PlanError, parse_topology
    from sharding.mesh import parse_mesh

    started = time.perf_counter()
    topology = parse_topology(args.topology)
    name, config, sizes, question = read_arguments(args, topology)
    found = layouts(config, topology)
    if args.enable_expert_parallel and args.mesh is None:
        raise PlanError("--enable-expert-parallel is for one --mesh; without --mesh all are compared, with it and not")
    if args.mesh is not None:
        spec = parse_mesh(args.mesh)
        check(spec, topology)
        found = [MeshLayout(spec, args.enable_expert_parallel)]
    devices = devices_of(topology)
    plans = ranked([plan_mesh(place(config, topology, one, sizes, devices), question) for one in found], args.rank)
    console = Console(width=max(Console().width, 150))  # tables wrap rather than shrink to nothing
    chosen = [plan for plan in plans if plan.memory.fits][: args.compile]
    if chosen:
        real = compiler_devices(topology)
        print(f"Compiling {2 * len(chosen)} steps (minutes; --compile 0 plans by formula, in seconds)", file=sys.stderr)
        with progress_bar(2 * len(chosen), sys.stderr.isatty()) as bar:
            made = {plan.name: compile_plan(plan.placement, real, lambda plan=plan: bar(plan.name)) for plan in chosen}
        plans = ranked([plan_mesh(p.placement, question, made.get(p.name)) for p in plans], args.rank)
    print_ranking(console, plans, question, args.rank)
    print_mesh(console, plans[0], question)
    if not any(plan.memory.fits for plan in plans):
        for line in suggestions(topology, plans):
            console.print(line)
    console.print(f"Planning took {time.perf_counter() - started:.1f} s.")
    if args.json:
        Path(args.json).write_text(json.dumps(as_json(topology, name, plans, question), indent=1) + "\n")
    if args.plot:
        from scripts.planning.picture import draw

        draw(args.plot, topology, name, plans, question)


def read_arguments(args: argparse.Namespace, topology):
    """(name of the model, its config, the engine's sizes, what to evaluate). PlanError names what is wrong."""
    import jax.numpy as jnp

    from scripts.planning.placement import Sizes
    from scripts.planning.plan import Question
    from scripts.planning.topology import PlanError
    from serving.runner.memory import PAGE_SIZE, memory_share

    for flag, target in (("--json", args.json), ("--plot", args.plot)):  # before minutes of compiling
        if target and (Path(target).is_dir() or not Path(target).parent.is_dir()):
            raise PlanError(f"{flag} {target}: no file can be written there; its folder must exist")
    if args.plot and not args.plot.endswith(".png"):
        raise PlanError(f"--plot {args.plot} must end with .png")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise PlanError("--plot needs matplotlib: pip install -e '.[bench]'")
    name, config = read_model(args.model, args.max_model_len)

    def given(value: int | None, otherwise: int) -> int:
        return otherwise if value is None else value

    max_model_len = given(args.max_model_len, min(config.max_position, 8192))
    context = given(args.context, min(4096, max_model_len // 2))
    prompt = given(args.prompt, min(1024, context))
    for flag, value, most in (("--max-model-len", max_model_len, config.max_position),
                              ("--context", context, max_model_len), ("--prompt", prompt, max_model_len)):  # fmt: skip
        if not 1 <= value <= most:
            raise PlanError(f"{flag} {value} must be in 1 to {most}")
    for flag, value, least in (("--compile", args.compile, 0), ("--block-size", args.block_size, 1)):
        if value is not None and value < least:
            raise PlanError(f"{flag} {value} must be at least {least}")
    if not 1 <= args.max_num_seqs <= args.max_num_batched_tokens:
        raise PlanError(f"--max-num-seqs {args.max_num_seqs} must be in 1 to --max-num-batched-tokens "
                        f"{args.max_num_batched_tokens}")  # fmt: skip
    try:
        batches = tuple(sorted({int(part) for part in args.batches.split(",")}))
    except ValueError:
        batches = ()
    if not batches or batches[0] < 1:
        raise PlanError(f"--batches {args.batches!r} must be numbers from 1, separated by commas: 1,16,256")
    share = args.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise PlanError(f"--gpu-memory-utilization {share} must be in (0, 1]")
    sizes = Sizes(
        max_model_len=max_model_len, max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        page_size=given(args.block_size, PAGE_SIZE[topology.platform]), dtype=jnp.dtype(args.dtype),
        memory_share=memory_share(topology.platform, share),
    )  # fmt: skip
    contexts = sorted({c for c in (1024, 4096, 16384, 65536, context, max_model_len) if c <= max_model_len})
    question = Question(context=context, prompt=prompt, batches=batches, contexts=tuple(contexts))
    return name, config, sizes, question


def read_model(model: str, max_model_len: int | None):
    """(name, config). PlanError where there is none."""
    from model.families.registry import read_config
    from scripts.planning.topology import PlanError

    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    try:
        hf = json.loads(file.read_text())
    except FileNotFoundError:
        raise PlanError(f"--model {model}: no {file}; give a Hugging Face config.json or its folder") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(f"--model {model}: {file.name} is not JSON ({error})") from error
    if not isinstance(hf, dict):
        raise PlanError(f"--model {model}: {file.name} is no JSON object; give a Hugging Face config.json")
    return path.name if path.is_dir() else path.stem, read_config(hf, max_model_len)


if __name__ == "__main__":
    sys.exit(main())
