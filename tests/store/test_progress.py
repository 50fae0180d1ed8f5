"""How far jobs are: one bounded row a job, whatever is reported and however often."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
from makeway_api.models.progress import read_progress
from makeway_quota.control.workers import progress_keeper
from makeway_quota.control.workers.progress_keeper import ProgressKeeper
from makeway_quota.store import Store, StoreError
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
    return keeper_of(store)


def keeper_of(store: Store) -> ProgressKeeper:
    return ProgressKeeper(store, Clock())


def rows(store: Store) -> list[tuple[str, int]]:
    with store._database.read() as connection:
        lengths = connection.execute(text("SELECT workload, length(progress) FROM progress ORDER BY workload"))
        return [(row[0], row[1]) for row in lengths]


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
    result = store.progress.of(["j1", "j2"])
    assert "j2" in result
    if "j1" in result:
        text = json.dumps(result["j1"].report, allow_nan=False)
        assert len(text) < 8_000
        assert read_progress(result["j1"].report) is not None


@pytest.mark.parametrize("given", [None, [], "x", 3, {}, {"step": None}, {"metrics": {}}, {"step": -1}])
def test_what_says_nothing_is_no_progress(keeper: ProgressKeeper, store: Store, given: Any) -> None:
    keeper.note("j1", 1, given)
    keeper.write()
    assert rows(store) == []


def test_a_report_that_took_longer_by_another_replica_does_not_replace_a_newer_one(
    keeper: ProgressKeeper, store: Store
) -> None:
    """The last report of an attempt would otherwise be hidden for good."""
    slow, fast = keeper, keeper_of(store)
    slow.note("j1", 1, {"step": 990, "at": 5000.0})
    fast.note("j1", 1, {"step": 1000, "at": 5001.0})
    fast.write()
    slow.write()
    assert store.progress.of(["j1"])["j1"].report["step"] == 1000
    slow.note("j1", 1, {"step": 1001, "at": 1000.0})
    slow.write()
    assert store.progress.of(["j1"])["j1"].report["step"] == 1001, "the clock of its node was set back"
    slow.note("j1", 2, {"step": 10, "at": 999.0})
    slow.write()
    assert store.progress.of(["j1"])["j1"].report["step"] == 10, "another attempt"


@pytest.mark.parametrize(
    "report", ['{"step": "x"}', '{"step": []}', '{"at": "x", "step": 3}', "[]", "3", "{", "[" * 99_999]
)
def test_a_damaged_row_stops_no_other_and_is_replaced(keeper: ProgressKeeper, store: Store, report: str) -> None:
    keeper.note("j1", 1, {"step": 5})
    keeper.write()
    with store._database.write() as connection:
        connection.execute(text("UPDATE progress SET progress = :report"), {"report": report})
    for attempt in (1, 2):
        keeper.note("j1", attempt, {"step": 6 + attempt, "at": 1.0})
        keeper.note("j2", attempt, {"step": 7})
        keeper.write()
        assert {id: row.report["step"] for id, row in store.progress.of(["j1", "j2"]).items()} == {
            "j1": 6 + attempt,
            "j2": 7,
        }


def test_a_job_that_cannot_be_written_keeps_no_other(
    keeper: ProgressKeeper, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = store.progress.write

    def fail(reports: Any, at: float) -> None:
        if "j1" in reports:
            raise TypeError("an error of our own")
        write(reports, at)

    monkeypatch.setattr(store.progress, "write", fail)
    keeper.note("j1", 1, {"step": 1})
    keeper.note("j2", 1, {"step": 2})
    keeper.write()
    assert list(store.progress.of(["j1", "j2"])) == ["j2"]
    assert not keeper._unwritten


def test_jobs_that_report_while_others_are_written_wait_behind_those_that_wait(
    keeper: ProgressKeeper, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_keeper, "MAX_AT_ONCE", 1)
    written: list[str] = []

    def slow(reports: Any, at: float) -> None:
        written.extend(reports)
        for job in reports:
            keeper.note(job, 1, {"step": len(written)})

    monkeypatch.setattr(store.progress, "write", slow)
    keeper.note("j1", 1, {"step": 0})
    keeper.note("j2", 1, {"step": 0})
    for _ in range(4):
        keeper.write()
    assert written == ["j1", "j2", "j1", "j2"]


def test_jobs_that_end_are_written_before_those_that_wait(
    keeper: ProgressKeeper, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_keeper, "MAX_AT_ONCE", 1)
    for id in ("j1", "j2"):
        keeper.note(id, 1, {"step": 1})
    keeper.write(["j2", "gone"])
    assert list(store.progress.of(["j1", "j2"])) == ["j2"]
    keeper.note("j2", 1, {"step": 2})
    keeper.write(["j1", "j2"])
    assert len(store.progress.of(["j1", "j2"])) == 2


def test_who_writes_waits_for_what_another_took_before(
    keeper: ProgressKeeper, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, began, go_on = store.progress.write, threading.Event(), threading.Event()

    def slow(reports: Any, at: float) -> None:
        began.set()
        assert go_on.wait(60)
        write(reports, at)

    monkeypatch.setattr(store.progress, "write", slow)
    keeper.note("j1", 1, {"step": 1})
    with ThreadPoolExecutor() as threads:
        first = threads.submit(keeper.write)
        assert began.wait(60)
        second = threads.submit(keeper.write, ["j1"])
        done = wait([second], timeout=0.05).done
        go_on.set()
        second.result(60)
        assert not done
        assert first.done()


def test_what_could_not_be_written_is_kept_and_gives_way_to_what_is_newer(
    keeper: ProgressKeeper, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(reports: Any, at: float) -> None:
        keeper.note("j1", 1, {"step": 2})
        raise StoreError("no database")

    keeper.note("j1", 1, {"step": 1})
    keeper.note("j2", 1, {"step": 3})
    with monkeypatch.context() as patch:
        patch.setattr(store.progress, "write", fail)
        with pytest.raises(StoreError):
            keeper.write()
    keeper.write()
    assert {id: row.report["step"] for id, row in store.progress.of(["j1", "j2"]).items()} == {"j1": 2, "j2": 3}


@pytest.mark.parametrize("rate", [5e-324, 1e-300, 1e-10, 0, -1, 2**53, 1e299, float("nan"), float("inf"), "1", True])
def test_a_rate_of_which_no_time_can_be_made_is_none(rate: object) -> None:
    """Cards show the seconds of a step, which would not even be a finite number."""
    result = read_progress({"step": 1, "total": 5, "rate": rate})
    assert result is not None
    assert result.rate is None
