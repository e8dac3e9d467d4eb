"""GGUF number formats: blocks of packed bytes decoded to float32, bit for bit what the format's own reader gives.

A tensor's rows are cut into blocks of 32 or 256 elements. A block is a few scales and small integers; its layout is
written down below as a numpy record, so a buffer of blocks is read by name (`blocks["d"]`) without unpacking by hand.
Source of the layouts: ggml `ggml-common.h`, `ggml-quants.c`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

F2, U1, I1 = "<f2", "u1", "i1"

# Legacy formats, 32 elements: element j is the low nibble of q[j], element j + 16 its high nibble; bit j of `high`
# is the fifth bit of element j.
Q4_0 = np.dtype([("d", F2), ("q", U1, 16)])
Q4_1 = np.dtype([("d", F2), ("m", F2), ("q", U1, 16)])
Q5_0 = np.dtype([("d", F2), ("high", U1, 4), ("q", U1, 16)])
Q5_1 = np.dtype([("d", F2), ("m", F2), ("high", U1, 4), ("q", U1, 16)])
Q8_0 = np.dtype([("d", F2), ("q", I1, 32)])
# K formats, 256 elements in sub-blocks of 32 (Q4_K, Q5_K) or 16 (Q6_K) that have their own small integer scale.
Q4_K = np.dtype([("d", F2), ("dmin", F2), ("scales", U1, 12), ("q", U1, (4, 32))])
Q5_K = np.dtype([("d", F2), ("dmin", F2), ("scales", U1, 12), ("high", U1, 32), ("q", U1, (4, 32))])
Q6_K = np.dtype([("low", U1, (2, 64)), ("high", U1, (2, 32)), ("scales", I1, 16), ("d", F2)])


def _f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def _nibbles(q: np.ndarray, out: np.ndarray) -> None:
    """q [..., n] -> out [..., 2, n]: low nibbles, then high nibbles."""
    np.bitwise_and(q, 15, out=out[..., 0, :], casting="unsafe")
    np.right_shift(q, 4, out=out[..., 1, :], casting="unsafe")


def _q4_0(b: np.ndarray, out: np.ndarray) -> None:
    _nibbles(b["q"], out.reshape(-1, 2, 16))
    out -= np.float32(8)
    out *= _f32(b["d"])[:, None]


def _q4_1(b: np.ndarray, out: np.ndarray) -> None:
    _nibbles(b["q"], out.reshape(-1, 2, 16))
    out *= _f32(b["d"])[:, None]
    out += _f32(b["m"])[:, None]


def _five_bits(b: np.ndarray, out: np.ndarray) -> None:
    _nibbles(b["q"], out.reshape(-1, 2, 16))
    high = np.unpackbits(np.ascontiguousarray(b["high"]), axis=-1, bitorder="little")  # [blocks, 32]
    out += high << np.uint8(4)


def _q5_0(b: np.ndarray, out: np.ndarray) -> None:
    _five_bits(b, out)
    out -= np.float32(16)
    out *= _f32(b["d"])[:, None]


def _q5_1(b: np.ndarray, out: np.ndarray) -> None:
    _five_bits(b, out)
    out *= _f32(b["d"])[:, None]
    out += _f32(b["m"])[:, None]


def _q8_0(b: np.ndarray, out: np.ndarray) -> None:
    np.multiply(b["q"], _f32(b["d"])[:, None], out=out)


def _scales_and_mins(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[blocks, 12] bytes -> two [blocks, 8] of 6-bit integers. Sub-blocks 0-3 sit in the low six bits of bytes 0-3
    (scale) and 4-7 (min); sub-blocks 4-7 take four bits from bytes 8-11 and two from the tops of bytes 0-7."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    mins = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales, mins


def _scale_k(b: np.ndarray, out: np.ndarray) -> None:
    """out [blocks, 8, 32] of integers -> d * scale * q - dmin * min."""
    scales, mins = _scales_and_mins(b["scales"])
    out *= (_f32(b["d"])[:, None] * _f32(scales))[:, :, None]
    out -= (_f32(b["dmin"])[:, None] * _f32(mins))[:, :, None]


def _q4_k(b: np.ndarray, out: np.ndarray) -> None:
    _nibbles(b["q"], out.reshape(-1, 4, 2, 32))
    _scale_k(b, out.reshape(-1, 8, 32))


def _q5_k(b: np.ndarray, out: np.ndarray) -> None:
    _nibbles(b["q"], out.reshape(-1, 4, 2, 32))
    out = out.reshape(-1, 8, 32)
    bit = np.arange(8, dtype=np.uint8)[:, None]  # sub-block i keeps its fifth bits in bit i of `high`
    out += (b["high"][:, None, :] >> bit & np.uint8(1)) << np.uint8(4)
    _scale_k(b, out)


def _q6_k(b: np.ndarray, out: np.ndarray) -> None:
    _nibbles(b["low"], out.reshape(-1, 2, 2, 64))
    shift = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = b["high"][:, :, None, :] >> shift & np.uint8(3)  # [blocks, 2, 4, 32]
    out.reshape(-1, 2, 4, 32)[...] += high << np.uint8(4)
    out -= np.float32(32)
    out.reshape(-1, 16, 16)[...] *= (_f32(b["d"])[:, None] * _f32(b["scales"]))[:, :, None]


def _float(b: np.ndarray, out: np.ndarray) -> None:
    out[:, 0] = b


def _bf16(b: np.ndarray, out: np.ndarray) -> None:
    np.left_shift(b, 16, out=out.view(np.uint32)[:, 0], dtype=np.uint32)


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """`elements` values in `layout.itemsize` bytes. `decode` fills float32 [blocks, elements] from [blocks]."""

    name: str
    layout: np.dtype
    elements: int
    decode: Callable[[np.ndarray, np.ndarray], None]


# Keyed by the type number in the file.
FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat(name="F32", layout=np.dtype("<f4"), elements=1, decode=_float),
    1: BlockFormat(name="F16", layout=np.dtype("<f2"), elements=1, decode=_float),
    2: BlockFormat(name="Q4_0", layout=Q4_0, elements=32, decode=_q4_0),
    3: BlockFormat(name="Q4_1", layout=Q4_1, elements=32, decode=_q4_1),
    6: BlockFormat(name="Q5_0", layout=Q5_0, elements=32, decode=_q5_0),
    7: BlockFormat(name="Q5_1", layout=Q5_1, elements=32, decode=_q5_1),
    8: BlockFormat(name="Q8_0", layout=Q8_0, elements=32, decode=_q8_0),
    12: BlockFormat(name="Q4_K", layout=Q4_K, elements=256, decode=_q4_k),
    13: BlockFormat(name="Q5_K", layout=Q5_K, elements=256, decode=_q5_k),
    14: BlockFormat(name="Q6_K", layout=Q6_K, elements=256, decode=_q6_k),
    30: BlockFormat(name="BF16", layout=np.dtype("<u2"), elements=1, decode=_bf16),
}

# Other type numbers, only so that an error can name them.
UNSUPPORTED = {
    10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

CHUNK_ELEMENTS = 1 << 17  # decoded at a time: the intermediate arrays stay in the CPU's cache


def block_format(type_id: int) -> BlockFormat:
    """Raises ValueError, naming the type and the supported ones, for a number that cannot be decoded."""
    if type_id not in FORMATS:
        name = UNSUPPORTED.get(type_id, f"number {type_id}")
        supported = ", ".join(f.name for f in FORMATS.values())
        raise ValueError(f"GGUF type {name} is not supported (supported: {supported})")
    return FORMATS[type_id]


def decode(rows: np.ndarray, type_id: int) -> np.ndarray:
    """uint8 [..., bytes of a row] -> float32 [..., elements of a row]."""
    fmt = block_format(type_id)
    size = fmt.layout.itemsize
    if rows.shape[-1] % size:
        raise ValueError(f"a row of {rows.shape[-1]} bytes is not a whole number of {fmt.name} blocks of {size} bytes")
    blocks = np.ascontiguousarray(rows).reshape(-1).view(fmt.layout)
    out = np.empty((len(blocks), fmt.elements), np.float32)
    step = CHUNK_ELEMENTS // fmt.elements
    for start in range(0, len(blocks), step):
        fmt.decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(*rows.shape[:-1], rows.shape[-1] // size * fmt.elements)
