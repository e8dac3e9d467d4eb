"""A checkpoint's parameters on a mesh, as a module's axes ask."""

from collections.abc import Callable, Collection, Iterable, Mapping

import jax
from flax import nnx

from checkpoints.load import load_params
from checkpoints.open import Checkpoint
from checkpoints.orbax_folder import restore_params
from checkpoints.tensors import ParamSource
from model.transformer import Path, param_axes, param_dtypes
from sharding.copies import stored_layout, with_copies
from sharding.rules import Axes, AxisRules

SourcesOf = Callable[[Iterable[Path]], Mapping[Path, ParamSource]]


def read_params(
    module: nnx.Module, rules: AxisRules, checkpoint: Checkpoint, sources: SourcesOf, *,
    shape_of: Callable[[Axes, tuple[int, ...]], tuple[int, ...]] = lambda axes, shape: shape,
    ignore: Collection[str] = (), progress: bool = False,
) -> dict[Path, jax.Array]:  # fmt: skip
    """Of every parameter. shape_of: what the checkpoint has of one, where the module holds more. ignore: patterns of
    tensors that may be left over. Raises CheckpointError."""
    dtypes = param_dtypes(module)
    held = {path: (shape_of(names, shape), names) for path, (shape, names) in param_axes(module).items()}
    stored = {path: stored_layout(rules, names, shape) for path, (shape, names) in held.items()}
    shapes = {path: shape for path, (shape, _) in stored.items()}
    shardings = {path: sharding for path, (_, sharding) in stored.items()}
    if checkpoint.source is None:
        params = restore_params(checkpoint.path, shapes, shardings, dtypes)
    else:
        params = load_params(checkpoint.source, dict(sources(shapes)), shapes, shardings, dtypes, ignore=ignore,
                             progress=progress)  # fmt: skip
    return {path: with_copies(rules, names, shape, params[path]) for path, (shape, names) in held.items()}
