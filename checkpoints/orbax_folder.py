"""The native checkpoint: a folder with parameters as the model holds them (`params/`, Orbax), the model's `config.json`
and its tokenizer files. Restoring puts every device's shard where the target sharding wants it, so a checkpoint
written on one mesh opens on any other.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint as ocp

from checkpoints.errors import CheckpointError, some

ParamPath = tuple[str, ...]
PARAMS, CONFIG = "params", "config.json"


def check_new(folder: Path) -> None:
    """Raises CheckpointError unless a checkpoint can be written there without touching anything."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: is not an empty folder; name a new one")


def save_folder(
    folder: Path,
    params: Mapping[ParamPath, jax.Array],
    config: Mapping[str, Any],
    tokenizer_files: Mapping[str, bytes],
    *,
    beside: Mapping[str, Mapping[ParamPath, jax.Array]] = MappingProxyType({}),
) -> None:
    """Writes a new folder. `config` is a Hugging Face config, `tokenizer_files` name -> content, `beside` the name of
    a folder in this one -> parameters that are not the model's own."""
    folder = folder.expanduser().absolute()
    check_new(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ocp.StandardCheckpointer() as checkpointer:
            for name, values in {".": params, **beside}.items():
                checkpointer.save(folder / name / PARAMS, _nested(values))
        for name, content in tokenizer_files.items():
            (folder / name).write_bytes(content)
        # Last: a folder without a config is not taken for a model, so a broken-off save is noticed.
        (folder / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error}); name another folder") from error


def restore_params(
    folder: Path,
    shapes: Mapping[ParamPath, tuple[int, ...]],
    shardings: Mapping[ParamPath, jax.sharding.Sharding],
    dtype: np.typing.DTypeLike | Mapping[ParamPath, np.typing.DTypeLike],
) -> dict[ParamPath, jax.Array]:
    """Reads every parameter of `shapes`, in one dtype or each in its own, onto its sharding. Raises CheckpointError if
    one is missing, left over or of another shape, or if the folder is damaged."""
    location = (folder.expanduser() / PARAMS).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            metadata = checkpointer.metadata(location).item_metadata
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{location}: not an Orbax checkpoint ({error}); convert the model again") from error
        if metadata is None:  # Orbax logs why
            raise CheckpointError(f"{location}: not a whole Orbax checkpoint; convert the model again")
        stored = _flat(metadata.tree)
        _check(str(location), {path: tuple(meta.shape) for path, meta in stored.items()}, shapes)
        dtypes = cast(Mapping[ParamPath, Any], dtype) if isinstance(dtype, Mapping) else dict.fromkeys(shapes, dtype)
        wanted = {path: jax.ShapeDtypeStruct(shape, dtypes[path], sharding=shardings[path])
                  for path, shape in shapes.items()}  # fmt: skip
        try:
            return _flat(checkpointer.restore(location, _nested(wanted)))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{location}: cannot be restored ({error}); convert the model again") from error


def _check(
    location: str, stored: Mapping[ParamPath, tuple[int, ...]], shapes: Mapping[ParamPath, tuple[int, ...]]
) -> None:
    missing, left_over = sorted(shapes.keys() - stored.keys()), sorted(stored.keys() - shapes.keys())
    for what, paths in (("missing", missing), ("left-over", left_over)):
        if paths:
            names = some([".".join(path) for path in paths])
            raise CheckpointError(f"{location}: {what} parameters: {names}; convert the model again")
    for path, shape in shapes.items():
        if stored[path] != tuple(shape):
            raise CheckpointError(f"{location}: {'.'.join(path)} has shape {list(stored[path])}, the config asks for "
                                  f"{list(shape)}; convert the model again")  # fmt: skip


def _nested(flat: Mapping[ParamPath, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def _flat(tree: Mapping[str, Any], prefix: ParamPath = ()) -> dict[ParamPath, Any]:
    flat: dict[ParamPath, Any] = {}
    for key, value in tree.items():
        path = (*prefix, key)
        flat |= _flat(value, path) if isinstance(value, Mapping) else {path: value}
    return flat
