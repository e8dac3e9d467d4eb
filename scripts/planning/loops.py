"""How often a compiled loop runs. CPU and GPU compilers write it down; for the TPU's it follows from the counter."""

import re

from scripts.planning.hlo import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_PASSED_ON = ("copy", "bitcast", "copy-done", "copy-start", "convert", "reshape")


class UnknownTripCount(ValueError):
    """A loop whose end depends on data."""


def trip_count(module: Module, caller: Computation, loop: Instruction) -> int:
    if known := _KNOWN.search(loop.rest):
        return int(known[1])
    condition = module.computations[loop.called("condition") or ""]
    body = module.computations[loop.called("body") or ""]
    start = caller.instructions[loop.operands[0]]
    root = _compare(module, condition)
    if root is None:
        raise UnknownTripCount(f"{loop.name}: its condition is no comparison")
    direction = re.search(r"direction=(\w+)", root[1].rest)
    sides = [_counter_or_constant(root[0], name) for name in root[1].operands]
    counter = next((side for side in sides if side is not None and side[0] == "index"), None)
    if counter is None or direction is None or None in sides:
        raise UnknownTripCount(f"{loop.name}: its condition does not compare a counter")
    index = counter[1]
    values = []
    for side in sides:
        assert side is not None
        if side == counter:
            values.append(None)
        elif side[0] == "constant":
            values.append(side[1])
        else:  # a bound that is carried along
            values.append(_constant(caller, start.operands[side[1]]))
    first = _constant(caller, start.operands[index])
    step = _step(body, index)
    if first is None or step is None or not step or values.count(None) != 1:
        raise UnknownTripCount(f"{loop.name}: its counter's start, step or bound is no constant")
    bound = next(value for value in values if value is not None)
    # The counter on the left: counter < bound; on the right, the comparison is mirrored.
    relation = direction[1] if values[0] is None else {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}[direction[1]]
    span = {"LT": bound - first, "LE": bound - first + 1, "GT": first - bound, "GE": first - bound + 1}
    if relation == "NE":
        return abs(bound - first) // abs(step)
    return max(-(-span[relation] // abs(step)), 0)


def _compare(module: Module, condition: Computation) -> tuple[Computation, Instruction] | None:
    """The comparison that ends the loop. A fusion around it is read when its operands are the condition's own."""
    root = condition.root
    if root.opcode == "compare":
        return condition, root
    if root.opcode == "fusion":
        inner = module.computations[root.called("calls") or ""]
        if inner.root.opcode == "compare":
            merged = Computation(condition.name, dict(condition.instructions))
            names = {p.name: root.operands[n] for n, p in inner.parameters.items()}
            operands = tuple(names.get(name, name) for name in inner.root.operands)
            merged.instructions.update({n: i for n, i in inner.instructions.items() if n not in names})
            kept = Instruction(inner.root.name, "compare", inner.root.elements, operands, "",
                               inner.root.rest, True)  # fmt: skip
            return merged, kept
    return None


def _counter_or_constant(computation: Computation, name: str) -> tuple[str, int] | None:
    instruction = computation.instructions[name]
    while instruction.opcode in _PASSED_ON:
        instruction = computation.instructions[instruction.operands[0]]
    if instruction.opcode == "constant":
        return "constant", int(instruction.argument)
    if instruction.opcode == "get-tuple-element":
        return "index", _index(instruction)
    return None


def _constant(computation: Computation, name: str) -> int | None:
    instruction = computation.instructions[name]
    while instruction.opcode in _PASSED_ON:
        instruction = computation.instructions[instruction.operands[0]]
    if instruction.opcode != "constant" or not re.fullmatch(r"-?\d+", instruction.argument):
        return None
    return int(instruction.argument)


def _step(body: Computation, index: int) -> int | None:
    """What one iteration adds to the counter."""
    root = body.root
    if root.opcode != "tuple":
        return None
    instruction = body.instructions[root.operands[index]]
    while instruction.opcode in _PASSED_ON:
        instruction = body.instructions[instruction.operands[0]]
    if instruction.opcode not in ("add", "subtract"):
        return None
    constants = [c for name in instruction.operands if (c := _constant(body, name)) is not None]
    if len(constants) != 1:
        return None
    return constants[0] if instruction.opcode == "add" else -constants[0]


def _index(instruction: Instruction) -> int:
    match = re.search(r"index=(\d+)", instruction.rest)
    assert match is not None, instruction
    return int(match[1])
