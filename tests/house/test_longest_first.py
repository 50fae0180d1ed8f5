"""The groups of tests whose length is known exist, and the longest are started first."""

from __future__ import annotations

from pathlib import Path

import pytest
from longest_first import MAX_WITH_PORTALS, SECONDS, choose, in_order, starts_portal


@pytest.mark.parametrize("group", [group for group in SECONDS if "/" in group])
def test_a_long_group_is_a_test_or_a_place_of_tests(root: Path, group: str) -> None:
    place, _, name = group.partition("::")
    assert (root / place).exists()
    if name:
        assert f"def {name}(" in (root / place).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("group", "starts"),
    [
        ("accounts", True),
        ("tests/hub", True),
        ("tests/hub/test_embedded.py::test_kept_notebooks_survive_ctrl_c", True),
        ("tests/hub/test_embedded.py", False),
        ("tests/e2e/test_replicas.py", True),
        ("tests/e2e/test_faults.py::test_the_hub_is_killed", True),
        ("tests/web/test_pages.py", False),
        ("types", False),
    ],
)
def test_groups_that_start_a_portal_are_known(group: str, starts: bool) -> None:
    assert starts_portal(group) == starts


def test_whole_portals_run_on_few_workers_while_there_is_something_else() -> None:
    portals = [f"tests/e2e/test_{number}.py" for number in range(9)]
    busy = [[portal] for portal in portals[:MAX_WITH_PORTALS]]
    queue = [*portals[MAX_WITH_PORTALS:], "tests/web/test_a.py", "tests/web/test_b.py"]
    assert choose(queue, [], busy) == "tests/web/test_a.py"
    assert choose(queue, [], [*busy[1:], ["tests/web/test_c.py"]]) == queue[0], "one more may run"
    assert choose(queue, ["tests/e2e/test_replicas.py"], busy) == queue[-1], "behind a long one the shortest waits"
    assert choose(queue[:-2], [], busy) == queue[0], "nothing else is left"


def test_the_longest_groups_come_first_and_the_others_stay_in_order() -> None:
    groups = ["short", "types", "other", "types", "accounts"]
    assert in_order([0, 1, 2, 3, 4], groups) == [4, 1, 3, 0, 2]  # type: ignore[arg-type,comparison-overlap]
