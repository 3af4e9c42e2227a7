"""The notebooks run from top to bottom, with their own Kafka and Spark, and have the documented results."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_S = 900


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a kernel with this interpreter."""
    directory = tmp_path / "jupyter" / "kernels" / "this-python"
    directory.mkdir(parents=True)
    argv = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    (directory / "kernel.json").write_text(f'{{"argv": {argv}, "display_name": "this", "language": "python"}}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return "this-python"


def printed(notebook: Any, containing: str) -> str:
    """The output of the only code cell that contains this text."""
    (cell,) = [c for c in notebook.cells if c.cell_type == "code" and containing in c.source]
    return "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)


def executed(name: str, kernel: str, folder: Path) -> Any:
    """A notebook after a run from top to bottom."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    NotebookClient(
        notebook, timeout=CELL_S, kernel_name=kernel, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return notebook


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(3 * CELL_S)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the notebook's client and its event loop
@pytest.mark.parametrize("remote", ["", pytest.param("local[2]", marks=pytest.mark.soak)], ids=["classic", "connect"])
def test_quickstart_reads_all_and_then_only_new_records(
    kernel: str, tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if remote:
        monkeypatch.setenv("SPARK_REMOTE", remote)
        monkeypatch.setenv("SPARK_TESTING", "1")  # any free port, instead of the one that two servers would share
    notebook = executed("quickstart", kernel, tmp_path)

    place = "through Spark Connect" if remote else "in this process"
    assert f"on this machine, {place}" in printed(notebook, "getOrCreate()")

    assert printed(notebook, "first_run = run()") == "300"
    assert "first run: 300 records, second run: 50" in printed(notebook, "second_run = run()")
    assert "350 rows, 350 different orders" in printed(notebook, "different = table()")
    described = printed(notebook, "describe(GROUP")
    assert described.startswith("lag 0\n") and "ledger" in described


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(3 * CELL_S)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the notebook's client and its event loop
def test_rebalance_notebook_reads_every_record_once(kernel: str, tmp_path: Path) -> None:
    notebook = executed("rebalance", kernel, tmp_path)

    output = printed(notebook, "each_once =")
    produced, by_spark, by_other = map(int, re.findall(r"\d+", output))
    assert produced == by_spark + by_other and by_other > 0 and "each once: True" in output, output
    assert "second" in printed(notebook, "second.subscribe") and "<svg" in (tmp_path / "rebalance.svg").read_text()


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(3 * CELL_S)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the notebook's client and its event loop
def test_changes_notebook_ends_with_the_rows_of_the_database(kernel: str, tmp_path: Path) -> None:
    notebook = executed("changes", kernel, tmp_path)
    for what in ("after the snapshot", "after the changes", "after the second time"):
        assert re.search(r": \d+ rows, equal to the database: True", printed(notebook, what)), what
    assert "20 rows" in printed(notebook, "after the snapshot")
    assert "operation t is not a change of a row" in printed(notebook, "after the second time")
    assert "<svg" in (tmp_path / "changes.svg").read_text()
