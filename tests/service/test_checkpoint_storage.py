"""Jobs whose volume keeps no checkpoint: they do not begin, wait a little, and fail in words; others are warned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from makeway_api.models import JobRequest
from makeway_quota.backends.base import AttemptSeen, NodeSeen, Phase, Seen, StartOrder
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.control.reconcile import reconcile
from makeway_quota.control.start_backoff import STORAGE_TRIES, StartBackoff, backoff_until
from makeway_quota.control.storage_failures import PASSES, StorageFailures
from makeway_quota.control.transitions import CHECKPOINT_STORAGE
from makeway_quota.control.worker_channel import worker_of
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import submitted
from makeway_quota.values import Place
from running import running

SAYS = "no checkpoint can be kept in /makeway/checkpoints/j-1: its volume is read-only. An administrator has to act"
NODES = (NodeSeen("n1", "", (0,), virtual=True),)


def row(**changes: object) -> Workload:
    """Return a job whose attempt was just ordered to start."""
    made = submitted(NewWorkload("j-1", "job", "rnd", "gpu1", "ana", name="x", gpus=1000), 0.0)
    placed = {"state": "starting", "attempt": 1, "started_at": 10.0, "placement": (Place("n1", (0,), (1000,)),)}
    return made._replace(**(placed | changes))  # type: ignore[arg-type]


def after(backoff: StartBackoff, now: float, job: Workload | None = None, **facts: object) -> Workload:
    """Return what becomes of a job whose launcher could write no checkpoint, once it is committed."""
    job = job or row()
    seen = AttemptSeen("j-1", 1, Phase.EXITED, exit_code=73, storage_failed=True, message=SAYS)
    found = reconcile(
        {"j-1": job},
        Seen(NODES, (replace(seen, **facts),)),
        now=now,
        lost_budget=0,
        backoff=backoff,  # type: ignore[arg-type]
    )
    (change,) = found.changes
    became = job._replace(**change.fields)  # type: ignore[arg-type]
    backoff.committed([became])
    return became


def test_a_job_is_tried_a_few_times_and_then_fails_with_the_reason() -> None:
    backoff, waited = StartBackoff(), list[float]()
    for _ in range(STORAGE_TRIES - 1):
        waits = after(backoff, 100.0)
        assert (waits.state, waits.reason_code, waits.failures) == ("pending", CHECKPOINT_STORAGE, 0)
        assert SAYS in waits.reason_message
        until = backoff_until(waits, 100.0)
        assert until is not None, "the engine leaves it out meanwhile"
        waited.append(until - 100.0)
    assert waited == [60.0, 120.0, 240.0, 480.0]
    failed = after(backoff, 100.0)
    assert failed.state == "failed"
    assert failed.reason_message == (
        f"“x” of ana failed before it began: {SAYS}. It was tried 5 times in a row; resume it once that is mended."
    )


def test_a_job_with_many_retries_of_its_own_is_not_tried_for_ever_either() -> None:
    backoff = StartBackoff()
    states = [after(backoff, 100.0, row(max_failures=1000)).state for _ in range(STORAGE_TRIES)]
    assert states == ["pending"] * (STORAGE_TRIES - 1) + ["failed"]


def test_another_replica_goes_on_counting() -> None:
    first = StartBackoff()
    for _ in range(STORAGE_TRIES - 1):
        waits = after(first, 100.0)
    second, started = StartBackoff(), waits._replace(state="starting", placement=row().placement)
    second.committed([started])
    assert after(second, 200.0, started).state == "failed"


def test_a_job_that_is_cancelled_meanwhile_is_cancelled() -> None:
    assert after(StartBackoff(), 100.0, row(cancel_requested=True)).state == "cancelled"


def test_a_folder_that_the_kubelet_cannot_make_counts_the_same() -> None:
    waits = after(StartBackoff(), 100.0, phase=Phase.LOST, never_ran=True, exit_code=None)
    assert waits.reason_code == CHECKPOINT_STORAGE


def test_a_report_of_an_older_launcher_says_nothing_of_it() -> None:
    assert not worker_of({"exit": {"exit_code": 73, "ended_at": 5.0}}).storage_failed
    assert worker_of({"exit": {"exit_code": 73, "ended_at": 5.0, "storage_failed": True}}).storage_failed


def test_a_failure_is_remembered_for_its_team_until_a_job_of_it_runs_or_a_day_has_passed() -> None:
    failures, backoff = StorageFailures(), StartBackoff()
    waits = after(backoff, 100.0)
    failures.committed([waits])
    assert SAYS in failures.of("rnd", 200.0)
    assert failures.of("devops", 200.0) == ""
    assert failures.of("rnd", 160.0 + PASSES) == ""
    failures.committed([row(state="running", team="devops")])
    assert failures.of("rnd", 200.0)
    failures.committed([row(state="running")])
    assert failures.of("rnd", 200.0) == ""


class ReadOnly(MemoryBackend):
    """A backend whose volume of checkpoints is read-only."""

    mended = False

    async def start(self, order: StartOrder) -> None:
        await super().start(order)
        if not self.mended:
            entry = self.newest(order.workload)
            ended = {"phase": Phase.EXITED, "exit_code": 73, "storage_failed": True, "message": SAYS}
            entry.seen = replace(entry.seen, **ended)  # type: ignore[arg-type]


async def test_the_job_its_decisions_and_the_next_dry_run_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("makeway_quota.control.start_backoff.FIRST", 0.05)
    backend = ReadOnly(NODES, real_time=True)
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        ana, wanted = run.client("ana"), JobRequest(command=["true"], profile="gpu1", dry_run=True)
        assert (await ana.dry_run(wanted)).notes == []
        job = await run.submit("ana", "train", profile="gpu1")
        failed = await run.job(job.id, "failed")
        assert failed.reason is not None
        assert SAYS in failed.reason.message
        assert failed.failures == 1
        codes = [each.code for each in await ana.job_events(job.id)]
        assert codes.count(CHECKPOINT_STORAGE) == STORAGE_TRIES - 1
        (note,) = (await ana.dry_run(wanted)).notes
        assert note == (
            "It may not start, as the last job of R&D could keep no checkpoint: “train” of ana failed before it began: "
            f"{SAYS}."
        )
        again = await run.submit("ana", "again", profile="gpu1")
        assert note in again.notes
        backend.mended = True
        await ana.resume(job.id)
        await run.job(job.id, "running")
        assert (await ana.dry_run(wanted)).notes == []
