"""Finds the tokenizer of a model path. Imports no jax: front ends load tokenizers too."""

from pathlib import Path

from serving.errors import ConfigError
from serving.tokenizer.folder import load_folder
from serving.tokenizer.gguf import load_gguf
from serving.tokenizer.tokenizer import Tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a GGUF file, a Hugging Face folder, an Orbax folder, or one of a folder's tokenizer files.
    Raises ConfigError."""
    path = Path(path).expanduser()
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; the tokenizer is a GGUF file or a model folder")
    try:
        if path.is_dir():
            return load_folder(path)
        if path.name in ("tokenizer.json", "tokenizer.model"):
            return load_folder(path.parent)
        return load_gguf(path)
    except ConfigError:
        raise
    except Exception as error:  # a damaged file fails in any way; the tokenizers library raises plain Exception
        raise ConfigError(f"{path}: the tokenizer is damaged ({error!r}); pass --tokenizer") from error
