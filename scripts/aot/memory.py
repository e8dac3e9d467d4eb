"""What a compiled program keeps where: VMEM or shared memory of its kernels, temporaries beside the KV cache."""

from collections.abc import Iterator
from typing import Any

import numpy as np


def kernels_of(jaxpr: Any) -> Iterator[Any]:
    """Every pallas_call equation of a jaxpr, closed or not, also inside loops, branches and jitted functions."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from kernels_of(inner)


def block_bytes(jaxpr: Any) -> int | None:
    """VMEM of the kernel that asks for most: its scratch, and two buffers of each block that the pipeline moves.

    None without a TPU kernel. What the compiler keeps beside it (spilled registers, copies) is not in it.
    """
    sizes = [_kernel_bytes(equation) for equation in kernels_of(jaxpr)]
    return max((size for size in sizes if size is not None), default=None)


def _kernel_bytes(equation: Any) -> int | None:
    mapping = equation.params.get("grid_mapping")
    if mapping is None:
        return None
    scratch = [aval for aval in mapping.scratch_avals if _space(aval) == "vmem"]
    blocks = [block.transformed_block_aval for block in mapping.block_mappings]
    piped = [aval for aval in blocks if _space(aval) in ("vmem", "none", "default")]
    return sum(map(_bytes, scratch)) + 2 * sum(map(_bytes, piped))


def _space(aval: Any) -> str:
    return str(getattr(aval, "memory_space", None)).lower().removeprefix("memoryspace.")


def _bytes(aval: Any) -> int:
    """With TPU tiling: the last two dimensions in whole tiles of 8 x 128 words of 32 bits."""
    dtype = np.dtype(aval.dtype)
    *outer, rows, lanes = (1, 1, *aval.shape)
    sublanes = 8 * (4 // min(dtype.itemsize, 4))
    # A single row takes no whole tile: the compiler picks smaller ones.
    rows = -(-rows // sublanes) * sublanes if rows > sublanes // 2 else rows
    return int(np.prod(outer)) * rows * (-(-lanes // 128) * 128) * dtype.itemsize


def temporaries(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def kv_problem(compiled: Any, kv_bytes: int, layer_bytes: int) -> str | None:
    """Why the program copies the KV cache, or None: it is aliased, and no temporary could hold one layer of it."""
    analysis = compiled.memory_analysis()
    if analysis.alias_size_in_bytes < kv_bytes:
        return f"the KV cache ({kv_bytes:,} bytes) is copied: only {analysis.alias_size_in_bytes:,} bytes are aliased"
    if analysis.temp_size_in_bytes >= layer_bytes:
        return (f"temporaries of {analysis.temp_size_in_bytes:,} bytes could hold a copy of a layer of the KV cache "
                f"({layer_bytes:,})")
    return None
