"""The tour in a sample user's home runs in a real notebook server's environment."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from hub.portal import Portal, until
from makeway_spawner.home import TOUR, home_of, prepare
from nbclient import NotebookClient


def test_homes_are_private_and_have_the_tour(tmp_path: Path) -> None:
    home = home_of(tmp_path, "ana")
    prepare(home)
    assert home == tmp_path / "ana"
    assert home.stat().st_mode & 0o777 == 0o700
    assert (home / "Welcome.ipynb").is_file()
    (home / "Welcome.ipynb").write_text("mine")
    prepare(home)
    assert (home / "Welcome.ipynb").read_text() == "mine"


@pytest.mark.parametrize("name", ["../../etc", "..", ".ssh", "a/b", "ä", "%2e"])
def test_no_name_leads_out_of_the_homes_or_into_anothers(tmp_path: Path, name: str) -> None:
    home = home_of(tmp_path, name)
    assert home.resolve().parent == tmp_path.resolve()
    assert home != home_of(tmp_path, name + "x")
    assert not home.name.startswith(".")


def alone(source: str) -> str:
    """Return the result of the tour's training without a job and without its pauses."""
    *lines, last = source.partition("\n")[2].replace("time.sleep(0.1)", "pass").splitlines()
    names = {"__name__": "__main__"}
    exec("\n".join([*lines, f"shown = {last}"]), names)
    return names["shown"]


def test_the_training_of_the_tour_learns() -> None:
    tour = nbformat.read(TOUR / "Welcome.ipynb", as_version=4)
    (source,) = (cell.source for cell in tour.cells if cell.source.startswith("%%train"))
    assert int(alone(source).split()[0]) >= 190


@pytest.mark.e2e
@pytest.mark.covers("N08", "N11")
def test_every_cell_of_the_tour_runs(portal: Portal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    portal.start_server("bo", profile="gpu1", team="devops")
    pid = portal.hub("GET", "/users/bo").json()["servers"][""]["state"]["pid"]
    for line in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"):
        name, _, value = line.partition("=")
        if name.startswith(("MAKEWAY_", "JUPYTERHUB_", "CUDA_")):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    tour = nbformat.read(TOUR / "Welcome.ipynb", as_version=4)
    NotebookClient(tour, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = "\n".join(str(cell.get("outputs")) for cell in tour.cells)
    assert alone(next(cell.source for cell in tour.cells if cell.source.startswith("%%train"))) in outputs
    assert "It saved step" in outputs
    assert 'role="progressbar"' in outputs, "the card has followed the training"
    assert os.environ["MAKEWAY_TEAM"] == "devops"
    portal.hub("DELETE", "/users/bo/server")
    until(lambda: not portal.server("bo"), "bo's notebook is gone")
