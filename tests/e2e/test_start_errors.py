"""Whatever keeps the service from starting as asked: exit code 2 and one line that names the value and the rule."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from serve import main
from tests.e2e.servers import NONE, Process, serve
from tests.e2e.tiny_model import DIM, tensors, write_tiny_model


def refusal(folder: Path, *flags: str, variables: Mapping[str, str] = NONE) -> str:
    """The line that it prints."""
    with Process(serve("--port", "0", *flags), folder / "log", variables) as process:
        assert process.wait(120) == 2, process.log
        return only_line(process.log)


def only_line(log: str) -> str:
    lines = [line for line in log.replace("\r", "\n").splitlines() if line and "Loading weights" not in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("pageloom: ")
    return lines[0]


FLAGS = {
    ("--port", "many"): ("--port", "many"),
    ("--port", "70000"): ("70000", "--port"),
    ("--dtype", "float12"): ("float12", "bfloat16"),
    ("--max-model-len", "-5"): ("-5", "--max-model-len", "at least 1"),
    ("--max-num-seqs", "0"): ("0", "--max-num-seqs"),
    ("--num-pages", "-1"): ("-1", "--num-pages"),
    ("--gpu-memory-utilization", "1.5"): ("1.5", "--gpu-memory-utilization"),
    ("--max-num-batched-tokens", "4", "--max-num-seqs", "8"): ("--max-num-batched-tokens", "4", "8"),
    ("--api-key", "one", "--api-key", ""): ("--api-key has 0 characters", "at least one character"),
    ("--api-key", "cl\u00e9"): ("--api-key has 3 characters", "ASCII"),  # clients refuse to send it
    ("--admin-api-key", "key\n"): ("--admin-api-key has 4 characters", "printable ASCII"),
    ("--mesh", "2x1", "--tensor-parallel-size", "2"): ("--mesh", "--tensor-parallel-size"),
}

LATER = {
    ("--flavour", "vanilla"): ("--flavour", "--help"),
    ("--chat-template", "/no/such/template"): ("/no/such/template: No such file", "must be a Jinja file"),
    ("--model", "/no/such/model.gguf"): ("/no/such/model.gguf", "--model"),
    ("--tokenizer", "/no/such/tokenizer"): ("/no/such/tokenizer",),
}


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_flags(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Refused before there is anything to start: `main` in this process says it too."""
    monkeypatch.setattr("sys.argv", ["serve", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    line = only_line(capfd.readouterr().err)
    assert ended.value.code == 2
    for part in FLAGS[flags]:
        assert part in line


@pytest.mark.parametrize("flags", LATER, ids=" ".join)
def test_what_flags_name(flags: tuple[str, ...], tmp_path: Path):
    line = refusal(tmp_path, *flags)
    for part in LATER[flags]:
        assert part in line


# The others are in tests/sharding/test_mesh.py.
MESHES = {"3x3": ("9 devices", "has 1"), "tp=2": ("'tp'", "tensor"), "pipeline=2": ("2 devices", "data=1")}


@pytest.mark.parametrize("mesh", MESHES)
def test_meshes(mesh: str, tmp_path: Path):
    line = refusal(tmp_path, "--mesh", mesh)
    for part in MESHES[mesh]:
        assert part in line


def test_a_mesh_that_divides_nothing(tmp_path: Path, tiny_flags: tuple[str, ...]):
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=5"}
    line = refusal(tmp_path, *tiny_flags, "--mesh", "5x1", variables=devices)
    assert "tensor=5" in line and "4 heads with 2 kv heads" in line and "tensor=2 or 4" in line


def _not_a_model(folder: Path) -> Path:
    path = folder / "notes.gguf"
    path.write_text("These are notes, not weights.\n" * 10)
    return path


def _cut_off(folder: Path) -> Path:
    path = write_tiny_model(folder / "model")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return path


def _without_config(folder: Path) -> Path:
    path = write_tiny_model(folder / "model")
    (path / "config.json").unlink()
    return path


def _without(name: str) -> Callable[[Path], Path]:
    kept = {other: value for other, value in tensors().items() if other != name}
    return lambda folder: write_tiny_model(folder / "model", kept)


def _with(name: str, size: int) -> Callable[[Path], Path]:
    return lambda folder: write_tiny_model(folder / "model", {**tensors(), name: np.ones(size, np.float32)})


def _empty(folder: Path) -> Path:
    (folder / "model").mkdir()
    return folder / "model"


MODELS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "not a model": (_not_a_model, ("notes.gguf",)),
    "an empty folder": (_empty, ("model",)),
    "no config": (_without_config, ("config.json",)),
    "a file cut off": (_cut_off, ("model.safetensors",)),
    "an unknown architecture": (
        lambda folder: write_tiny_model(folder / "model", architectures=["PancakeForCausalLM"], model_type="pancake"),
        ("ancake",),
    ),
    "a missing tensor": (_without("model.layers.1.mlp.up_proj.weight"), ("model.layers.1.mlp.up_proj.weight",)),
    "a tensor too many": (_with("model.pancake.weight", 3), ("model.pancake.weight",)),
    "a wrong shape": (_with("model.norm.weight", DIM + 1), ("model.norm.weight", str(DIM + 1))),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_models(case: str, tmp_path: Path, tiny_flags: tuple[str, ...]):
    make, parts = MODELS[case]
    line = refusal(tmp_path, *tiny_flags, "--model", str(make(tmp_path)))
    for part in parts:
        assert part in line


def test_a_model_without_a_tokenizer(tmp_path: Path, tiny_flags: tuple[str, ...]):
    assert "--tokenizer" in refusal(tmp_path, "--model", tiny_flags[1], "--max-num-seqs", "2", "--num-pages", "64",
                                    "--max-num-batched-tokens", "64")  # fmt: skip


def test_a_context_beyond_the_models(tmp_path: Path, tiny_flags: tuple[str, ...]):
    line = refusal(tmp_path, *tiny_flags, "--max-model-len", "4097")
    assert "4097" in line and "4096" in line


def test_a_config_that_is_not_json(tmp_path: Path, tiny_flags: tuple[str, ...]):
    folder = tmp_path / "model"
    shutil.copytree(tiny_flags[1], folder)
    (folder / "config.json").write_text(json.dumps({"a": 1})[:-1])
    assert "config.json" in refusal(tmp_path, *tiny_flags, "--model", str(folder))
