"""Measured numbers get into the documentation, and only between their marks."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import packing, simulation
from benchmarks.__main__ import BENCHMARKS, SECTIONS, main
from benchmarks.measure import Measured, with_section
from benchmarks.numbers import insert, markdown

ROOT = Path(__file__).parents[2]


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
    for text, message in ((None, "there is no page"), ("Nothing here.", "has no line <!-- numbers:")):
        if text is not None:
            page.write_text(text)
        with pytest.raises(SystemExit):
            benchmark.main([str(tmp_path), "--page", str(page)])
        assert message in capsys.readouterr().err


def test_a_section_of_the_benchmarks_is_made_anew_and_the_others_stay() -> None:
    def measured(name: str) -> list[Measured]:
        return [Measured(name, "s", [2.0], "a bare one", 1.0, note="from end to end")]

    page = with_section("# Benchmarks\n", "Here", measured("first"))
    page = with_section(with_section(page, "There", measured("second")), "Here", measured("third"))
    assert re.findall(r"^## (.*)|^\| (\w+) \| 2 s", page, re.M) == [
        ("Here", ""), ("", "third"), ("There", ""), ("", "second"),
    ]  # fmt: skip
    assert page.count("from end to end") == 2
    benchmarks = [name for names in SECTIONS.values() for name in names]
    assert sorted(benchmarks) == sorted(BENCHMARKS)
    shown = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)", shown, re.M) == list(SECTIONS)


@pytest.mark.parametrize(("seconds", "status"), [(1.0, 0), (3.0, 1)])
def test_a_goal_that_is_missed_is_named_and_an_error(
    seconds: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    goals = {"kept": 4.0, "tried": 2.0, "without": None}
    rows = [Measured(name, "s", [seconds], "a bare one", 1.0, goal) for name, goal in goals.items()]
    monkeypatch.setitem(BENCHMARKS, "lease", lambda: rows)
    assert main(["--only", "lease"]) == status
    missed = "Goals that were missed:\n  tried\n"
    assert capsys.readouterr().err.endswith(missed) == bool(status)


@pytest.mark.parametrize(("at_95", "met"), [(False, True), (True, False)])
def test_a_goal_is_one_for_the_median_or_for_95_of_100_samples(at_95: bool, met: bool) -> None:
    assert Measured("x", "s", [1.0, 1.0, 3.0], "a bare one", 1.0, 2.0, at_95=at_95).met is met
