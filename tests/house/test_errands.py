"""The ten errands of a newcomer: each row of CONTRIBUTING leads to what it promises, and opens few files."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICE = "quota_service/makeway_quota/"
MAX_FILES = 3
"""Files that are opened for an errand, CONTRIBUTING.md included"""
POINTER = re.compile(r"`(?P<path>[\w./]+\.(?:py|md))`(?:: (?P<names>`[^`]+`(?:, `[^`]+`)*))?")
ARROWS = re.compile(r"(?<![\w/.])([a-z_]+(?:/[\w.]+)*/[\w]+\.py)\b")


class Pointer(NamedTuple):
    """A file that an errand opens, and the names that are looked for in it."""

    path: Path
    names: tuple[str, ...]


def section(file: Path, title: str) -> str:
    result = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", file.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert result, title
    return result[1]


def errands() -> dict[str, list[Pointer]]:
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", section(ROOT / "CONTRIBUTING.md", "Ten errands"), re.MULTILINE)[1:]
    return {
        errand: [
            Pointer(placed(result["path"]), tuple(re.findall(r"`([^`]+)`", result["names"] or "")))
            for result in POINTER.finditer(pointers)
        ]
        for errand, pointers in rows
    }


def placed(path: str) -> Path:
    """Return the file of a path in the documentation, which may leave out the service's folder."""
    return next((file for file in (ROOT / path, ROOT / SERVICE / path) if file.is_file()), ROOT / path)


def defined(file: Path) -> set[str]:
    """Return what a page has as headings, or what a module defines."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return set(re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("errand", errands())
def test_an_errand_opens_few_files_and_finds_what_it_looks_for(errand: str) -> None:
    pointers = errands()[errand]
    assert 1 <= len({pointer.path for pointer in pointers} | {ROOT / "CONTRIBUTING.md"}) <= MAX_FILES
    assert pointers
    for path, names in pointers:
        assert path.is_file(), path
        assert not set(names) - defined(path), path


def test_there_are_ten_errands_and_the_recipes_are_five() -> None:
    assert len(errands()) == 10
    recipes = re.findall(r"^\*\*(.+?)\.\*\*", section(ROOT / "CONTRIBUTING.md", "Recipes"), re.MULTILINE)
    assert recipes == ["A setting", "A column", "A reason code", "A backend", "An option of a magic"]


@pytest.mark.parametrize("title", ["The life of a job", "The life of a notice"])
def test_every_hop_of_the_drawings_is_a_module_that_exists(title: str) -> None:
    named = ARROWS.findall(section(ROOT / "docs/explanation/architecture.md", title))
    assert len(named) > 8
    below = (ROOT, ROOT / SERVICE, ROOT / "widgets/makeway")
    assert not [path for path in named if not any((folder / path).is_file() for folder in below)]


def test_the_drawing_of_a_notice_names_each_module_that_hands_it_on() -> None:
    """From the decision to the training: where `Notice`, or what it becomes, passes from one module to the next."""
    drawn = section(ROOT / "docs/explanation/architecture.md", "The life of a notice")
    hops = {"control/actuate.py", "control/transitions.py", "services/jobs/attempts.py", "backends/local/attempts.py"}
    assert not {hop for hop in hops if "otice" not in (ROOT / SERVICE / hop).read_text(encoding="utf-8")}
    assert not {hop for hop in hops if hop not in drawn}
