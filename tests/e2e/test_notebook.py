"""The notebook runs from top to bottom and learns."""

from pathlib import Path

import nbformat
from launch import ROOT, environment
from nbclient import NotebookClient

NOTEBOOK = ROOT / "recipes" / "notebooks" / "quickstart.ipynb"


def test_the_notebook_runs(monkeypatch, tmp_path):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    texts = "\n".join(str(out.get("text", "")) + str(out.get("data", "")) for out in outputs)
    assert "image/png" in texts
    assert "84480 parameters" in texts
    last = [out["data"]["text/plain"] for out in outputs if "mean@1" in str(out.get("data", ""))]
    before, after = (float(eval(text)["eval/held_out/mean@1"]) for text in (last[0], last[-1]))
    assert before < 0.05 < after
    assert not list(Path(tmp_path).glob("runs")), "the notebook writes to its own folder"
