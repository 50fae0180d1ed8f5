"""The code is in the project's format, has no lint, its types hold and its layers are kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def passes(root: Path, *command: str) -> None:
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run([program, *command[1:]], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"


def test_format_is_the_projects(root: Path) -> None:
    passes(root, "ruff", "format", "--check", ".")


def test_style_has_no_complaints(root: Path) -> None:
    passes(root, "ruff", "check", ".")


def test_layers_are_kept(root: Path) -> None:
    passes(root, "lint-imports", "--no-cache")


def test_templates_have_no_complaints(root: Path) -> None:
    folders = ["quota_service/makeway_quota/web/templates", "hub_config/makeway_hub/templates"]
    there = [folder for folder in folders if (root / folder).is_dir()]
    assert there
    passes(root, "djlint", "--lint", "--quiet", *there)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("types")  # the second run uses the cache of the first
@pytest.mark.parametrize(
    "what", [(), ("scripts", "hatch_build.py", "benchmarks", "kube_cluster")], ids=["packages", "house"]
)
def test_types_hold(root: Path, what: tuple[str, ...]) -> None:
    passes(root, "mypy", *what)
