"""The notebook of examples/ runs from top to bottom."""

import json
import re

import pytest
from support import ROOT

NOTEBOOK = ROOT / "examples" / "first_model.ipynb"


@pytest.mark.slow
@pytest.mark.real_interpreter
def test_the_notebook_runs_and_transcribes(tmp_path, monkeypatch):
    pytest.importorskip("espeakng_loader")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: make setup")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: make setup")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: make setup")
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=850, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    assert float(re.search(r"WER ([\d.]+) %", printed)[1]) < 60
    assert len(re.findall(r"^test-\d+-\w+\.flac: \w+.* \(\d+ %\)$", printed, re.MULTILINE)) == 5
    assert "9 of 9 stages had nothing to do" in printed


def test_the_notebook_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["execution_count"] is None and cell["outputs"] == [] for cell in code)
