"""Every block format against the `gguf` package's own decoder, bit for bit, and one of each kind worked out by hand."""

import gguf
import numpy as np
import pytest

from quant.gguf import CHUNK_ELEMENTS, FORMATS, decode

TYPES = sorted(FORMATS)


def random_rows(type_id: int, rows: int, blocks: int) -> np.ndarray:
    """Random bytes, but finite scales (random float16 bits are often NaN), and finite plain floats."""
    rng = np.random.default_rng(type_id)
    layout = FORMATS[type_id].layout
    packed = rng.integers(0, 256, (rows * blocks, layout.itemsize), np.uint8)
    if layout.names is None:
        floats = rng.standard_normal(len(packed)).astype(np.float32)
        if FORMATS[type_id].name == "BF16":
            values = (floats.view(np.uint32) >> 16).astype(layout)
        else:
            values = floats.astype(layout)
        return values.view(np.uint8).reshape(rows, -1)
    records = packed.reshape(-1).view(layout)
    for name in ("d", "m", "dmin"):
        if name in layout.names:
            records[name] = rng.standard_normal(len(records)) * 0.1
    return packed.reshape(rows, -1)


@pytest.mark.parametrize("type_id", TYPES, ids=[FORMATS[t].name for t in TYPES])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 1 + CHUNK_ELEMENTS // 256)])
def test_bits_are_those_of_the_gguf_package(type_id: int, shape: tuple[int, int]):
    kind = gguf.GGMLQuantizationType(type_id)
    assert kind.name == FORMATS[type_id].name
    assert gguf.GGML_QUANT_SIZES[kind] == (FORMATS[type_id].elements, FORMATS[type_id].layout.itemsize)
    packed = random_rows(type_id, *shape)
    expected = gguf.quants.dequantize(packed, kind)
    got = decode(packed, type_id)
    assert (got.dtype, got.shape) == (np.float32, expected.shape)
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"])
def test_quantized_values_come_back_close(name: str):
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    packed = gguf.quants.quantize(values, kind).view(np.uint8)
    step = 2 * np.abs(values).max() / (15 if "4" in name else 31)
    assert np.abs(decode(packed, kind) - values).max() < step


def test_q4_1_by_hand():
    block = np.zeros(20, np.uint8)
    block[:4] = np.array([0.5, -1.0], np.float16).view(np.uint8)  # d, m
    block[4] = 0x3A  # element 0 is 10, element 16 is 3
    values = decode(block, 3)
    assert (values[0], values[16], values[1]) == (10 * 0.5 - 1, 3 * 0.5 - 1, -1)


def test_q5_0_by_hand():
    block = np.zeros(22, np.uint8)
    block[:2] = np.array([2.0], np.float16).view(np.uint8)
    block[2:6] = [0b0000_0010, 0, 0b0000_0001, 0]  # fifth bits of elements 1 and 16
    block[6 + 1] = 0x05  # element 1: 5 + 16; element 17: 0
    values = decode(block, 6)
    assert (values[1], values[16], values[17]) == (2 * (21 - 16), 2 * (16 - 16), 2 * -16)


def test_q4_k_by_hand():
    block = np.zeros(144, np.uint8)
    block[:4] = np.array([1.0, 0.5], np.float16).view(np.uint8)  # d, dmin
    scales = block[4:16]
    scales[0], scales[4] = 3, 2  # sub-block 0: scale 3, min 2
    scales[8 + 1] = 0x21  # sub-block 5: low bits of scale 1 and min 2 ...
    scales[1] = 0b0100_0000  # ... plus 16 for the scale
    block[16] = 0x07  # element 0: 7
    block[16 + 2 * 32] = 0x90  # sub-block 5 is the high half of the third 32 bytes: element 160 is 9
    values = decode(block, 12)
    assert (values[0], values[160], values[161]) == (1 * 3 * 7 - 0.5 * 2, 1 * 17 * 9 - 0.5 * 2, -1)


def test_q6_k_by_hand():
    block = np.zeros(210, np.uint8)
    block[208:] = np.array([1.0], np.float16).view(np.uint8)
    block[192:208] = np.full(16, -1, np.int8).view(np.uint8)
    block[64 + 32] = 0x50  # second half, byte 32: element 128 + 32 has low bits 0, element 128 + 96 has 5
    block[128 + 32] = 0b11_00_00_00  # its two high bits
    values = decode(block, 14)
    assert (values[128 + 32], values[128 + 96]) == (32, -(5 + 48 - 32))


def test_unknown_types_are_named():
    with pytest.raises(ValueError, match=r"GGUF type IQ4_XS is not supported \(supported: F32, .*Q6_K, BF16\)"):
        decode(np.zeros(136, np.uint8), 23)
    with pytest.raises(ValueError, match="number 99"):
        decode(np.zeros(1, np.uint8), 99)
    with pytest.raises(ValueError, match="21 bytes is not a whole number of Q4_1 blocks of 20 bytes"):
        decode(np.zeros(21, np.uint8), 3)
