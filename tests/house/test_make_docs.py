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
    found = {(proof.row, proof.test) for proof in collect(tmp_path)}
    assert found == {
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
