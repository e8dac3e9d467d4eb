"""A plan as tables on the terminal and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.planning.counting import Counts, Kernel
from scripts.planning.plan import MeshPlan, Point, Question
from scripts.planning.topology import Topology


def gb(count: float) -> str:
    return f"{count / 1e9:,.2f}" if count >= 1e7 or not count else f"{count / 1e9:,.4f}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def print_ranking(console: Console, plans: Sequence[MeshPlan], question: Question, by: str) -> None:
    table = Table(title=f"Meshes, best {by} first; sequences of {question.context} tokens, GB a device, milliseconds",
                  title_justify="left")  # fmt: skip
    for column in ("", "mesh", "fits", "weights", "step", "KV", "KV tokens", "sequences", "tokens/s", "TPOT", "alone",
                   "TTFT", "bound by", "numbers"):  # fmt: skip
        left = column in ("mesh", "fits", "bound by", "numbers")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for number, plan in enumerate(plans, 1):
        memory, best = plan.memory, plan.best
        row = [str(number), plan.name, "yes" if memory.fits else f"no, {gb(memory.missing)} GB short",
               gb(memory.weights), gb(memory.state + memory.temporaries), gb(memory.kv), f"{plan.capacity:,}",
               f"{plan.sequences.get(question.context, 0):,}"]  # fmt: skip
        if best is not None:
            first = plan.points[0]
            row += [f"{best.tokens_per_second:,.0f}", ms(best.step.total), ms(first.step.total), ms(first.ttft),
                    best.step.bound]  # fmt: skip
        else:
            row += [""] * 5
        table.add_row(*row, "compiler" if plan.compiled else "formula")
    console.print(table)


def print_mesh(console: Console, plan: MeshPlan, question: Question) -> None:
    """Everything about one mesh."""
    memory, placement = plan.memory, plan.placement
    console.rule(f"{placement.topology.name}, {plan.name}", align="left")
    table = Table(title="Bytes of each device", title_justify="left")
    for column in ("weights", "sampling state", "temporaries", "KV pages", "reserve", "device"):
        table.add_column(f"{column} GB", justify="right")
    spare = memory.limit - memory.weights - memory.state - memory.temporaries - memory.kv
    table.add_row(*map(gb, (memory.weights, memory.state, memory.temporaries, memory.kv)),
                  gb(spare) if spare >= 0 else f"-{gb(-spare)}", gb(memory.limit))  # fmt: skip
    console.print(table)
    if not memory.fits:
        console.print(f"It does not fit: {gb(memory.missing)} GB a device are missing at "
                      f"{placement.sizes.memory_share:.0%} of its memory.")  # fmt: skip
        return
    held = ", ".join(f"{count:,} of {context:,}" for context, count in plan.sequences.items())
    console.print(f"KV cache: {plan.capacity:,} tokens in {memory.num_pages:,} pages of {placement.sizes.page_size} in "
                  f"each of {placement.rules.num_groups} data groups. Sequences that fit: {held} tokens.")  # fmt: skip
    for what, why in placement.rules.replicated.items():
        console.print(f"Replicated: {what}: {why}")
    _print_points(console, plan.points, question)
    _print_collectives(console, plan)
    if plan.compiled is not None:
        _print_kernels(console, plan)


def _print_points(console: Console, points: Sequence[Point], question: Question) -> None:
    table = Table(title=f"Decode steps at {question.context} tokens each; first token of a prompt of {question.prompt}",
                  title_justify="left")  # fmt: skip
    for column in ("sequences", "step ms", "compute ms", "memory ms", "network ms", "tokens/s", "TTFT ms", "bound by"):
        table.add_column(column, justify="right")
    for point in points:
        step = point.step
        table.add_row(f"{point.sequences:,}", *map(ms, (step.total, step.compute, step.memory, step.network)),
                      f"{point.tokens_per_second:,.0f}", ms(point.ttft), step.bound)  # fmt: skip
    console.print(table)


def _print_collectives(console: Console, plan: MeshPlan) -> None:
    source = "compiled" if plan.compiled else "by formula"
    table = Table(title=f"Collectives of the largest decode step ({source})", title_justify="left")
    for column in ("kind", "devices", "times", "each", "a step", "ms"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for one, times in sorted(plan.decode.items(), key=lambda item: -item[0].bytes * item[1]):
        seconds = sum(plan.placement.topology.seconds(one)) * times
        table.add_row(one.kind, str(one.devices), str(times), size(one.bytes), size(one.bytes * times), ms(seconds))
    if plan.decode:
        console.print(table)
    else:
        console.print("No collectives.")


def _print_kernels(console: Console, plan: MeshPlan) -> None:
    compiled = plan.compiled
    assert compiled is not None
    for name, tokens, counts in (("decode", compiled.decode_tokens, compiled.decode),
                                 ("prefill", compiled.prefill_tokens, compiled.prefill)):  # fmt: skip
        line = (f"Compiled {name} step, {tokens} tokens a group: {counts.flops / 1e9:,.1f} Gflop of products, "
                f"{size(counts.hbm_bytes)} of memory traffic beside kernels")  # fmt: skip
        kernels = ", ".join(f"{times} x {kernel.name}" for kernel, times in sorted(counts.kernels.items()))
        console.print(line + (f"; kernels: {kernels}" if kernels else ""))
        if counts.unknown_loops:
            console.print(f"  {counts.unknown_loops} loops end where data says, and count once: attention in XLA")
    console.print(f"Compiling took {compiled.seconds:.1f} s.")


def as_json(topology: Topology, model: str, plans: Sequence[MeshPlan], question: Question) -> dict[str, Any]:
    """Bytes, seconds and counts without units; best mesh first."""
    return {
        "topology": topology.name, "model": model, "devices": topology.num_devices, "context": question.context,
        "prompt": question.prompt, "meshes": [_mesh_json(plan) for plan in plans],
    }  # fmt: skip


def _mesh_json(plan: MeshPlan) -> dict[str, Any]:
    memory, spec = plan.memory, plan.placement.spec
    found = {
        "mesh": {"tensor": spec.tensor, "data": spec.data}, "name": plan.name, "fits": memory.fits,
        "bytes": {"limit": memory.limit, "usable": memory.usable, "weights": memory.weights, "state": memory.state,
                  "temporaries": memory.temporaries, "kv": memory.kv, "page": memory.page, "missing": memory.missing},
        "pages": memory.num_pages, "kv_tokens": plan.capacity, "sequences": plan.sequences,
        "replicated": dict(plan.placement.rules.replicated),
        "points": [
            {"sequences": p.sequences, "seconds": p.step.total, "compute": p.step.compute, "memory": p.step.memory,
             "latency": p.step.latency, "transfer": p.step.transfer, "bound": p.step.bound,
             "tokens_per_second": p.tokens_per_second, "ttft": p.ttft}
            for p in plan.points
        ],
        "decode_collectives": _collectives(plan.decode),
        "compiled": None,
    }  # fmt: skip
    if plan.compiled is not None:
        found["compiled"] = {
            "seconds": plan.compiled.seconds,
            "decode": {"tokens": plan.compiled.decode_tokens, **_counts(plan.compiled.decode)},
            "prefill": {"tokens": plan.compiled.prefill_tokens, **_counts(plan.compiled.prefill)},
        }
    return found


def _collectives(collectives) -> list[dict[str, Any]]:
    found = sorted(collectives.items())
    return [{"kind": one.kind, "devices": one.devices, "stride": one.stride, "bytes": one.bytes, "times": times}
            for one, times in found]  # fmt: skip


def _counts(counts: Counts) -> dict[str, Any]:
    def kernel(one: Kernel, times: int) -> dict[str, Any]:
        return {"name": one.name, "times": times, "flops": one.flops, "bytes": one.bytes}

    return {
        "flops": counts.flops, "bytes": counts.hbm_bytes, "collectives": _collectives(counts.collectives),
        "kernels": [kernel(one, times) for one, times in sorted(counts.kernels.items())],
        "unknown_loops": counts.unknown_loops,
    }  # fmt: skip
