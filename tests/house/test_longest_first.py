"""The groups of tests whose length is known exist, and the longest are started first."""

from __future__ import annotations

from pathlib import Path

import pytest
from longest_first import SECONDS, in_order


@pytest.mark.parametrize("group", [group for group in SECONDS if "/" in group])
def test_a_long_group_is_a_test_or_a_place_of_tests(root: Path, group: str) -> None:
    place, _, name = group.partition("::")
    assert (root / place).exists()
    if name:
        assert f"def {name}(" in (root / place).read_text(encoding="utf-8")


def test_the_longest_groups_come_first_and_the_others_stay_in_order() -> None:
    groups = ["short", "types", "other", "types", "accounts"]
    assert in_order([0, 1, 2, 3, 4], groups) == [4, 1, 3, 0, 2]  # type: ignore[arg-type,comparison-overlap]
