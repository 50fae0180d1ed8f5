"""Wherever the launcher is sent, every module that its modules import is sent with it."""

from __future__ import annotations

import ast
import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from makeway.launcher.copying import copy_launcher
from makeway_quota.agent_program import agent_program
from makeway_quota.backends.local.jobdir import Layout
from makeway_quota.backends.local.launch import install_launcher

ROOT = Path(__file__).parents[2]


def local_jobs(folder: Path) -> Path:
    """Return the launcher of jobs on the machine of the service."""
    layout = Layout(folder, shared=False)
    layout.make()
    return install_launcher(layout)


def pods(folder: Path) -> Path:
    """Return the launcher that a pod copies from the image of the service."""
    copy_launcher(str(folder / "makeway" / "launcher"))
    return folder / "makeway" / "launcher"


def machines(folder: Path) -> Path:
    """Return the launcher of `agent.pyz`, which containers of a machine get as a mount."""
    with zipfile.ZipFile(io.BytesIO(agent_program())) as archive:
        archive.extractall(folder)
    return folder / "makeway" / "launcher"


SHIPPED = [local_jobs, pods, machines]


def missing(launcher: Path) -> list[str]:
    """Return the imports of the launcher's folder, and of an agent beside it, whose module is not there."""
    agent = launcher.with_name("agent")
    files = [*launcher.rglob("*.py"), *(agent.rglob("*.py") if agent.is_dir() else ())]
    return sorted(f"{file.name}: {name}" for file in files for name in _missing_of(file, launcher))


def _missing_of(file: Path, launcher: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        words = node.module.split(".") if node.module else []
        if node.level:
            base = file.parents[node.level - 1]
        elif words[:1] == ["makeway"] and launcher / "library" in file.parents:
            base = launcher / "library"
        else:
            continue
        module = base.joinpath(*words)
        names = [module] if words and not module.is_dir() else [module / alias.name for alias in node.names]
        for path in names:
            if not (path.with_suffix(".py").is_file() or path.is_dir() or _defines(path.parent / "__init__.py", path)):
                yield ".".join(path.relative_to(base).parts)


def _defines(package: Path, name: Path) -> bool:
    """Whether a package itself has something of that name."""
    return package.is_file() and name.name in package.read_text(encoding="utf-8")


@pytest.mark.parametrize("ship", SHIPPED)
def test_each_launcher_has_what_its_modules_import(ship: Callable[[Path], Path], tmp_path: Path) -> None:
    launcher = ship(tmp_path)
    assert {path.name for path in launcher.glob("*.py")} == {
        path.name for path in (ROOT / "widgets/makeway/launcher").glob("*.py")
    }
    assert missing(launcher) == []


@pytest.mark.parametrize("ship", SHIPPED)
@pytest.mark.parametrize("name", ["record.py", "library/makeway/checkpointing"])
def test_a_module_that_is_left_out_is_found(ship: Callable[[Path], Path], name: str, tmp_path: Path) -> None:
    launcher = ship(tmp_path)
    (launcher / name).rename(tmp_path / "left-out")
    assert missing(launcher) != []
