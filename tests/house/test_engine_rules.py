"""Every function that the page about the engine names exists, in the fast engine and in the reference engine."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ENGINE = "quota_service/makeway_quota/engine"
CELL = re.compile(r"`([a-z_/]+\.py)`: `(\w+)`")


def defined(file: Path) -> set[str]:
    """Return the names of the functions, methods and classes of a module."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_each_rule_names_a_function_of_both_engines(root: Path) -> None:
    page = (root / "docs/explanation/engine.md").read_text(encoding="utf-8")
    rows = [cells for line in page.splitlines() if len(cells := CELL.findall(line)) == 2]
    assert len(rows) > 20
    for fast, slow in rows:
        assert not fast[0].startswith("reference/"), fast
        assert slow[0].startswith("reference/"), slow
    missing = [f"{file}: {name}" for row in rows for file, name in row if name not in defined(root / ENGINE / file)]
    assert not missing


def test_the_modules_of_the_search_exist(root: Path) -> None:
    page = (root / "docs/explanation/engine.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:rules|cycle|index|placement|reference)/[\w/]+\.py)`", page))
    assert named
    assert not [name for name in sorted(named) if not (root / ENGINE / name).is_file()]
