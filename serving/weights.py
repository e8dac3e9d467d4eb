"""A checkpoint's parameters on a mesh, as a module's axes ask."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import jax
from flax import nnx

from checkpoints.load import load_params
from checkpoints.orbax_folder import restore_params
from checkpoints.tensors import ParamSource, TensorSource
from model.transformer import Path as ParamPath
from model.transformer import param_axes, param_dtypes
from sharding.copies import stored_layout, with_copies
from sharding.rules import Axes, AxisRules

SourcesOf = Callable[[Iterable[ParamPath]], Mapping[ParamPath, ParamSource]]


def read_params(
    module: nnx.Module, rules: AxisRules, source: TensorSource | Path, sources: SourcesOf, *,
    shape_of: Callable[[Axes, tuple[int, ...]], tuple[int, ...]] = lambda axes, shape: shape,
    ignore: Collection[str] = (), progress: bool = False,
) -> dict[ParamPath, jax.Array]:  # fmt: skip
    """Of every parameter. source: a path is an Orbax folder's. shape_of: what the checkpoint has of a parameter, where
    the module holds more. ignore: patterns of tensors that may be left over. Raises CheckpointError."""
    dtypes = param_dtypes(module)
    held = {path: (shape_of(names, shape), names) for path, (shape, names) in param_axes(module).items()}
    stored = {path: stored_layout(rules, names, shape) for path, (shape, names) in held.items()}
    shapes = {path: shape for path, (shape, _) in stored.items()}
    shardings = {path: sharding for path, (_, sharding) in stored.items()}
    if isinstance(source, Path):
        params = restore_params(source, shapes, shardings, dtypes)
    else:
        params = load_params(source, dict(sources(shapes)), shapes, shardings, dtypes, ignore=ignore,
                             progress=progress)  # fmt: skip
    return {path: with_copies(rules, names, shape, params[path]) for path, (shape, names) in held.items()}
