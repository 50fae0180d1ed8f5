"""Check the invariants over random worlds and random histories."""

from __future__ import annotations

from random import Random

import pytest
from engine.histories import HISTORIES, live_through
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

PARTS = 20
"""The slow tier in parts, so that several processors may share it; each has a seed of its own."""
ROWS = ("F03", "F09", "F10", "F13", "F14", "F15", "F16", "F17", "F34", "F36")
BROKEN_ONCE = {
    381: "a moved start is evicted once stuck work ended, which is an event",
    20240: "a start is evicted together with a nominated one that another workload has a better right to",
    20328: "a nominated start is evicted in the next plan, and moved to another pool",
    22631: "GPUs that stuck work holds count as about to be free",
    21914: "two jobs of a team replace each other's starts for as long as rounds are allowed",
    22684: "the same, where the one that is replaced would be in quota in another pool",
    5000892: "the older job of a group is lost where the younger one replaces its start (I10)",
    636348719: "a victim that returns by evicting a nominated start counts as one that only returns by the preemptor",
}
"""Histories that once broke an invariant, or that a check took for broken, each with the cause."""

quick = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("start", Random(20260101).sample(range(10**9), 40))
def test_invariants_hold_over_random_histories(start: int) -> None:
    live_through(Random(start), 30)


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("start", BROKEN_ONCE, ids=str)
def test_histories_that_broke_an_invariant_once_keep_it(start: int) -> None:
    live_through(Random(start), 30)


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("start", range(60))
def test_invariants_hold_over_fixed_histories(start: int) -> None:
    live_through(Random(start), 40)


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize(
    "start", [876, 3099, 8041, 17944, 2716227, 67108864, 285212753, 178415185, 547483263, 178, 163824]
)
def test_invariants_hold_over_histories_that_broke_them_once(start: int) -> None:
    live_through(Random(start), 200)


@pytest.mark.slow
@pytest.mark.covers(*ROWS)
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_invariants_hold_over_long_random_histories(part: int) -> None:
    @seed(20260101 + part)
    @settings(quick, max_examples=max(1, HISTORIES // PARTS), derandomize=False)
    @given(st.integers(0, 10**9))
    def all_of_them(start: int) -> None:
        live_through(Random(start), 200)

    all_of_them()
