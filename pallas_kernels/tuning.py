"""Block sizes: from a table measured on the chip where there is an entry, else the cheapest by a cost model that fits.

A kernel brings its candidates (frozen dataclasses of its config.py) and a function from a candidate to an `Estimate`;
this file chooses. Tables are `tuned/<device>.json`, one file a chip, written by `python -m scripts.tune` on that chip
and never by hand:

    {"device": "v6e",
     "entries": {"ragged_paged_attention/mosaic_tpu": {
        "N=32 K=8 H=128 B=128 T=64 dtype=bfloat16": {
           "config": {"pages_per_block": 16}, "microseconds": 211.0, "jax": "0.12.0", "date": "2026-08-01"}}}}
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pallas_kernels.devices import Device

TABLES = Path(__file__).parent / "tuned"

Config = TypeVar("Config")
Shape = Mapping[str, int | str]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a launch with one candidate costs.

    hbm_bytes: read and written. flops: multiplications and additions of the matrix unit, padding included. cycles: of
    the vector and scalar units if they are known to bound it. fixed_seconds: what hides behind nothing (first fetch,
    steps of the grid). block_bytes: VMEM or shared memory.
    """

    hbm_bytes: float
    flops: float
    block_bytes: int
    cycles: float = 0.0
    fixed_seconds: float = 0.0

    def seconds(self, device: Device) -> float:
        """Copies, products and instructions overlap: the slowest of them counts."""
        overlapped = (self.hbm_bytes / device.hbm_bandwidth, self.flops / device.bf16_flops,
                      self.cycles / device.clock_hz)
        return max(overlapped) + self.fixed_seconds


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a kernel asked `choose`; candidates: those that fit."""

    kernel: str
    shape: Shape
    candidates: tuple[Any, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.kernel, shape_key(self.shape)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Within `searching`, `choose` records its questions here and gives these answers, by Question.key."""

    answers: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    questions: dict[tuple[str, str], Question] = field(default_factory=dict)


_search: ContextVar[Search | None] = ContextVar("search", default=None)


@contextmanager
def searching(search: Search) -> Iterator[None]:
    """For `scripts.tune`: how it learns what a kernel could take, and makes it take it."""
    token = _search.set(search)
    try:
        yield
    finally:
        _search.reset(token)


def choose(
    kernel: str, shape: Shape, candidates: Sequence[Config], estimate: Callable[[Config], Estimate], device: Device,
    *, tables: Path = TABLES,
) -> Config:
    """The measured entry for (kernel, shape) where it is a candidate's and fits, else the cheapest candidate that fits.

    Equal cost: the earlier candidate. ValueError when none fits: it names the smallest and the limit.
    """
    if (search := _search.get()) is not None:
        fits = (one for one in candidates if estimate(one).block_bytes <= device.block_memory_bytes)
        question = Question(kernel=kernel, shape=dict(shape), candidates=tuple(dict.fromkeys(fits)))
        search.questions[question.key] = question
        if question.key in search.answers:
            return search.answers[question.key]
    measured = measured_config(kernel, shape, device, type(candidates[0]), tables=tables)
    if measured is not None and estimate(measured).block_bytes <= device.block_memory_bytes:
        return measured
    estimates = [(candidate, estimate(candidate)) for candidate in candidates]
    fitting = [(cost.seconds(device), i) for i, (_, cost) in enumerate(estimates)
               if cost.block_bytes <= device.block_memory_bytes]
    if not fitting:
        smallest, cost = min(estimates, key=lambda pair: pair[1].block_bytes)
        raise ValueError(
            f"{kernel} at {shape_key(shape)}: no block size fits {_memory(device)}; "
            f"the smallest, {describe(smallest)}, needs {cost.block_bytes:,} bytes"
        )
    return candidates[min(fitting)[1]]


def require_fit(
    kernel: str, config: Config, candidates: Sequence[Config], estimate: Callable[[Config], Estimate], device: Device
) -> None:
    """ValueError unless the config fits, with its bytes, the limit and the nearest candidate that fits."""
    needed = estimate(config).block_bytes
    if needed <= device.block_memory_bytes:
        return
    fitting = [candidate for candidate in candidates if estimate(candidate).block_bytes <= device.block_memory_bytes]
    message = f"{kernel}: {describe(config)} needs {needed:,} bytes and {_memory(device)}"
    if not fitting:
        raise ValueError(f"{message}; no other block size fits either")
    nearest = min(fitting, key=lambda candidate: distance(config, candidate))
    less = estimate(nearest).block_bytes
    raise ValueError(f"{message}; the nearest that fits is {describe(nearest)} ({less:,} bytes)")


def _memory(device: Device) -> str:
    memory = "VMEM" if device.platform == "tpu" else "shared memory"
    return f"{device.name} has {device.block_memory_bytes:,} bytes of {memory}"


def distance(a: Any, b: Any) -> float:
    """How far two configs of one class are apart: octaves, summed over their numbers; 1 for each other difference."""
    total = 0.0
    for one in dataclasses.fields(a):
        x, y = getattr(a, one.name), getattr(b, one.name)
        if isinstance(x, bool) or not isinstance(x, int) or not isinstance(y, int) or min(x, y) <= 0:
            total += float(x != y)
        else:
            total += abs(math.log2(x / y))
    return total


def describe(config: Any) -> str:
    return ", ".join(f"{field.name}={getattr(config, field.name)}" for field in dataclasses.fields(config))


def shape_key(shape: Shape) -> str:
    """Fields in the order given, as "N=32 K=8 dtype=bfloat16"."""
    return " ".join(f"{name}={value}" for name, value in shape.items())


def measured_config(
    kernel: str, shape: Shape, device: Device, config_type: type[Config], *, tables: Path = TABLES
) -> Config | None:
    """The table's config, or None. ValueError when the entry has fields that the class lacks or refuses."""
    entry = read_table(device, tables=tables).get(kernel, {}).get(shape_key(shape))
    if entry is None:
        return None
    try:
        return config_type(**entry["config"])
    except TypeError as error:
        path = tables / f"{device.name}.json"
        raise ValueError(f"{path}: the entry {kernel!r} {shape_key(shape)!r} is not a {config_type.__name__}: {error}"
                         ) from error


def read_table(device: Device, *, tables: Path = TABLES) -> dict[str, dict[str, Any]]:
    """Kernel -> shape key -> entry; empty where nothing was measured. ValueError names a file of another format."""
    return _read(tables / f"{device.name}.json", device.name)


@lru_cache
def _read(path: Path, name: str) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    table = json.loads(path.read_text())
    if set(table) != {"device", "entries"} or table["device"] != name:
        raise ValueError(f"{path}: expected the fields device ({name!r}) and entries")
    for kernel, shapes in table["entries"].items():
        for key, entry in shapes.items():
            if set(entry) != {"config", "microseconds", "jax", "date"}:
                raise ValueError(f"{path}: {kernel} {key}: expected config, microseconds, jax and date, "
                                 f"found {sorted(entry)}")
    return table["entries"]


def write_entry(
    kernel: str, shape: Shape, device: Device, config: Any, *, microseconds: float, jax_version: str, date: str,
    tables: Path = TABLES,
) -> Path:
    """Adds or replaces one measurement; returns the file."""
    path = tables / f"{device.name}.json"
    entries = {name: dict(shapes) for name, shapes in read_table(device, tables=tables).items()}
    entries.setdefault(kernel, {})[shape_key(shape)] = {
        "config": dataclasses.asdict(config), "microseconds": round(microseconds, 2), "jax": jax_version, "date": date,
    }
    ordered = {name: dict(sorted(shapes.items())) for name, shapes in sorted(entries.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"device": device.name, "entries": ordered}, indent=1) + "\n")
    _read.cache_clear()
    return path
