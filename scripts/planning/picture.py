"""A plan as a picture: what fills each device, and what throughput costs in latency."""

from collections.abc import Sequence
from pathlib import Path

from scripts.planning.plan import MeshPlan, Question
from scripts.planning.topology import Topology

COLOURS = {"weights": "#4269d0", "sampling state": "#efb118", "temporaries": "#ff725c", "KV pages": "#6cc5b0"}
SHOWN = 8  # meshes


def draw(path: str, topology: Topology, model: str, plans: Sequence[MeshPlan], question: Question) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), constrained_layout=True)
    figure.suptitle(f"{model} on {topology.name}")
    draw_memory(left, plans[:SHOWN])
    draw_frontier(right, [plan for plan in plans[:SHOWN] if plan.points], question)
    figure.savefig(Path(path), dpi=120)
    pyplot.close(figure)


def draw_memory(axes, plans: Sequence[MeshPlan]) -> None:
    """One bar a mesh, best on top: bytes of a device by kind."""
    names = [plan.name for plan in plans]
    left = [0.0] * len(plans)
    for kind, colour in COLOURS.items():
        sizes = [_bytes(plan)[kind] / 1e9 for plan in plans]
        axes.barh(names, sizes, left=left, color=colour, label=kind)
        left = [at + one for at, one in zip(left, sizes, strict=True)]
    memory = plans[0].memory
    axes.axvline(memory.limit / 1e9, color="black", label="device")
    axes.axvline(memory.usable / 1e9, color="black", linestyle="dotted", label="may be used")
    axes.invert_yaxis()
    axes.set_xlabel("GB a device")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize="small")  # bars fill the axes


def draw_frontier(axes, plans: Sequence[MeshPlan], question: Question) -> None:
    """One curve a mesh over numbers of sequences: seconds of a step and tokens/s of the whole mesh."""
    for plan in plans:
        places = [(1e3 * point.step.total, point.tokens_per_second) for point in plan.points]
        (line,) = axes.plot(*zip(*places, strict=True), marker="o", label=plan.name)
        for point, place in zip(plan.points, places, strict=True):
            axes.annotate(f"{point.sequences}", place, fontsize=7, color=line.get_color(), xytext=(3, -8),
                          textcoords="offset points")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"ms a token (sequences of {question.context} tokens; numbers: sequences in flight)")
    axes.set_ylabel("tokens/s")
    axes.grid(alpha=0.3)
    if plans:
        axes.legend(fontsize="small")


def _bytes(plan: MeshPlan) -> dict[str, int]:
    memory = plan.memory
    return {"weights": memory.weights, "sampling state": memory.state, "temporaries": memory.temporaries,
            "KV pages": memory.kv}  # fmt: skip
