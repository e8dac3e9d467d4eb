"""Puts a checkpoint's tensors on the devices: each device gets its shard, and only that shard's bytes are read.

For one parameter: find the distinct shards its sharding asks for, read each once into a fresh host array in the
target dtype (layer by layer for a stack), and hand it to every device that holds it. The host never has more than one
parameter at a time beyond what the devices hold.
"""

import fnmatch
import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any, cast

import jax
import numpy as np
from tqdm import tqdm

from checkpoints.errors import CheckpointError, some
from checkpoints.tensors import ParamSource, TensorSource

Path = tuple[str, ...]

# Buffers that old checkpoints carry and every model recomputes.
IGNORED = ("*.rotary_emb.inv_freq",)


def load_params(
    source: TensorSource,
    targets: Mapping[Path, ParamSource],
    shapes: Mapping[Path, tuple[int, ...]],
    shardings: Mapping[Path, jax.sharding.Sharding],
    dtype: np.typing.DTypeLike | Mapping[Path, np.typing.DTypeLike],
    *,
    ignore: Collection[str] = (),
    progress: bool = False,
) -> dict[Path, jax.Array]:
    """Reads every target, in one dtype or each in its own. `ignore` holds names or patterns of tensors that may be left
    over (a tied `lm_head.weight`).

    Raises CheckpointError before anything is read if a tensor is missing, left over or of the wrong shape.
    """
    check_names(source, targets, ignore)
    for path, target in targets.items():
        check_shapes(source, target, shapes[path])
    dtypes = cast(Mapping[Path, Any], dtype) if isinstance(dtype, Mapping) else dict.fromkeys(targets, dtype)
    params = {}
    total = sum(math.prod(shapes[path]) for path in targets)
    with tqdm(total=total, unit=" params", unit_scale=True, desc="Loading weights", disable=not progress) as bar:
        for path, target in targets.items():
            params[path] = _load_param(source, target, shapes[path], shardings[path], np.dtype(dtypes[path]))
            bar.update(math.prod(shapes[path]))
    return params


def check_names(source: TensorSource, targets: Mapping[Path, ParamSource], ignore: Collection[str] = ()) -> None:
    """Nothing missing, nothing left over."""
    wanted = {name for target in targets.values() for name in target.names}
    present = set(source.names())
    if missing := sorted(wanted - present):
        raise CheckpointError(f"{source.location}: missing tensors: {some(missing)}; the config asks for them, so "
                              "check that config and weights belong together and are complete")  # fmt: skip
    patterns = (*IGNORED, *ignore)
    left_over = sorted(n for n in present - wanted if not any(fnmatch.fnmatchcase(n, p) for p in patterns))
    if left_over:
        raise CheckpointError(f"{source.location}: left-over tensors: {some(left_over)}; the model described by the "
                              "config has no place for them, so its output would be wrong")  # fmt: skip


def check_shapes(source: TensorSource, target: ParamSource, shape: tuple[int, ...]) -> None:
    """Each stored dimension must be one of the parameter's, or the product of neighbours."""
    leading, shape = _leading(target, shape)
    if math.prod(leading) != len(target.names):
        what = "layers" if target.experts is None else "tensors"
        raise CheckpointError(f"{source.location}: {len(target.names)} {what} for a stack of "
                              f"{' x '.join(map(str, leading))}")
    shape = _whole(target, shape)
    for name in target.names:
        stored = source.shape(name)
        if target.rows is not None and stored[:1] != (target.rows.total,):
            raise CheckpointError(f"{source.location}: {name} has shape {list(stored)}, the config asks for "
                                  f"{target.rows.total} rows; check that config and weights belong together")
        part = _part(stored, target)
        if _groups(part[::-1] if target.transpose else part, shape) is None:
            wanted = f"{list(shape)} (transposed)" if target.transpose else f"{list(shape)}"
            raise CheckpointError(
                f"{source.location}: {name} has shape {list(stored)}, the config asks for {wanted}; "
                "check that config and weights belong together"
            )


def _load_param(source: TensorSource, target: ParamSource, shape: tuple[int, ...],
                sharding: jax.sharding.Sharding, dtype: np.dtype) -> jax.Array:  # fmt: skip
    devices: dict[tuple[tuple[int, int], ...], list] = {}  # the distinct shards, and who holds each
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        index = index or (slice(None),) * len(shape)
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    shards = []
    for bounds, holders in devices.items():
        host = read_shard(source, target, shape, bounds, dtype)
        shards += [jax.device_put(host, device) for device in holders]
        if jax.default_backend() != "cpu":  # the copies run in the background: let them end before the next read
            jax.block_until_ready(shards)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def read_shard(source: TensorSource, target: ParamSource, shape: tuple[int, ...],
               bounds: tuple[tuple[int, int], ...], dtype: np.dtype) -> np.ndarray:  # fmt: skip
    """The part of a parameter between `bounds` (start, stop for each axis), in a new array."""
    out = np.empty([stop - start for start, stop in bounds], dtype)
    leading, one = _leading(target, shape)
    wanted = [range(*b) for b in bounds[: len(leading)]]  # layers; experts
    for at in itertools.product(*wanted):
        name = target.names[int(np.ravel_multi_index(at, leading)) if leading else 0]
        place = tuple(i - r.start for i, r in zip(at, wanted, strict=True))
        _fill(out[place], source, name, target, one, bounds[len(leading) :])
    return out


def _leading(target: ParamSource, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of layers and experts, and the shape of what one tensor makes."""
    count = target.stacked + (target.experts is not None)
    return shape[:count], shape[count:]


def _whole(target: ParamSource, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what the parameter is a part of."""
    part = target.part
    return shape if part is None else (*shape[: part.axis], part.total, *shape[part.axis + 1 :])


def _part(stored: tuple[int, ...], target: ParamSource) -> tuple[int, ...]:
    """The shape of the rows that are the target's."""
    return stored if target.rows is None else (target.rows.stop - target.rows.start, *stored[1:])


def _fill(out: np.ndarray, source: TensorSource, name: str, target: ParamSource, shape: tuple[int, ...],
          bounds: tuple[tuple[int, int], ...]) -> None:  # fmt: skip
    stored, transpose = _part(source.shape(name), target), target.transpose
    stored = stored[::-1] if transpose else stored
    shape = _whole(target, shape)
    groups = _groups(stored, shape)
    assert groups is not None, f"{name}: shapes were checked"
    box = [slice(*b) for b in bounds]
    if (of := target.part) is not None:
        start, stop = bounds[of.axis]
        box[of.axis] = slice(of.start + start * of.step, of.start + (stop - 1) * of.step + 1, of.step)
    index, cut, middle = [], [], []  # read `index` of the tensor, see it as `middle`, take `cut` of that
    for axes in groups:
        part, group_cut, group_shape = _slice_group([shape[a] for a in axes], [box[a] for a in axes])
        index.append(part)
        cut += group_cut
        middle += group_shape
    index = index[::-1] if transpose else index
    if target.rows is not None:
        first = range(target.rows.start, target.rows.stop)[index[0]]
        index[0] = slice(first.start, first.stop)
    # Cast before transposing: the strided copy then moves fewer bytes.
    values = source.read(name, tuple(index)).astype(out.dtype, copy=False)
    values = values.T if transpose else values
    out[...] = values.reshape(middle)[tuple(cut)]


def _groups(stored: tuple[int, ...], shape: tuple[int, ...]) -> list[range] | None:
    """For each stored dimension, the neighbouring parameter axes whose product it is; None when they do not match.
    (D, N*H) against (D, N, H): [0..1), [1..3)."""
    groups, axis = [], 0
    for size in stored:
        first, product = axis, 1
        while axis < len(shape) and (product < size or axis == first):
            product *= shape[axis]
            axis += 1
        if product != size:
            return None
        groups.append(range(first, axis))
    return groups if axis == len(shape) else None


def _slice_group(sizes: list[int], box: list[slice]) -> tuple[slice, list[slice], list[int]]:
    """One stored dimension that is a product of `sizes`, of which `box` is wanted: the slice to read, and
    how to cut the box out of it once it is reshaped.

    Rows of a box that is full in its last axes are neighbours: the slice is then exact. Otherwise the slice covers the
    first axis' range and the rest is cut.
    """
    if not sizes:
        return slice(None), [], []
    inner = math.prod(sizes[1:])
    start, stop = box[0].start, box[0].stop
    cut = [slice(None, None, box[0].step), *box[1:]]
    return slice(start * inner, stop * inner), cut, [stop - start, *sizes[1:]]
