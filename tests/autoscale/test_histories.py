"""Random histories of a deployment with every fault of a cloud: within the budget, nothing twice, nothing left."""

from __future__ import annotations

import pytest
from autoscale.histories import HISTORIES, History
from autoscale.moving_histories import MovingHistory

PARTS = 20


@pytest.mark.parametrize("seed", range(8))
def test_some_histories_of_machines_keep_the_rules(seed: int) -> None:
    History(seed).play()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3534, 4819, 5478, 6834, 7342, 10980])
def test_histories_in_which_leaders_forgot_when_an_instance_was_seen_first(seed: int) -> None:
    History(seed).play()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_histories_of_machines_keep_the_rules(part: int) -> None:
    many = max(1, HISTORIES // 6)
    for seed in range(1000 + part * many, 1000 + (part + 1) * many):
        History(seed).play()


def test_some_histories_in_which_jobs_are_moved_keep_the_rules() -> None:
    played = [MovingHistory(seed) for seed in range(12)]
    for history in played:
        history.play(100)
    assert sum(len(times) for history in played for times in history.moves.values()) >= 5, "too few moves to tell"
    assert sum(history.cancelled_moves for history in played) >= 2, "too few machines were ready again"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_histories_in_which_jobs_are_moved_keep_the_rules(part: int) -> None:
    many = max(1, HISTORIES // 12)
    for seed in range(5000 + part * many, 5000 + (part + 1) * many):
        MovingHistory(seed).play(100)
