"""Who may import whom: the table of docs/design.md, enforced by reading the imports."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("sharding", "quant", "checkpoints", "pallas_kernels", "model", "serving")
OURS = (*PACKAGES, "serve", "scripts", "tests", "notebooks")

CONTRACTS = ("serving.errors", "serving.request", "serving.config")
ENGINE_CLIENT_SIDE = ("serving.engine.client", "serving.engine.*client*")

# Importer (the longest matching prefix counts) -> what it may import of ours beside itself, as patterns.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "sharding": (),
    "quant": (),
    "checkpoints": ("quant.*", "sharding.*"),
    "pallas_kernels": ("quant.*",),
    "model": ("pallas_kernels.*.api", "quant.*", "sharding.*", "checkpoints.tensors"),  # a contract: plain data
    "serving.errors": (),
    "serving.request": (),
    "serving.config": (*CONTRACTS, "serving.decoding.speculation.config"),
    "serving.decoding": (*CONTRACTS, "serving.engine.plan", "serving.tokenizer.*"),
    "serving.engine": (*CONTRACTS, "serving.kv.*", "serving.decoding.*"),
    "serving.kv": (*CONTRACTS, "serving.engine.*"),
    "serving.runner": (*CONTRACTS, "serving.engine.plan", "model.*", "pallas_kernels.*.api", "quant.*", "sharding.*",
                       "checkpoints.*"),
    "serving.tokenizer": (*CONTRACTS, "quant.*", "checkpoints.*"),
    "serving.validation": (*CONTRACTS, "serving.decoding.*"),
    "serving.metrics": (*CONTRACTS, "serving.expert_metrics"),
    "serving.expert_metrics": CONTRACTS,
    "serving.api": (*CONTRACTS, *ENGINE_CLIENT_SIDE, "serving.tokenizer.*", "serving.validation", "serving.metrics",
                    "serving.decoding.*"),
    "serving.distributed": (*CONTRACTS, "serving.engine.plan", "checkpoints.tensors"),
    "serving.distributed.join": (*CONTRACTS, "serving.distributed.*"),
    "serving.distributed.steps": (*CONTRACTS, "serving.distributed.*", "serving.engine.plan", "serving.runner.*"),
    "serving.distributed.runner": (*CONTRACTS, "serving.distributed.*", "serving.engine.plan", "serving.runner.*"),
    "serving.distributed.follower": ("serving.*",),
    "serving.flags": (*CONTRACTS, "serving.distributed.plan", "serving.decoding.*"),
    "serving.weights": ("model.transformer", "sharding.*", "checkpoints.*"),
    "serving.drafters": ("serving.*", "model.*", "pallas_kernels.*.api", "quant.*", "sharding.*", "checkpoints.*"),
    "serving.build": ("serving.*", "model.*", "pallas_kernels.*.api", "quant.*", "sharding.*", "checkpoints.*"),
    "serving.loading": ("serving.*", "model.*", "pallas_kernels.*.api", "quant.*", "sharding.*", "checkpoints.*"),
    "serving.report": ("serving.*", "model.*", "pallas_kernels.*.api", "quant.*", "sharding.*"),
    "serving.llm_inputs": (*CONTRACTS, "serving.tokenizer.*"),
    "serving.llm_options": (*CONTRACTS, "serving.decoding.speculation.config"),
    "serving.llm": ("serving.*", "checkpoints.default_model"),
    "serve": ("serving.*", "checkpoints.default_model", "checkpoints.errors"),  # and no jax: that is the core's
}
# Front ends and the scheduler start fast and stay light: jax is not loaded there, not even through others.
WITHOUT_JAX = ("serving.engine", "serving.kv", "serving.decoding", "serving.api", "serving.tokenizer",
               "serving.validation", "serving.metrics", "serving.flags", "serving.distributed.plan", "serve",
               *CONTRACTS)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files() -> list[Path]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [*files, *ROOT.glob("serve.py")]


def modules() -> dict[str, Path]:
    return {module_name(path): path for path in source_files()}


def imports(path: Path, known: set[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of each imported module, those inside functions too; `from a import b` is a.b if it is one."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if full in known else node.module


def unit_of(name: str, units: tuple[str, ...]) -> str | None:
    matches = [unit for unit in units if name == unit or name.startswith(unit + ".")]
    return max(matches, key=len, default=None)


def violations() -> Iterator[str]:
    known = modules()
    for name, path in known.items():
        where = path.relative_to(ROOT)
        unit = unit_of(name, tuple(MAY_IMPORT))
        if unit is None:
            if path.name != "__init__.py":
                yield f"{where}: no row of the table covers {name}"
            continue
        for line, target in imports(path, set(known)):
            top = target.split(".")[0]
            if top in ("torch", "transformers"):
                yield f"{where}:{line}: imports {target}, and the install is torch-free"
            if top not in OURS:
                continue
            if target in PACKAGES:
                yield f"{where}:{line}: imports {target} itself: import names from its submodules"
            elif unit_of(target, (unit,)) is None and not any(fnmatchcase(target, p) for p in MAY_IMPORT[unit]):
                yield f"{where}:{line}: {unit} may not import {target}"


def test_imports_follow_the_table():
    found = list(violations())
    assert not found, "\n".join(found)


def test_the_table_is_read_rightly(tmp_path: Path):
    file = tmp_path / "module.py"
    file.write_text("import os\nfrom serving.engine import client\ndef f():\n    from model.config import Spec\n")
    assert list(imports(file, {"serving.engine.client"})) == [
        (1, "os"), (2, "serving.engine.client"), (4, "model.config")]
    assert unit_of("serving.api.http.app", tuple(MAY_IMPORT)) == "serving.api"
    assert unit_of("serving_other", tuple(MAY_IMPORT)) is None


@pytest.mark.parametrize("package", WITHOUT_JAX)
def test_jax_is_not_loaded(package: str):
    names = [name for name in modules() if name == package or name.startswith(package + ".")]
    assert names, f"{package} has no modules"
    code = "import sys, importlib\n" + "".join(f"importlib.import_module({name!r})\n" for name in names)
    code += "print(sorted({n.split('.')[0] for n in sys.modules} & {'jax', 'jaxlib', 'flax', 'orbax'}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", f"importing {package} loads {done.stdout.strip()}"
