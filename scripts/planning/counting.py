"""What a compiled step does on one device: operations, bytes of main memory, collectives and kernels, loops included.

- Operations are those of matrix products: 2 for each multiply-add. What else is computed hides behind memory.
- Bytes are what each instruction of the scheduled program reads and writes in main memory. A fusion that takes a slice
  of an operand reads the slice; arrays that the compiler keeps in the chip's own memory (VMEM) are not counted.
- Of a conditional the first branch counts, where a predicate is false: the steps' conditionals are for what a request
  may ask of sampling, and a greedy request asks for nothing.
- Kernels (Pallas) are listed by name with the cost that they carry; see `scripts.planning.workload` for what attention
  costs at a given context.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from math import prod

import numpy as np

from scripts.planning.hlo import Computation, Instruction, Module, Shape, parse
from scripts.planning.loops import UnknownTripCount, trip_count

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
         "collective-broadcast")  # fmt: skip
_KERNELS = ("tpu_custom_call", "mosaic_gpu", "__gpu$xla.gpu.triton")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
         "iota", "optimization-barrier", "add-dependency", "opt-barrier"}  # fmt: skip
_VIEWS = ("bitcast", "reshape", "copy", "convert", "transpose", "get-tuple-element")
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclass(frozen=True, order=True)
class Collective:
    """bytes: what each device ends up holding or, for a reduce-scatter, brings. devices: of one group. stride: from one
    device of a group to the next, 1 for neighbours."""

    kind: str
    bytes: int
    devices: int
    stride: int = 1


@dataclass(frozen=True, order=True)
class Kernel:
    """A Pallas kernel and the estimate that it carries of one call; 0 where it carries none."""

    name: str
    flops: int
    bytes: int


@dataclass
class Counts:
    """Of one step on one device, everything times the number of its executions."""

    flops: float = 0
    hbm_bytes: float = 0
    collectives: Counter[Collective] = field(default_factory=Counter)
    kernels: Counter[Kernel] = field(default_factory=Counter)
    unknown_loops: int = 0  # those whose end depends on data, counted as one pass


def count(text: str) -> Counts:
    """Of the text of a compiled program (`Compiled.as_text()`)."""
    module = parse(text)
    counts = Counts()
    _Walk(module, counts).computation(module.computations[module.entry], 1)
    return counts


@dataclass
class _Walk:
    module: Module
    counts: Counts

    def computation(self, computation: Computation, times: int) -> None:
        for instruction in computation.instructions.values():
            self.instruction(computation, instruction, times)

    def named(self, name: str | None, times: int) -> None:
        if name is not None:
            self.computation(self.module.computations[name], times)

    def instruction(self, inside: Computation, i: Instruction, times: int) -> None:
        opcode = i.opcode
        if opcode == "while":
            try:
                trips = trip_count(self.module, inside, i)
            except UnknownTripCount:
                trips = 1
                self.counts.unknown_loops += times
            self.named(i.called("body"), times * trips)
        elif opcode == "conditional":
            self.named(i.branches[0], times)
        elif opcode in ("call", "async-start"):
            self.named(i.called("to_apply") or i.called("calls"), times)
        elif opcode.removesuffix("-start") in KINDS:
            self.counts.collectives[collective(inside, i)] += times
        elif opcode in _FREE or opcode.endswith(("-done", "-update")):
            return
        elif opcode == "custom-call" and (kernel := _kernel(i)) is not None:
            self.counts.kernels[kernel] += times
        elif opcode in ("copy-start", "slice-start"):
            from_hbm = not self.shapes(inside, i.operands[0])[0].space
            self.counts.hbm_bytes += times * (i.hbm_bytes + from_hbm * i.bytes)
        else:
            self.counts.flops += times * self.flops(inside, i)
            self.counts.hbm_bytes += times * self.traffic(inside, i)
            if opcode.startswith("fusion"):
                self.inner_collectives(i, times)

    def inner_collectives(self, fusion: Instruction, times: int) -> None:
        """TPUs also fuse a collective with the computation that hides it."""
        inner = self.module.computations[fusion.called("calls") or ""]
        for i in inner.instructions.values():
            if i.opcode.removesuffix("-start") in KINDS:
                self.counts.collectives[collective(inner, i)] += times
            elif i.opcode == "fusion":
                self.inner_collectives(i, times)

    # Operations

    def flops(self, inside: Computation, i: Instruction) -> int:
        if i.opcode == "dot":
            return 2 * i.shapes[0].size * _contracted(i, self.shapes(inside, i.operands[0])[0])
        if i.opcode == "convolution":
            return _convolution_flops(i, self.shapes(inside, i.operands[1])[0], self.shapes(inside, i.operands[0])[0])
        if i.opcode == "custom-call" and re.search(r'custom_call_target="(__cublas|__onednn\$matmul)', i.rest):
            lhs = self.shapes(inside, i.operands[0])[0]
            return 2 * i.shapes[0].size * _contracted(i, lhs)
        if i.opcode.startswith("fusion"):
            inner = self.module.computations[i.called("calls") or ""]
            return sum(self.flops(inner, one) for one in inner.instructions.values())
        return 0

    def shapes(self, inside: Computation, name: str) -> tuple[Shape, ...]:
        return inside.instructions[name].shapes

    # Bytes

    def traffic(self, inside: Computation, i: Instruction) -> int:
        if i.opcode.startswith("fusion"):
            inner = self.module.computations[i.called("calls") or ""]
            read = sum(self.fusion_read(inside, name, inner, n) for n, name in enumerate(i.operands))
            return read + self.fusion_written(inner, i)
        if i.opcode in _SLICES:
            return i.hbm_bytes + sum(s.bytes for s in i.shapes if not self.shapes(inside, i.operands[0])[0].space)
        if i.opcode == "dynamic-update-slice":
            update = self.shapes(inside, i.operands[1])[0]
            return update.hbm_bytes + (0 if i.shapes[0].space else update.bytes)
        if i.opcode == "scatter":  # in place: what is updated is read and written
            return 2 * self.shapes(inside, i.operands[-1])[0].hbm_bytes
        if i.opcode == "broadcast":
            return i.hbm_bytes
        return i.hbm_bytes + sum(sum(s.hbm_bytes for s in self.shapes(inside, name)) for name in i.operands)

    def fusion_read(self, inside: Computation, name: str, inner: Computation, place: int) -> int:
        shapes = self.shapes(inside, name)
        if any(shape.space for shape in shapes) or place not in inner.parameters:
            return 0
        whole = sum(shape.bytes for shape in shapes)
        return min(self.read_of(inner, inner.parameters[place].name, whole), whole)

    def read_of(self, computation: Computation, name: str, whole: int) -> int:
        """Bytes that are read of a value by those who use it."""
        total = 0
        for user, place in computation.users[name]:
            if user.opcode in _SLICES:
                total += user.bytes if place == 0 else whole
            elif user.opcode == "dynamic-update-slice" and place == 0:
                continue
            elif user.opcode == "scatter" and place == 0:
                continue
            elif user.opcode in _VIEWS:
                total += self.read_of(computation, user.name, whole) if computation.users[user.name] else whole
            elif user.opcode == "fusion":
                inner = self.module.computations[user.called("calls") or ""]
                total += self.read_of(inner, inner.parameters[place].name, whole)
            else:
                return whole
        return total

    def fusion_written(self, inner: Computation, i: Instruction) -> int:
        root = inner.root
        outputs = [inner.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
        written = 0
        for output, shapes in zip(outputs, i.elements, strict=False):
            while output.opcode in ("bitcast", "copy", "convert") and output.operands:
                output = inner.instructions[output.operands[0]]
            if any(shape.space for shape in shapes):
                continue
            if output.opcode == "dynamic-update-slice":
                written += inner.instructions[output.operands[1]].bytes
            elif output.opcode == "scatter":
                written += 2 * inner.instructions[output.operands[-1]].bytes
            else:
                written += sum(shape.bytes for shape in shapes)
        return written


def collective(inside: Computation, i: Instruction) -> Collective:
    kind, ids, size = i.opcode.removesuffix("-start"), group(i.rest), i.bytes
    devices, stride = len(ids), ids[1] - ids[0] if len(ids) > 1 else 1
    if kind == "reduce-scatter":
        size *= devices
    if kind == "ragged-all-to-all":  # one side is a buffer for the worst case, the other what there is
        size = min(size, sum(shape.bytes for shape in inside.instructions[i.operands[0]].shapes))
    return Collective(kind, size, devices, abs(stride))


def group(rest: str) -> tuple[int, ...]:
    """The devices of the first group, from replica_groups in any of its spellings, or of a permute's first pair."""
    if match := re.search(r"(?:source_target_pairs|replica_groups)=\{\{([\d,]+)\}", rest):
        return tuple(map(int, match[1].split(",")))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        dims = [int(d) for d in match[2].split(",")]
        ids = np.arange(prod(dims)).reshape(dims)
        if match[3]:
            ids = ids.transpose([int(d) for d in match[3].split(",")])
        return tuple(map(int, ids.reshape(-1)[: int(match[1])]))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", rest):
        return _of_mesh(match[1], match[2])
    return (0,)


def _of_mesh(sizes: str, axes: str) -> tuple[int, ...]:
    """'data'=2,'tensor'=4 and the axes of a group, each whole or a part of one: 'tensor':(before)size."""
    parts = {name: (1, int(size), 1) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    chosen = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    for name, before, size in chosen:
        if size:
            parts[name] = (int(before), int(size), parts[name][1] // int(before) // int(size))
    ids = np.arange(prod(prod(part) for part in parts.values())).reshape([n for part in parts.values() for n in part])
    of_group = [1 + 3 * list(parts).index(name) for name, *_ in chosen]
    return tuple(map(int, np.moveaxis(ids, of_group, range(-len(of_group), 0)).reshape(-1, prod(
        ids.shape[axis] for axis in of_group))[0]))  # fmt: skip


def _kernel(i: Instruction) -> Kernel | None:
    target = re.search(r'custom_call_target="([^"]*)"', i.rest)
    if target is None or not target[1].startswith(_KERNELS):
        return None
    name = re.sub(r"[.\d]*$", "", i.name)
    if match := re.search(r"([\w]+)/pallas_call", i.op_name):
        name = match[1]
    return Kernel(name, _estimate(i.rest, "flops"), _estimate(i.rest, "bytes_accessed"))


def _estimate(rest: str, key: str) -> int:
    match = re.search(rf'cost_estimate[^}}]*?{key}(?:"|\\22): ?"?(\d+)', rest)
    return int(match[1]) if match else 0


def _contracted(i: Instruction, lhs: Shape) -> int:
    if match := re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest):
        dims = [int(d) for d in match[1].split(",") if d]
    elif match := re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', i.rest):
        dims = [int(d) for d in json.loads(match[1])]
    else:
        dims = [len(lhs.dims) - 1]
    return prod(lhs.dims[d] for d in dims)


def _convolution_flops(i: Instruction, kernel: Shape, lhs: Shape) -> int:
    """A TPU's products are convolutions. Of a window only places inside the (dilated) operand count."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.rest)
    assert labels is not None, i.name
    of_lhs, of_kernel, of_out = labels[1], labels[2], labels[3]
    flops = 2 * i.shapes[0].size * kernel.dims[of_kernel.index("i")]
    window = re.search(r"window=\{([^}]*)\}", i.rest)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    sizes = [int(s) for s in fields.get("size", "").split("x") if s]

    def numbers(name: str, default: int) -> list[int]:
        return [int(n) for n in fields[name].split("x")] if name in fields else [default] * len(sizes)

    before = [int(pad.split("_")[0]) for pad in fields.get("pad", "").split("x") if pad] or [0] * len(sizes)
    strides, dilations, kernel_dilations = numbers("stride", 1), numbers("lhs_dilate", 1), numbers("rhs_dilate", 1)
    for d, size in enumerate(sizes):
        out, length = i.shapes[0].dims[of_out.index(str(d))], lhs.dims[of_lhs.index(str(d))]
        pairs = 0
        for o in range(out):
            for k in range(size):
                at = o * strides[d] - before[d] + k * kernel_dilations[d]
                pairs += 0 <= at <= (length - 1) * dilations[d] and at % dilations[d] == 0
        flops = flops * pairs // out
    return flops
