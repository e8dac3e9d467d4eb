"""The GGUF container: metadata and where each tensor's bytes are, read from a memory map.

The whole header of a 50,000-token model is parsed in about a tenth of a second, because strings are cut straight from
the map; tensor bytes are not touched until they are asked for.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quant.gguf import block_format

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_AXES = 4
DEFAULT_ALIGNMENT = 32

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # slowest axis first, as numpy has it (the file stores the reverse)
    type_id: int
    offset: int  # bytes from the start of the file

    def row_bytes(self) -> int:
        """Bytes of one row (the fastest axis). Raises ValueError for a type that cannot be decoded."""
        fmt = block_format(self.type_id)
        if self.shape[-1] % fmt.elements:
            raise ValueError(f"{self.name}: rows of {self.shape[-1]} are not whole {fmt.name} blocks of {fmt.elements}")
        return self.shape[-1] // fmt.elements * fmt.layout.itemsize


class GGUFFile:
    """An open GGUF file. Raises OSError when it cannot be opened, ValueError when it is not a whole, readable GGUF.

    metadata: key -> int, float, bool, str or a list of them.
    """

    def __init__(self, path: str | Path):
        with open(path, "rb") as file:
            if file.read(4) != MAGIC:
                raise ValueError("not a GGUF file (it does not start with the letters GGUF)")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.metadata, infos, data_start = _Header(self._map).parse()
        except (struct.error, UnicodeDecodeError, OverflowError, RecursionError) as error:
            self._map.close()
            raise ValueError(f"the GGUF header is damaged or cut short ({error})") from error
        self.tensors = {
            name: TensorInfo(name=name, shape=shape, type_id=type_id, offset=data_start + offset)
            for name, shape, type_id, offset in infos
        }

    def rows(self, name: str) -> np.ndarray:
        """The tensor's packed bytes, uint8 [..., bytes of a row], a view into the file."""
        info = self.tensors[name]
        shape = (*info.shape[:-1], info.row_bytes())
        end = info.offset + math.prod(shape)
        if end > len(self._map):
            raise ValueError(f"{name} ends at byte {end}, the file has {len(self._map)}: it is cut short")
        return np.frombuffer(self._map, np.uint8, math.prod(shape), info.offset).reshape(shape)

    def close(self) -> None:
        """While a view from `rows` lives (an error's traceback may hold one), the file stays mapped until it dies."""
        with suppress(BufferError):
            self._map.close()


class _Header:
    """A cursor over the start of the file."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = len(MAGIC)

    def parse(self) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]], int]:
        version = self.scalar("I")
        if version not in VERSIONS:
            raise ValueError(f"GGUF version {version} is not supported (supported: 2, 3, little endian)")
        num_tensors, num_fields = self.scalar("Q"), self.scalar("Q")
        metadata = {}
        for _ in range(num_fields):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        infos = []
        for _ in range(num_tensors):
            name, num_axes = self.string(), self.scalar("I")
            if not 1 <= num_axes <= MAX_AXES:
                raise ValueError(f"the GGUF header is damaged: {name} has {num_axes} axes, must have 1 to {MAX_AXES}")
            shape = tuple(self.scalar("Q") for _ in range(num_axes))[::-1]
            infos.append((name, shape, self.scalar("I"), self.scalar("Q")))
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"the GGUF header is damaged: general.alignment is {alignment!r}, must be at least 1")
        return metadata, infos, -(-self.at // alignment) * alignment

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, at, read_length = self.data, self.at, struct.Struct("<Q").unpack_from
        out = []
        for _ in range(count):
            start = at + 8
            at = start + read_length(data, at)[0]
            if at > len(data):
                raise struct.error("a string runs past the end of the file")
            # Strings in the wild are not all valid UTF-8 (merges of raw bytes); the odd byte must not stop the rest.
            out.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return out

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(self.code(kind))
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == STRING:
            return self.strings(count)
        if kind == ARRAY:
            return [self.value(ARRAY) for _ in range(count)]
        layout = struct.Struct(f"<{count}{self.code(kind)}")
        values = list(layout.unpack_from(self.data, self.at))
        self.at += layout.size
        return values

    def code(self, kind: int) -> str:
        if kind not in SCALARS:
            raise ValueError(f"the GGUF header is damaged: {kind} is not a value type")
        return SCALARS[kind]
