"""The planner as a program: what it answers, and what it says to what it cannot plan."""

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.plan import main
from scripts.planning.compiling import compiler_devices
from scripts.planning.topology import PlanError, parse_topology

CONFIGS = Path(__file__).parents[2] / "scripts" / "planning" / "configs"
GOLDENS = Path(__file__).parents[1] / "goldens"
LLAMA = str(CONFIGS / "llama-3-8b.json")


@pytest.fixture(autouse=True)
def keep_environment() -> Iterator[None]:
    """The program sets variables for jax, which later tests' processes would inherit."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def plan(tmp_path: Path, *arguments: str) -> dict:
    found = tmp_path / "plan.json"
    assert main([*arguments, "--json", str(found)]) == 0
    return json.loads(found.read_text())


@pytest.mark.parametrize("arguments, message", [
    (("--topology", "v8:2x4"), "unknown kind 'v8'; known: v5e:2x4, v6e:2x4"),
    (("--topology", "v6e:2x4", "--mesh", "4x1"), "has 4 devices, v6e:2x4 has 8; --mesh 8x1, 4x2, 2x4, 1x8"),
    (("--topology", "v6e:2x4", "--mesh", "rows=8"), "unknown axis 'rows'"),
    (("--topology", "v6e:2x4", "--mesh", "8x1", "--enable-expert-parallel"), "this model has no experts"),
    (("--topology", "v6e:2x4", "--mesh", "pipeline=8"), "the planner knows tensor and data"),
    (("--topology", "v6e:2x4", "--max-model-len", "9000"), "--max-model-len 9000 must be in 1 to 8192"),
    (("--topology", "v6e:2x4", "--context", "0"), "--context 0 must be in 1 to 8192"),
    (("--topology", "v6e:2x4", "--batches", "1,x"), "must be numbers from 1"),
    (("--topology", "v6e:2x4", "--max-num-seqs", "4096"), "must be in 1 to --max-num-batched-tokens 2048"),
    (("--topology", "v6e:2x4", "--gpu-memory-utilization", "2"), "must be in (0, 1]"),
    (("--topology", "v6e:2x4", "--compile", "-1"), "--compile -1 must be at least 0"),
    (("--topology", "v6e:2x4", "--block-size", "0"), "--block-size 0 must be at least 1"),
    (("--topology", "v6e:2x4", "--json", "/no/plan.json"), "--json /no/plan.json: no file can be written there"),
    (("--topology", "v6e:2x4", "--plot", "plan.foo"), "--plot plan.foo must end with .png"),
])  # fmt: skip
def test_what_cannot_be_planned(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture):
    assert main(["--model", LLAMA, "--compile", "0", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_models_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture):
    broken, odd = tmp_path / "config.json", tmp_path / "odd.json"
    broken.write_text("{")
    (listed := tmp_path / "listed.json").write_text("[]")
    odd.write_text(json.dumps({**json.loads(Path(LLAMA).read_text()), "sparkle": 3}))
    for path, message in ((tmp_path / "none", "give a Hugging Face config.json"), (tmp_path, "is not JSON"),
                          (odd, "sparkle"), (listed, "is no JSON object")):  # fmt: skip
        assert main(["--model", str(path), "--topology", "v6e:2x4"]) == 2
        assert message in capsys.readouterr().err


def test_meshes_are_ranked_by_formula(tmp_path: Path, capsys: pytest.CaptureFixture):
    picture = tmp_path / "plan.png"
    found = plan(tmp_path, "--model", LLAMA, "--topology", "v6e:2x4", "--compile", "0", "--plot", str(picture))
    assert picture.read_bytes()[:4] == b"\x89PNG"
    text = capsys.readouterr().out
    assert "tensor=4,data=2" in text and "All-reduce".lower() in text and "KV cache" in text
    speeds = [max(point["tokens_per_second"] for point in mesh["points"]) for mesh in found["meshes"]]
    assert speeds == sorted(speeds, reverse=True) and len(speeds) == 4
    for mesh in found["meshes"]:
        assert sum(mesh["bytes"][kind] for kind in ("weights", "state", "temporaries", "kv")) <= mesh["bytes"]["usable"]
    alone = plan(tmp_path, "--model", LLAMA, "--topology", "v6e:2x4", "--compile", "0", "--rank", "latency")
    assert alone["meshes"][0]["mesh"] == {"tensor": 8, "data": 1}
    five = plan(tmp_path, "--model", LLAMA, "--topology", "h200:1x1x5", "--compile", "0")  # no part of it in five
    assert [mesh["mesh"] for mesh in five["meshes"]] == [{"tensor": 1, "data": 5}]


def test_a_model_that_is_too_large(tmp_path: Path, capsys: pytest.CaptureFixture):
    model = str(CONFIGS / "llama-3-70b.json")
    found = plan(tmp_path, "--model", model, "--topology", "v5e:2x4", "--plot", str(tmp_path / "plan.png"))
    assert not any(mesh["fits"] for mesh in found["meshes"])
    text = capsys.readouterr().out
    assert "no mesh of v5e:2x4 holds it" in text and "16 such devices" in text


def test_a_gpu_without_its_compiler_says_what_to_install():
    try:
        compiler_devices(parse_topology("h200:1x1x8"))
    except PlanError as error:
        assert "pip install -e '.[cuda]'" in str(error) and "--compile 0" in str(error)


@pytest.mark.slow
def test_simulated_devices(tmp_path: Path):
    """The compiler's products are the formula's, but for what attention in XLA multiplies."""
    found = plan(tmp_path, "--model", str(GOLDENS / "llama-gqa-tied"), "--topology", "cpu:8", "--mesh", "2x4",
                 "--dtype", "float32", "--max-num-seqs", "4", "--max-num-batched-tokens", "16")  # fmt: skip
    (mesh,) = found["meshes"]
    decode = mesh["compiled"]["decode"]
    sums = {(one["kind"], one["devices"], one["bytes"]): one["times"] for one in decode["collectives"]}
    assert sums["all-reduce", 2, 4 * 40 * 4] == 2 * 3 + 1
    assert mesh["fits"] and mesh["bytes"]["temporaries"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("libtpu"), reason="libtpu is not installed")
def test_an_absent_tpu(tmp_path: Path):
    """One small model of four layers: products, collectives and the kernels' estimates are the formula's."""
    hidden, heads, width, layers, vocab = 512, 4, 1024, 4, 1024
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        **json.loads(Path(LLAMA).read_text()), "hidden_size": hidden, "intermediate_size": width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 2, "vocab_size": vocab,
        "max_position_embeddings": 2048,
    }))  # fmt: skip
    found = plan(tmp_path, "--model", str(config), "--topology", "v6e:2x4", "--mesh", "2x4", "--max-num-seqs", "16",
                 "--max-num-batched-tokens", "64")  # fmt: skip
    (mesh,) = found["meshes"]
    decode, prefill = mesh["compiled"]["decode"], mesh["compiled"]["prefill"]
    numbers = layers * (hidden * (4 + 2 + 2) * 128 + 4 * 128 * hidden + 3 * hidden * width) // 2
    assert decode["flops"] == 2 * 16 * (numbers + vocab * hidden // 2)
    assert prefill["flops"] == 2 * (64 * numbers + 16 * vocab * hidden // 2)
    assert numbers * 2 < decode["bytes"] < numbers * 2 * 1.5
    sums = {(one["kind"], one["devices"]): one["times"] for one in decode["collectives"] if one["bytes"] > 1000}
    assert sums == {("all-reduce", 2): 2 * layers + 1}
    # The kernel's estimate is of rows of half the longest length.
    (kernel,) = decode["kernels"]
    assert kernel["times"] == layers
    assert kernel["flops"] == 2 * 4 * 128 * 16 * 1024
    assert kernel["bytes"] == 2 * 1 * 128 * 2 * 16 * 1024
