"""The contract between checkpoint readers and models.

A `TensorSource` is a checkpoint seen as named tensors under Hugging Face names (`model.layers.0.mlp.up_proj.weight`),
whatever the file format. A `ParamSource` says which of them make one model parameter. The loader applies the map and
insists that nothing is missing and nothing is left over.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class TensorSource(Protocol):
    """Lazy access to a checkpoint. `read` touches only the bytes it needs."""

    location: str  # the file or folder, for messages

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor (or the slice of it that `index` selects, one slice a dimension, step 1), in its own dtype;
        quantized GGUF blocks come decoded as float32."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A part of a tensor that holds several parameters, one below the other: rows start .. stop - 1 of `total`."""

    start: int
    stop: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """What of a longer axis is the parameter's: start, start + step, ... of `total`."""

    axis: int  # of one layer's parameter
    start: int
    step: int = 1
    total: int


@dataclass(frozen=True, kw_only=True)
class ParamSource:
    """One model parameter from the checkpoint.

    names: one tensor name, or one for each layer of a stack, in order (the parameter has a leading layer axis); where
    each expert's tensor is stored alone, all experts of the first layer, then of the second.
    experts: how many tensors make a layer, one for each expert (the parameter has an expert axis after the layers').
    rows: the parameter is this part of the stored tensor; None: all of it.
    part: the parameter is this part of what the stored tensor is reshaped to.
    transpose: the stored matrix is [out, in] and the parameter wants [in, out].
    The parameter's shape (without those axes) is a reshape of the (transposed) tensor: [D, N*H] to [D, N, H].
    """

    names: tuple[str, ...]
    stacked: bool
    experts: int | None = None
    transpose: bool = False
    rows: Rows | None = None
    part: Part | None = None
