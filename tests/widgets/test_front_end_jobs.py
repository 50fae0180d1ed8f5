"""Cells become jobs, and logs are printed, in front ends without a browser."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from makeway_api.client import Client

from .conftest import Portal, cleaned

CELLS = (
    "%load_ext makeway",
    "data = [1, 2, 3]",
    "%%train --profile gpu1 --name 'sum' --with data\nprint('in the job')\nsum(data)",
    "job = _\njob.wait()\nprint('the result is', job.result())",
    "%logs",
)


@pytest.fixture
def service(portal: Portal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Client]:
    for name in [name for name in os.environ if name.startswith(("MAKEWAY_", "JPY_", "JUPYTER"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MAKEWAY_URL", portal.url)
    monkeypatch.setenv("MAKEWAY_TOKEN", "ana")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    with cleaned(portal, "ana") as client:
        yield client


def notebook() -> nbformat.NotebookNode:
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python", "language": "python"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=kernel)


def text(run: nbformat.NotebookNode) -> str:
    return "".join(
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for cell in run.cells
        for output in cell.get("outputs", ())
    )


def shows_everything(out: str) -> None:
    assert "Job j-" in out
    assert "sum" in out
    assert ": succeeded after" in out
    assert "the result is 6" in out
    assert "in the job\n" in out


@pytest.mark.slow
@pytest.mark.covers("N08", "N09")
def test_nbclient(service: Client) -> None:
    import nbclient

    shows_everything(text(nbclient.NotebookClient(notebook(), timeout=120).execute()))


@pytest.mark.slow
@pytest.mark.covers("N08", "N09")
@pytest.mark.filterwarnings("ignore")  # papermill's own
def test_papermill(service: Client, tmp_path: Path) -> None:
    import papermill

    wanted = notebook()
    wanted.cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(wanted, tmp_path / "in.ipynb")
    ran = papermill.execute_notebook(
        str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb"), {"data": [1, 2, 3]}, progress_bar=False
    )
    shows_everything(text(ran))
    saved = (tmp_path / "out.ipynb").read_text()
    assert "the result is 6" in saved


@pytest.mark.slow
@pytest.mark.covers("N08", "N09")
def test_ipython_in_a_terminal(service: Client) -> None:
    keys = "".join(f"{cell}\n\n\n" if cell.startswith("%%") else f"{cell}\n" for cell in CELLS)
    command = [sys.executable, "-m", "IPython", "--simple-prompt", "--colors=NoColor", "--no-confirm-exit"]
    done = subprocess.run(command, input=keys + "exit\n", capture_output=True, text=True, timeout=120, check=True)
    shows_everything(done.stdout)
    assert "\x1b[" not in done.stdout
