"""The notebooks run from top to bottom on simulated devices; what they show is asserted in them. Git has no outputs."""

from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_the_notebooks_are_there():
    assert {"sharding", "planner", "serving"} <= {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path: Path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Jupyter's own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, monkeypatch: pytest.MonkeyPatch):
    from nbclient import NotebookClient  # takes a second

    monkeypatch.delenv("XLA_FLAGS")  # of the tests: a notebook that wants several devices asks for them
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=900, startup_timeout=300, kernel_name="python3",
                            resources={"metadata": {"path": str(ROOT)}})  # fmt: skip
    client.execute()  # raises what a cell raised
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in shown), "a picture is part of the point"
