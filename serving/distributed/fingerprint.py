"""What must be the same on all hosts, for each compiles its own programs and loads its own shards: name -> value."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from checkpoints.tensors import TensorSource
from serving.config import EngineConfig

PACKAGES = ("pageloom", "jax", "jaxlib", "flax", "libtpu")
OF_A_HOST = ("model", "tokenizer", "hosts", "compilation_cache_dir")  # paths and places: each host has its own
SAMPLES = 8  # tensors


def of_flags(config: EngineConfig) -> dict[str, str]:
    """And of versions. A drafter's path is a place, as the model's."""
    given = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in OF_A_HOST}
    if (speculative := config.speculative_config) is not None:
        given["speculative_config"] = {key: value for key, value in asdict(speculative).items() if key != "model"}
    flags = {f"--{name.replace('_', '-')}": str(value) for name, value in given.items()}
    return _short({name: _version(name) for name in PACKAGES} | flags)


def of_checkpoint(whose: str, config: Mapping[str, Any], source: TensorSource | None) -> dict[str, str]:
    """`source`: its tensors, where they can be read one by one."""
    entries = {f"{whose} {name}": json.dumps(value, sort_keys=True, default=str) for name, value in config.items()}
    if source is not None:
        names = sorted(source.names())
        shapes = json.dumps([(name, source.shape(name)) for name in names])
        entries[f"{whose} tensors' names and shapes"] = _digest(shapes.encode())
        entries[f"{whose} sampled weights"] = _sampled(source, names)
    return _short(entries)


def _short(entries: Mapping[str, str]) -> dict[str, str]:
    return {name: value if len(value) <= 80 else _digest(value.encode()) for name, value in entries.items()}


def _sampled(source: TensorSource, names: list[str]) -> str:
    """The first row of a few tensors: another fine-tuning of the same model is another model."""
    digest = hashlib.sha256()
    for name in names[:: max(len(names) // SAMPLES, 1)]:
        first = (slice(0, 1),) + (slice(None),) * (len(source.shape(name)) - 1)
        digest.update(source.read(name, first).tobytes())
    return digest.hexdigest()[:12]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
