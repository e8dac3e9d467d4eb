"""What must be the same on all hosts, for each compiles its own programs and loads its own shards: name -> value."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from checkpoints.tensors import TensorSource
from serving.config import EngineConfig

PACKAGES = ("pageloom", "jax", "jaxlib", "flax", "libtpu")
OF_A_HOST = ("model", "tokenizer", "hosts", "compilation_cache_dir")  # paths and places: each host has its own
SAMPLES = 8  # tensors


def fingerprint(config: EngineConfig, model: Mapping[str, Any], source: TensorSource | None) -> dict[str, str]:
    """`model`: the checkpoint's config. `source`: its tensors, where they can be read one by one."""
    entries = {name: _version(name) for name in PACKAGES}
    entries |= {
        f"--{field.name.replace('_', '-')}": str(getattr(config, field.name))
        for field in fields(config)
        if field.name not in OF_A_HOST
    }
    entries |= {f"the model's {name}": json.dumps(value, sort_keys=True, default=str) for name, value in model.items()}
    if source is not None:
        names = sorted(source.names())
        shapes = json.dumps([(name, source.shape(name)) for name in names])
        entries["the names and shapes of tensors"] = _digest(shapes.encode())
        entries["sampled weights"] = _sampled(source, names)
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
