"""Reads compiled HLO text into computations and instructions: what a device executes, as XLA prints it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

_BITS = {"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16,
         "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128, "token": 0,
         "opaque": 0}  # fmt: skip
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^{}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$|^(ENTRY )?%([\w.\-]+) \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_SPACE = re.compile(r"S\((\d+)\)")


@dataclass(frozen=True)
class Shape:
    """An array. space: XLA's memory space, 0 is the device's main memory."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        return prod(self.dims)

    @property
    def bytes(self) -> int:
        bits = _BITS.get(self.dtype) or (8 if self.dtype.startswith("f8") else 4 if self.dtype.startswith("f4") else 0)
        return (self.size * bits + 7) // 8

    @property
    def hbm_bytes(self) -> int:
        return 0 if self.space else self.bytes


@dataclass(frozen=True)
class Instruction:
    """elements: the arrays of the result, those of each element of a tuple; of an asynchronous start only what will be
    there when it is done. rest: everything behind the operands."""

    name: str
    opcode: str
    elements: tuple[tuple[Shape, ...], ...]
    operands: tuple[str, ...]
    argument: str  # between the parentheses: a parameter's number, a constant's value
    rest: str
    is_root: bool = False

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(shape for element in self.elements for shape in element)

    @property
    def bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes)

    @property
    def hbm_bytes(self) -> int:
        return sum(shape.hbm_bytes for shape in self.shapes)

    def called(self, attribute: str) -> str | None:
        """The computation that an attribute names: calls, body, condition, to_apply."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return match[1] if match else None

    @property
    def branches(self) -> tuple[str, ...]:
        """Of a conditional, in order of the index; a predicate's are (false, true)."""
        if match := re.search(r"branch_computations=\{([^}]*)\}", self.rest):
            return tuple(name.strip().lstrip("%") for name in match[1].split(","))
        return tuple(name for key in ("false_computation", "true_computation") if (name := self.called(key)))

    @property
    def op_name(self) -> str:
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""


@dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(i for i in reversed(self.instructions.values()) if i.is_root)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.argument): i for i in self.instructions.values() if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Who reads a value, and as which operand."""
        found: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for place, operand in enumerate(instruction.operands):
                found.setdefault(operand, []).append((instruction, place))
        return found


@dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """ValueError where the text has no entry computation."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = header[2] or header[4]
            current = computations[name] = Computation(name)
            if header[1] or header[3]:
                entry = name
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.instructions[match[2]] = _instruction(line[match.end():], match[2], bool(match[1]))
    if not entry:
        raise ValueError(f"no ENTRY computation in {len(text)} characters of HLO")
    return Module(computations, entry)


def _instruction(text: str, name: str, is_root: bool) -> Instruction:
    """text: from the result's shape on."""
    end = _closing(text, 0) if text.startswith("(") else _after_array(text)
    elements = tuple(map(_arrays, _split(text[1 : end - 1]))) if text.startswith("(") else (_arrays(text[:end]),)
    rest = text[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    close = _closing("(" + rest, 0) - 1
    argument = rest[: close - 1]
    operands = tuple(_NAME.findall(argument))
    opcode = opcode.strip()
    if opcode == "copy-start":  # (result, operand, context)
        elements = elements[:1]
    elif opcode.endswith("-start") and len(elements) > 1:
        # ((operands), result, contexts); of gathers and permutes also (operand, result, contexts)
        if text.startswith("((") or opcode in ("all-gather-start", "collective-permute-start"):
            elements = elements[1:2]
    return Instruction(name, opcode, elements, operands, argument, rest[close:], is_root)


def _after_array(text: str) -> int:
    """Where a single array's shape ends: at the first space outside its layout."""
    depth = 0
    for at, char in enumerate(text):
        depth += (char in "{([") - (char in "})]")
        if char == " " and depth == 0:
            return at
    return len(text)


def _closing(text: str, start: int) -> int:
    """The position after the parenthesis that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at + 1
    return len(text)


def _split(text: str) -> Iterator[str]:
    """At commas outside brackets of any kind."""
    depth, start = 0, 0
    for at, char in enumerate(text):
        depth += (char in "{([") - (char in "})]")
        if char == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    if text[start:].strip():
        yield text[start:]


def _arrays(text: str) -> tuple[Shape, ...]:
    found = []
    for match in _ARRAY.finditer(text):
        space = _SPACE.search(match[3] or "")
        dims = tuple(int(d.replace("<=", "")) for d in match[2].split(",") if d.strip())
        found.append(Shape(match[1], dims, int(space[1]) if space else 0))
    return tuple(found)
