"""Everything changes at once: the invariants I1 to I11 hold, and both engines decide the same."""

from __future__ import annotations

import pytest
from engine.changing_worlds import ChangingHistory
from engine.histories import HISTORIES

ROWS = ("F13", "F14", "F15", "F16", "F17")
BROKEN_ONCE = {
    1097: "a job over quota preempts one that returns in quota by evicting over quota, again and again",
    1504: "the same with three jobs of a team in two pools, one of them an elastic gang",
    1815: "jobs of which a node shows too few devices, or none, are taken for equal to others of their size",
    1279: "a job that moves to another pool counts twice on a line over both, so that another one waits",
    2107: "a job starts on free GPUs on which a gang that made way goes on beside one of its workers",
    2129: "a start in quota makes way for its victim in turn, which it then evicts again",
    2200: "a nominated start is evicted in the next plan, whereupon another team evicts a third workload, too",
    6044: "the check counted the place that a stuck gang moves to instead of the larger one that it holds",
    6108: "one engine counted all GPUs of a stuck gang over two pools in one of them, the other one none",
    9041: "two jobs nominated in quota start over quota elsewhere and replace each other to the last round",
    5103: "a start over quota makes candidates of jobs that the next plan moves beside its eviction",
}
"""Histories that once broke an invariant, each with the cause."""
PARTS = 20
"""The slow tier in parts, so that several processors may share it."""


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("part", range(6))
def test_the_invariants_hold_while_nodes_devices_and_quotas_change(part: int) -> None:
    for seed in range(2 * part, 2 * part + 2):
        ChangingHistory(seed).live(12)


@pytest.mark.covers(*ROWS)
@pytest.mark.parametrize("seed", BROKEN_ONCE, ids=str)
def test_changing_histories_that_broke_an_invariant_once_keep_it(seed: int) -> None:
    ChangingHistory(seed).live(20)


@pytest.mark.slow
@pytest.mark.covers(*ROWS)
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_invariants_hold_while_everything_changes_at_length(part: int) -> None:
    many = max(1, HISTORIES // PARTS)
    for seed in range(1000 + part * many, 1000 + (part + 1) * many):
        ChangingHistory(seed).live(20)
