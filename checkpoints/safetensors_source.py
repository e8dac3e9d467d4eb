"""Safetensors as a `TensorSource`: one file or many, mapped into memory and never read whole.

The format is an 8-byte length, a JSON header of names, dtypes, shapes and byte ranges, and the bytes. It is read here
rather than by the `safetensors` package because that one's numpy side has no bfloat16.
Format: https://github.com/huggingface/safetensors
"""

import json
import math
import mmap
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError, some

DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "I64": np.dtype(np.int64), "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16), "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class _Stored:
    file: Path
    data: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


class SafetensorsSource:
    """Every tensor of a folder's `*.safetensors` files."""

    def __init__(self, folder: Path):
        self.location = str(folder)
        self._maps: list[mmap.mmap] = []
        self._tensors: dict[str, _Stored] = {}
        for file in _files(folder):
            self._add(file)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """A view into the file: its pages are read when they are touched, so a slice costs only its own bytes."""
        stored = self._tensors[name]
        if stored.dtype not in DTYPES:
            raise CheckpointError(
                f"{stored.file}: {name} has dtype {stored.dtype}, which is not supported (supported: "
                f"{', '.join(DTYPES)})"
            )
        flat = np.frombuffer(stored.data, DTYPES[stored.dtype], math.prod(stored.shape), stored.offset)
        tensor = flat.reshape(stored.shape)
        return tensor if index is None else tensor[index]

    def close(self) -> None:
        """A file stays mapped while an array from `read` lives (an error's traceback may hold one)."""
        self._tensors = {}
        for data in self._maps:
            with suppress(BufferError):
                data.close()

    def _add(self, file: Path) -> None:
        try:
            with open(file, "rb") as opened:
                data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{file}: cannot be read ({error}); check the download") from error
        self._maps.append(data)
        for name, entry, start in _header(file, data):
            if name in self._tensors:
                raise CheckpointError(f"{file}: {name} is also in {self._tensors[name].file}; remove one of the files")
            try:
                dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
                if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end - begin)):
                    raise ValueError(f"bytes {begin} to {end} of shape {list(shape)} are not possible")
                if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
                    raise ValueError(f"{end - begin} bytes do not make {dtype} {list(shape)}")
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{file}: the header's entry {name} is damaged ({error})") from error
            if start + end > len(data):
                raise CheckpointError(
                    f"{file}: cut short: {name} ends at byte {start + end}, the file has {len(data)}; download it again"
                )
            self._tensors[name] = _Stored(file=file, data=data, dtype=dtype, shape=shape, offset=start + begin)


def _header(file: Path, data: mmap.mmap) -> list[tuple[str, dict, int]]:
    """Entries of the JSON header and the offset of the first tensor byte."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(len(data) - 8, MAX_HEADER_BYTES):
        raise CheckpointError(f"{file}: not a safetensors file, or cut short in its header; download it again")
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a safetensors file (its header is no JSON: {error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: not a safetensors file (its header is a {type(header).__name__})")
    return [(name, entry, 8 + size) for name, entry in header.items() if name != "__metadata__"]


def _files(folder: Path) -> list[Path]:
    """The files an index names, or `model.safetensors`, or every safetensors file in the folder."""
    index, single = folder / INDEX, folder / "model.safetensors"
    if not index.exists():
        return [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
            raise ValueError(f"it names files outside of the folder: {some(outside)}")
        files = [folder / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a safetensors index ({error!r})") from error
    missing = [file.name for file in files if not os.path.exists(file)]  # also False for a name that is too long
    if missing:
        raise CheckpointError(f"{folder}: the index names files that are not there: {some(missing)}; download them")
    return files
