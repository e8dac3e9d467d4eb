"""Reads the TPU compiler's own schedule: the loops of a kernel, their bundles and what each unit does in them.

A bundle is one cycle's instruction word of the TensorCore; the compiler lays every one out, waits included, so that a
loop of n bundles takes n cycles an iteration (without waiting for DMA). libtpu writes two files for each kernel:

- `*-final_bundles.txt`: one line a bundle, `0x2c : > { ... }`. `LB:` opens a loop's body, the number of `>` is its
  depth.
- `*-final_hlo-static-per-bundle-utilization.txt`: one line a bundle with the slots used on each unit.

A loop ends where a bundle of smaller depth comes. Code under `pl.when` counts as if it ran: the figures are those of an
iteration in which everything happens.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BUNDLE = re.compile(r"^ *(?:0x)?([0-9a-f]+) +(?:([A-Z]{2}):|:) *((?:> ?)*)\{(?!\})")
DUMP_FLAGS = "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final.*"

SPILLS, FILLS = "VSTORE:SPILL", "VLOAD:FILL"


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One loop of a kernel. start, end: bundle addresses, end exclusive. depth: 1 is the outermost, often the grid's.

    slots: instructions on each unit in the loop, inner loops' bodies included once; VLOAD and VSTORE include fills and
    spills. children: loops inside it.
    """

    kernel: str
    depth: int
    start: int
    end: int
    slots: dict[str, int]
    capacity: dict[str, int]
    children: tuple["Loop", ...] = ()

    @property
    def bundles(self) -> int:
        """Bundles from the first to the last, those of inner loops counted once."""
        return self.end - self.start

    @property
    def own_bundles(self) -> int:
        return self.bundles - sum(child.bundles for child in self.children)

    @property
    def spills(self) -> int:
        """Vector registers written to memory because there were too few, and read again."""
        return self.slots.get(SPILLS, 0) + self.slots.get(FILLS, 0)

    def total(self, trips: dict[int, int]) -> int:
        """Bundles of one iteration when the inner loop that starts at address a runs trips.get(a, 1) times."""
        return self.own_bundles + sum(trips.get(c.start, 1) * c.total(trips) for c in self.children)

    def use(self, unit: str) -> float:
        """Share of the unit's slots that hold an instruction."""
        return self.slots[unit] / (self.capacity[unit] * self.bundles)

    def walk(self) -> Iterator["Loop"]:
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One kernel's bundles: roots are its outermost loops."""

    kernel: str
    bundles: int
    slots: dict[str, int]
    capacity: dict[str, int]
    roots: tuple[Loop, ...]

    @property
    def loops(self) -> list[Loop]:
        return [loop for root in self.roots for loop in root.walk()]

    @property
    def hot(self) -> Loop:
        """The innermost loop with the most bundles (ValueError without loops)."""
        innermost = [loop for loop in self.loops if not loop.children]
        if not innermost:
            raise ValueError(f"{self.kernel} has no loop")
        return max(innermost, key=lambda loop: loop.bundles)

    @property
    def spills(self) -> int:
        return self.slots.get(SPILLS, 0) + self.slots.get(FILLS, 0)


def read_dump(folder: Path) -> list[Schedule]:
    """Every kernel in the dump, the one with most bundles first; XLA's own fusions are kernels too."""
    schedules = []
    for path in sorted(folder.glob("*-final_bundles.txt")):
        match = re.match(r"\d+-(.+)-\d+-final_bundles\.txt$", path.name)
        if match is None or match[1] == "TLP" or match[1].startswith("<"):
            continue
        pattern = re.sub(r"-\d+-final_bundles\.txt$", "", path.name)
        usage = [p for p in folder.glob("*-final_hlo-static-per-bundle-utilization.txt")
                 if p.name.startswith(pattern + "-") and re.fullmatch(r"\d+", p.name[len(pattern) + 1:].split("-")[0])]
        if usage:
            schedules.append(parse(match[1], path.read_text(), usage[0].read_text()))
    return sorted(schedules, key=lambda schedule: -schedule.bundles)


def parse(kernel: str, bundles_text: str, usage_text: str) -> Schedule:
    capacity, usage = parse_usage(usage_text)
    found = list(parse_bundles(bundles_text))
    spans = [(start, loop_end(found, start, depth, len(usage)), depth) for start, depth, opens in found if opens]

    def slots(start: int, end: int) -> dict[str, int]:
        rows = usage[start:end]
        return {unit: sum(row[i] for row in rows) for i, unit in enumerate(capacity)}

    def build(inside: list[tuple[int, int, int]]) -> tuple[Loop, ...]:
        loops, rest = [], inside
        while rest:
            start, end, depth = rest[0]
            within = [span for span in rest[1:] if span[0] < end]
            rest = rest[1 + len(within):]
            loops.append(Loop(
                kernel=kernel, depth=depth, start=start, end=end, slots=slots(start, end), capacity=capacity,
                children=build(within),
            ))
        return tuple(loops)

    return Schedule(
        kernel=kernel, bundles=len(usage), slots=slots(0, len(usage)), capacity=capacity, roots=build(spans),
    )


def parse_bundles(text: str) -> Iterator[tuple[int, int, bool]]:
    """Address, depth, and whether a loop's body opens there, of every bundle that holds an instruction."""
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match:
            yield int(match[1], 16), match[3].count(">"), match[2] == "LB"


def loop_end(found: list[tuple[int, int, bool]], start: int, depth: int, last: int) -> int:
    """The address after a loop's last bundle: there a shallower bundle or the next loop's body comes."""
    for address, here, opens in found:
        if address > start and (here < depth or (opens and here == depth)):
            return address
    return last


def parse_usage(text: str) -> tuple[dict[str, int], list[list[int]]]:
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 4 or not lines[0].startswith("== CAP"):
        raise ValueError(f"not a utilization dump: {lines[:1]}")
    units = [unit.strip() for unit in lines[1].split(",")]
    capacity = dict(zip(units, map(int, lines[2].split()), strict=True))
    return capacity, [[int(field) for field in line.split()] for line in lines[4:]]
