"""Results as a table on the terminal, a JSON file and a picture."""

import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.bench_lib.stats import PERCENTILES, Level


def check_picture() -> None:
    """Before minutes of measuring: ends the program where there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("error: the picture needs matplotlib: pip install -e '.[bench]'")


def machine() -> dict:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory, 1), "system": platform.system(),
            "python": platform.python_version(), "jax": version("jax")}


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False,
                          cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


def header(kind: str, command: list[str], **fields: object) -> dict:
    return {"kind": kind, "date": time.strftime("%Y-%m-%d %H:%M:%S"), "commit": commit(), "machine": machine(),
            "command": " ".join(command), **fields}


def print_levels(console: Console, levels: list[Level]) -> None:
    table = Table(title="Latencies in ms: " + " / ".join(f"P{p}" for p in PERCENTILES))
    for column in ("streams", "req/s", "input tok/s", "output tok/s", "TTFT", "TPOT", "ITL", "engine host share"):
        table.add_column(column, justify="right")
    for level in levels:
        latencies = [" / ".join(f"{value:.1f}" for value in column.values())
                     for column in (level.ttft_ms, level.tpot_ms, level.itl_ms)]
        share = level.engine.get("host_share")
        table.add_row(str(level.concurrency), f"{level.requests_per_second:.2f}",
                      f"{level.input_tokens_per_second:.0f}", f"{level.output_tokens_per_second:.1f}", *latencies,
                      "" if share is None else f"{share:.1%}")
    console.print(table)


def save_json(folder: Path, result: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['kind']}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def save_picture(path: Path, levels: list[Level], title: str) -> None:
    """Throughput and latency over the number of streams; needs matplotlib (the bench extra)."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    streams = [level.concurrency for level in levels]
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    rates = [level.output_tokens_per_second for level in levels]
    axes[0].plot(streams, rates, marker="o")
    for count, rate in zip(streams, rates, strict=True):
        axes[0].annotate(f"{rate:.0f}", (count, rate), textcoords="offset points", xytext=(0, 7), ha="center")
    axes[0].set(title="Throughput", ylabel="output tokens / s", ylim=(0, 1.12 * max(rates)))
    for axis, name in ((axes[1], "ttft_ms"), (axes[2], "tpot_ms")):
        for percent, style in zip(PERCENTILES, ("o-", "^--", "x:"), strict=True):  # they may lie on each other
            values = [getattr(level, name).get(f"p{percent}", float("nan")) for level in levels]
            axis.plot(streams, values, style, label=f"P{percent}")
        axis.set(title=name.split("_")[0].upper(), ylabel="ms", ylim=(0, None))
        axis.legend()
    for axis in axes:
        axis.set(xlabel="streams at once")
        axis.set_xscale("log", base=2)
        axis.set_xticks(streams, [str(count) for count in streams])
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)
