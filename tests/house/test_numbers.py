"""Measured numbers get into the documentation, and only between their marks."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import packing, simulation
from benchmarks.numbers import insert, markdown


def test_only_what_stands_between_the_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- numbers: x -->\nold\n<!-- /numbers -->\nafter\n")
    insert(page, "x", markdown(("a", "b"), [("1", "2")]))
    assert page.read_text().startswith("before\n<!-- numbers: x -->\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    assert page.read_text().endswith("<!-- /numbers -->\nafter\n")
    with pytest.raises(ValueError, match="numbers: y"):
        insert(page, "y", "")


@pytest.mark.parametrize("benchmark", [simulation, packing])
def test_a_page_that_cannot_take_the_numbers_is_refused_before_they_are_measured(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    for text, said in ((None, "there is no page"), ("Nothing here.", "has no line <!-- numbers:")):
        if text is not None:
            page.write_text(text)
        with pytest.raises(SystemExit):
            benchmark.main([str(tmp_path), "--page", str(page)])
        assert said in capsys.readouterr().err
