"""The list of features finds every `covers` mark, wherever a test may carry it."""

from __future__ import annotations

from pathlib import Path

import make_docs
from make_docs import Proof

SOURCE = """
import pytest
pytestmark = pytest.mark.covers("F01")

@pytest.mark.covers("F02", "F03")
def test_plain(): ...

@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.covers("F04"))])
async def test_parameter(x): ...

def helper(): ...

class TestGroup:
    pytestmark = [pytest.mark.slow, pytest.mark.covers("F05")]
    @pytest.mark.covers("F06")
    def test_inside(self): ...

@pytest.mark.covers("F07")
class Histories(RuleBasedStateMachine): ...

TestHistories = pytest.mark.covers("F08")(Histories.TestCase)
"""


def collect(tmp_path: Path) -> list[Proof]:
    file = tmp_path / "tests" / "engine" / "test_some.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE)
    return make_docs.proofs(tmp_path / "tests")


def test_marks_are_found_on_tests_parameters_classes_and_modules(tmp_path: Path) -> None:
    result = {(proof.row, proof.test) for proof in collect(tmp_path)}
    assert result == {
        *(
            ("F01", test)
            for test in ("test_plain", "test_parameter", "TestGroup::test_inside", "Histories", "TestHistories")
        ),
        ("F02", "test_plain"),
        ("F03", "test_plain"),
        ("F04", "test_parameter"),
        ("F05", "TestGroup::test_inside"),
        ("F06", "TestGroup::test_inside"),
        ("F07", "Histories"),
        ("F08", "TestHistories"),
    }


def test_a_row_names_its_tests_or_what_it_waits_for(tmp_path: Path) -> None:
    rows = [
        {"id": "F02", "behaviour": "Does a|b", "check": "c"},
        {"id": "F90", "behaviour": "d", "check": "e", "later": "autoscaling"},
        {"id": "F91", "behaviour": "f", "check": "g"},
    ]
    page = make_docs.features_page([{"section": "All", "rows": rows}], collect(tmp_path))
    assert "1 of 3 rows have a test today" in page
    assert "| F02 | Does a\\|b | c | [engine/test_some.py](../tests/engine/test_some.py): `test_plain` |" in page
    assert "| F90 | d | e | not yet: comes with autoscaling |" in page
    assert "| F91 | f | g | not yet |" in page


def test_a_row_that_a_later_part_completes_says_so_beside_its_tests() -> None:
    proofs = [Proof("F20", "tests/web/a.py", "test_a")]
    rows = [{"id": "F20", "behaviour": "b", "check": "c", "later": "autoscaling"}]
    page = make_docs.features_page([{"section": "All", "rows": rows}], proofs)
    assert "1 of 1 rows have a test today." in page
    assert "`test_a`<br>*later: autoscaling* |" in page


def test_the_best_proof_of_a_row_stands_first() -> None:
    rule, story, small, whole = (
        Proof("F20", "tests/engine/test_rules.py", "test_a_rule"),
        Proof("F20", "tests/e2e/test_story.py", "test_the_story"),
        Proof("F20", "tests/service/test_sharing.py", "test_idle_gpus_are_lent"),
        Proof("F20", "tests/kube/test_reclaim.py", "test_reclaims_in_a_row"),
    )
    breadth = {(story.file, story.test): 20, (small.file, small.test): 6}
    assert make_docs.best_first([story, rule, small, whole], breadth) == [whole, small, rule, story]
    assert make_docs.best_first([story, rule, small, whole], breadth, "engine/test_rules.py::test_a_rule")[0] == rule
    line = make_docs.feature_line({"id": "F20", "behaviour": "b", "check": "c"}, [whole, small, rule])
    assert "[kube/test_reclaim.py](../tests/kube/test_reclaim.py): `test_reclaims_in_a_row`<br>also [service/" in line


def test_each_row_with_proofs_names_its_best_one_on_a_line_of_its_own(root: Path) -> None:
    page = make_docs.features_page(make_docs.feature_rows(root), make_docs.proofs(root / "tests"))
    rows = [line for line in page.splitlines() if line.startswith(("| F", "| N"))]
    assert len(rows) > 100
    firsts = [line.rsplit(" | ", 1)[-1].split("<br>")[0] for line in rows]
    named = {row["id"]: row["proof"] for part in make_docs.feature_rows(root) for row in part["rows"] if "proof" in row}
    shown = {line.split(" | ")[0].removeprefix("| "): first for line, first in zip(rows, firsts, strict=True)}
    assert len(named) > 30
    assert not [row for row, proof in named.items() if f"`{proof.partition('::')[2]}`" not in shown[row]]
    assert not [first for first in firsts if first.count("`test_") + first.count("`Test") > 1]
