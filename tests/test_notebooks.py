"""Every notebook runs top to bottom without stderr, and is stored without outputs."""

import json
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
LONG = ["02_your_own_model", "04_pipelines", "05_axes", "06_hosts", "07_command_line", "10_plans"]

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem in LONG), id=path.stem) for path in NOTEBOOKS],
)
def test_runs(path, tmp_path, monkeypatch):
    # Jupyter writes to the temporary folder only, and finds no kernel but this Python's.
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]


@every_notebook
def test_is_clean(path):
    text = path.read_text()
    notebook = json.loads(text)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not [cell["source"] for cell in code if cell["outputs"] or cell["execution_count"] is not None]
    assert text.isascii()


@every_notebook
def test_begins_with_what_the_reader_can_do(path):
    first = json.loads(path.read_text())["cells"][0]
    assert first["cell_type"] == "markdown"
    assert "you can" in "".join(first["source"])
