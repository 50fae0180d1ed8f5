"""Measured numbers get into the documentation, and only between their marks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.numbers import insert, markdown


def test_only_what_stands_between_the_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- numbers: x -->\nold\n<!-- /numbers -->\nafter\n")
    insert(page, "x", markdown(("a", "b"), [("1", "2")]))
    assert page.read_text().startswith("before\n<!-- numbers: x -->\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    assert page.read_text().endswith("<!-- /numbers -->\nafter\n")
    with pytest.raises(ValueError, match="numbers: y"):
        insert(page, "y", "")
