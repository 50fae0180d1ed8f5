"""`from makeway import checkpoint` in scripts and commands, in Pythons without Makeway, and beside one that has it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from container import FOLDER, Container
from makeway_quota.backends.local.jobdir import Layout
from makeway_quota.backends.local.launch import install_launcher

PYTHON = [sys.executable, "-S"]
"""A Python without installed packages"""
USES = "from makeway import checkpoint; print(checkpoint.__file__, checkpoint.step_of(None))"


@pytest.fixture
def container(tmp_path: Path) -> Container:
    subprocess.run([*PYTHON, "-I", str(FOLDER), "--copy", str(tmp_path / "copy" / "launcher")], check=True)
    return Container(tmp_path, tmp_path / "copy" / "launcher")


def log(container: Container) -> str:
    return container.file("log").read_text()


COMMANDS = {
    "a command": [*PYTHON, "-c", USES],
    "a script": [*PYTHON, "train.py"],
    "a shell": ["sh", "-c", f"cd / && {sys.executable} -S -c '{USES}'"],
    "a process of a script": [
        *PYTHON,
        "-c",
        f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {USES!r}], check=True)",
    ],
    "a spawned worker": [*PYTHON, "spawns.py"],
}
SPAWNS = f"""
import multiprocessing
def work(): exec({USES!r})
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    worker = multiprocessing.Process(target=work)
    worker.start()
    worker.join()
    raise SystemExit(worker.exitcode)
"""


@pytest.mark.covers("N12")
@pytest.mark.parametrize("what", COMMANDS)
@pytest.mark.parametrize("place", ["copied", "in place"])
def test_a_python_without_makeway_has_the_library(container: Container, what: str, place: str) -> None:
    if place == "in place":
        container = Container(container.root)
    work = container.root / "job" / "work"
    work.mkdir(parents=True)
    (work / "train.py").write_text(USES)
    (work / "spawns.py").write_text(SPAWNS)
    assert container.run(*COMMANDS[what]) == 0, log(container)
    assert log(container).split()[1] == "0"
    own = container.root / "copy" / "launcher" / "library" if place == "copied" else FOLDER.parent
    assert Path(log(container).split()[0]).is_relative_to(own)


def test_an_installed_makeway_wins(container: Container, tmp_path: Path) -> None:
    """The folder of installed packages comes behind PYTHONPATH in the search path."""
    package = tmp_path / "site-packages" / "makeway"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VERSION = 'installed'\n")
    (package / "checkpoint.py").write_text("from . import VERSION\n")
    code = f"""
import sys
sys.path.append({str(package.parent)!r})
import makeway.checkpoint
print(makeway.VERSION, makeway.checkpoint.VERSION, makeway.__file__ == {str(package / "__init__.py")!r})
print(sys.modules["makeway"] is makeway)
"""
    assert container.run(*PYTHON, "-c", code) == 0, log(container)
    assert log(container) == "installed installed True\nTrue\n"


def test_a_folder_of_that_name_is_no_installed_makeway(container: Container, tmp_path: Path) -> None:
    (tmp_path / "site-packages" / "makeway").mkdir(parents=True)
    code = f"import sys; sys.path.append({str(tmp_path / 'site-packages')!r}); {USES}"
    assert container.run(*PYTHON, "-c", code) == 0, log(container)


def test_the_jobs_own_search_path_comes_first(container: Container) -> None:
    code = "import os; print(os.environ['PYTHONPATH'])"
    assert container.run(*PYTHON, "-c", code, env={"PYTHONPATH": "/mine:/other"}) == 0
    assert log(container).startswith("/mine:/other:/")
    assert log(container).strip().endswith("/copy/launcher/library")


def test_both_ways_to_install_a_launcher_copy_the_same(container: Container, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "state", shared=True)
    layout.make()
    trees = []
    for folder in (install_launcher(layout), tmp_path / "copy" / "launcher", tmp_path / "again"):
        if folder.name == "again":
            again = [*PYTHON, "-I", str(tmp_path / "copy" / "launcher"), "--copy", str(folder)]
            subprocess.run(again, check=True)
        files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        trees.append({str(path.relative_to(folder)): path.read_bytes() for path in files})
    assert trees[0] == trees[1] == trees[2]
    assert "library/makeway/checkpoint.py" in trees[0]
    closed = [path for path in layout.programs.rglob("*") if path.stat().st_mode & 0o044 != 0o044]
    assert not closed, "every account can read them"


@pytest.mark.parametrize(("given", "found"), [({}, "91"), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, "7")])
def test_torchrun_gives_its_ranks_the_whole_grace(container: Container, given: dict[str, str], found: str) -> None:
    """It reads whole seconds; the default of 30 s would kill ranks that still save."""
    code = "import json, os; print(json.dumps(os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT']))"
    assert container.run(*PYTHON, "-c", code, grace=90.5, env=given) == 0
    assert json.loads(log(container)) == found
