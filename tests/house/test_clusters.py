"""The table of kinds of clusters says of each how it is known: by tests that exist, or that it was not tried."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

POINTER = re.compile(r"`(tests/[\w./-]+?)(?:::(\w+))?`")
STATES = ("tested", "imitated", "not tried")


def rows(root: Path) -> list[list[str]]:
    """Return the cells of the table's lines: kind, state, what to know before."""
    text = (root / "docs/how-to/kinds-of-clusters.md").read_text(encoding="utf-8")
    table = text[text.index("| kind | state |") :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def wrong(cells: list[str], root: Path) -> str:
    """Return what is wrong with a line, empty for nothing."""
    if len(cells) != 3:
        return "it has no three cells"
    state = cells[1].lower()
    if not state.startswith(STATES):
        return f"it begins with none of {STATES}"
    pointers = POINTER.findall(cells[1])
    if state.startswith("not tried"):
        return "it names a test all the same" if pointers and "imitat" not in state and "render" not in state else ""
    if not pointers:
        return "it names no test"
    for path, name in pointers:
        file = root / path
        if not file.exists():
            return f"there is no {path}"
        if name and f"def {name}(" not in file.read_text(encoding="utf-8"):
            return f"there is no {name} in {path}"
        files = [file] if file.is_file() else [*file.rglob("test_*.py")]
        if state.startswith("tested") and path.startswith("tests/kube") and not any(map(on_kubernetes, files)):
            return f"{path} runs on no Kubernetes"
    return ""


def on_kubernetes(file: Path) -> bool:
    """Whether the tests of a file run on a Kubernetes cluster."""
    return "pytest.mark.kube" in file.read_text(encoding="utf-8")


def test_each_kind_of_cluster_names_its_tests_or_says_that_it_was_not_tried(root: Path) -> None:
    result = {cells[0]: mistake for cells in rows(root) if (mistake := wrong(cells, root))}
    assert not result
    assert len(rows(root)) > 15


@pytest.mark.parametrize(
    ("state", "mistake"),
    [
        ("tested", "it names no test"),
        ("tested: `tests/kube/test_nothing.py`", "there is no tests/kube/test_nothing.py"),
        ("tested: `tests/kube/test_node.py::test_nothing`", "there is no test_nothing in tests/kube/test_node.py"),
        ("tested: `tests/kube/imitated_site.py`", "tests/kube/imitated_site.py runs on no Kubernetes"),
        ("works", "it begins with none of"),
        ("not tried: `tests/kube/test_node.py`", "it names a test all the same"),
        ("not tried", ""),
        ("tested: `tests/kube/test_node.py`", ""),
    ],
)
def test_what_is_wrong_with_a_line_is_seen(root: Path, state: str, mistake: str) -> None:
    assert wrong(["kind", state, ""], root).startswith(mistake) is True
    assert bool(wrong(["kind", state, ""], root)) == bool(mistake)
