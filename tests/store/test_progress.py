"""How far jobs are: one bounded row a job, whatever is reported and however often."""

from __future__ import annotations

import json
from typing import Any

import pytest
from makeway_api.models.progress import read_progress
from makeway_quota.control.progress_keeper import ProgressKeeper
from makeway_quota.store import Store
from makeway_quota.store.records import NewWorkload
from sqlalchemy import text


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def keeper(store: Store) -> ProgressKeeper:
    store.add_workloads(
        [(NewWorkload(id, "job", "rnd", "gpu1", "ana", gpus=1000), (), None) for id in ("j1", "j2")], now=1.0
    )
    return ProgressKeeper(store, Clock())


def rows(store: Store) -> list[tuple[str, int]]:
    with store._database.read() as connection:
        found = connection.execute(text("SELECT workload, length(progress) FROM progress ORDER BY workload"))
        return [(row[0], row[1]) for row in found]


def test_many_steps_are_one_write_and_one_row(keeper: ProgressKeeper, store: Store) -> None:
    commits: list[None] = []
    for step in range(1000):
        keeper.note("j1", 1, {"step": step, "total": 1000, "metrics": {"loss": 1 / (step + 1)}})
    writes = keeper.written
    keeper.write()
    keeper.write()
    assert keeper.written == writes + 1
    store.on_commit(lambda: commits.append(None))
    assert store.progress.of(["j1", "j1", "no"])["j1"].report["step"] == 999
    for step in range(50):
        keeper.note("j1", 1, {"step": step, "metrics": {f"m{n}": 1.0 for n in range(100)}})
        keeper.write()
    [(_, size)] = rows(store)
    assert size < 4_000
    assert commits == []


def test_a_report_of_an_earlier_attempt_changes_nothing(keeper: ProgressKeeper, store: Store) -> None:
    keeper.note("j1", 2, {"step": 5})
    keeper.write()
    keeper.note("j1", 1, {"step": 500})
    keeper.write()
    assert store.progress.of(["j1"])["j1"].report["step"] == 5


def test_a_resume_below_what_was_reached_is_told_until_it_is_as_far(keeper: ProgressKeeper, store: Store) -> None:
    def reached(attempt: int, step: int, stage: str = "") -> int | None:
        keeper.note("j1", attempt, {"step": step, "total": 1000, "stage": stage})
        keeper.write()
        return store.progress.of(["j1"])["j1"].reached

    assert reached(1, 900) is None
    assert reached(2, 500) == 900
    assert reached(3, 400) == 900
    assert reached(3, 899) == 900
    assert reached(3, 900) is None
    assert reached(4, 100) == 900
    assert reached(4, 101, "evaluation") is None


def test_the_time_of_the_last_step_stays_while_the_same_is_reported(keeper: ProgressKeeper, store: Store) -> None:
    clock = keeper._clock
    assert isinstance(clock, Clock)
    for now in (1000.0, 1100.0):
        clock.now = now
        keeper.note("j1", 1, {"step": 5, "at": 7.0})
        keeper.write()
    assert store.progress.of(["j1"])["j1"].at == 1000.0


def test_a_job_that_was_removed_meanwhile_stops_no_other(keeper: ProgressKeeper, store: Store) -> None:
    for id in ("gone", "j2"):
        keeper.note(id, 1, {"step": 1})
    keeper.write()
    assert [id for id, _ in rows(store)] == ["j2"]


HUGE: dict[str, Any] = {"step": 1, "stage": "s" * 10**6, "metrics": {"m" * 10**5 + str(n): n for n in range(10**4)}}


@pytest.mark.parametrize(
    "given",
    [
        HUGE,
        {"step": 2**70, "metrics": {"a": 10**400}},
        {"step": True, "total": "9", "metrics": {"loss": float("nan"), "lr": float("inf")}},
        {"step": 3, "rate": float("nan"), "curve": {"points": [[1, float("nan")], [2], "x", [2, 1.0], [1, 2.0]]}},
        {"step": 3, "curve": {"name": "\udc80\0", "points": [[n, 1.0] for n in range(10**5)]}},
        {"step": 3, "metrics": [1], "curve": "no", "stage": 7, "at": "soon"},
    ],
)  # fmt: skip
def test_whatever_a_job_writes_is_kept_small_and_readable(keeper: ProgressKeeper, store: Store, given: Any) -> None:
    keeper.note("j1", 1, given)
    keeper.note("j2", 1, {"step": 1})
    keeper.write()
    found = store.progress.of(["j1", "j2"])
    assert "j2" in found
    if "j1" in found:
        text = json.dumps(found["j1"].report, allow_nan=False)
        assert len(text) < 8_000
        assert read_progress(found["j1"].report) is not None


@pytest.mark.parametrize("given", [None, [], "x", 3, {}, {"step": None}, {"metrics": {}}, {"step": -1}])
def test_what_says_nothing_is_no_progress(keeper: ProgressKeeper, store: Store, given: Any) -> None:
    keeper.note("j1", 1, given)
    keeper.write()
    assert rows(store) == []
