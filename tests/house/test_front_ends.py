"""The table of front ends names for each of them tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

POINTER = re.compile(r"`(tests/[\w./-]+?)(?:::(\w+)(?:\[([^\]]+)\])?)?`")
FRONT_ENDS = (
    *(
        "JupyterLab",
        "Notebook 7",
        "nbclassic",
        "Voilà",
        "papermill",
        "nbclient",
        "HTML",
        "sanitized",
        "Markdown",
        "LaTeX",
    ),
    *("script", "untrusted", "jupyter-collaboration", "IPython in a terminal"),
)


def rows(root: Path) -> list[list[str]]:
    """Return the cells of the table's lines: front end, what is seen there, tests."""
    text = (root / "docs/reference/notebook.md").read_text(encoding="utf-8")
    table = text[text.index("| front end |") :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def wrong(tests: str, root: Path) -> str:
    """Return what is wrong with the tests that a line names, empty for nothing."""
    pointers = POINTER.findall(tests)
    if not pointers:
        return "it names no test"
    if rest := POINTER.sub("", tests).replace(",", "").strip():
        return f"it names something else than tests: {rest}"
    for path, name, case in pointers:
        if not (root / path).is_file():
            return f"there is no {path}"
        text = (root / path).read_text(encoding="utf-8")
        if name and f"def {name}(" not in text:
            return f"there is no {name} in {path}"
        if case and f'"{case}"' not in text:
            return f"there is no case {case} in {path}"
    return ""


def test_each_front_end_names_its_tests(root: Path) -> None:
    result = {cells[0]: mistake for cells in rows(root) if (mistake := wrong(cells[-1], root))}
    assert not result
    assert all(len(cells) == 3 for cells in rows(root))
    assert not [name for name in FRONT_ENDS if not any(name in cells[0] for cells in rows(root))]


@pytest.mark.parametrize(
    ("tests", "mistake"),
    [
        ("", "it names no test"),
        ("`tests/widgets/test_nothing.py`", "there is no tests/widgets/test_nothing.py"),
        ("`tests/widgets/test_lab.py::test_nothing`", "there is no test_nothing in"),
        ("`tests/widgets/test_lab.py::test_a_card_follows_its_job_in_a_browser[emacs]`", "there is no case emacs in"),
        ("`tests/widgets/test_lab.py`, the same", "it names something else than tests: the same"),
        ("`tests/widgets/test_lab.py::test_a_card_follows_its_job_in_a_browser[notebook 7]`", ""),
    ],
)
def test_what_is_wrong_with_a_line_is_seen(root: Path, tests: str, mistake: str) -> None:
    assert wrong(tests, root).startswith(mistake)
    assert bool(wrong(tests, root)) == bool(mistake)
