"""Finds out what a model path holds and opens it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from checkpoints.errors import CheckpointError
from checkpoints.gguf_config import hf_config
from checkpoints.gguf_source import GGUFSource
from checkpoints.safetensors_source import INDEX, SafetensorsSource
from checkpoints.tensors import TensorSource

# One of these says what a config is of. The last two: drafters', which are published without a model_type.
_KINDS = {"model_type", "medusa_num_heads", "speculators_model_type"}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened model.

    config: as in a Hugging Face `config.json`, whatever the format.
    source: its tensors; None for an Orbax folder, which is restored whole (see `orbax_folder`).
    """

    path: Path
    kind: Literal["gguf", "hf", "orbax"]
    config: dict[str, Any]
    source: TensorSource | None

    def close(self) -> None:
        if self.source is not None:
            self.source.close()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A GGUF file, a Hugging Face folder with safetensors, or an Orbax folder made by `scripts.convert`.
    Raises CheckpointError."""
    path = Path(path).expanduser()
    if path.is_file():
        return _open_file(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder; pass a GGUF file, a Hugging Face or an Orbax folder")
    if not (path / "config.json").exists():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"pass the file itself, {ggufs[0]}" if ggufs else "a model folder has config.json and *.safetensors"
        raise CheckpointError(f"{path}: no config.json in this folder; {hint}")
    config = _read_config(path / "config.json")
    if (path / "params").is_dir():
        return Checkpoint(path=path, kind="orbax", config=config, source=None)
    if not (path / INDEX).exists() and not any(path.glob("*.safetensors")):
        found = "only PyTorch .bin files; save the model as safetensors" if any(path.glob("*.bin")) else "no weights"
        raise CheckpointError(f"{path}: {found} (expected *.safetensors or params/)")
    return Checkpoint(path=path, kind="hf", config=config, source=SafetensorsSource(path))


def _open_file(path: Path) -> Checkpoint:
    if path.suffix in (".safetensors", ".json"):
        raise CheckpointError(f"{path}: pass the folder {path.parent}, not one of its files")
    source = GGUFSource(path)
    return Checkpoint(path=path, kind="gguf", config=hf_config(source.file, str(path)), source=source)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(config, dict) or not config.keys() & _KINDS:
        raise CheckpointError(f"{file}: has no model_type; it is not a model's config")
    return config
