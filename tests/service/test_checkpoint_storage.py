"""Jobs whose volume keeps no checkpoint: they do not begin, and wait in words; others are warned."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from makeway_api.models import JobRequest
from makeway_quota import policy
from makeway_quota.backends.base import AttemptStatus, NodeStatus, Observation, Phase, StartOrder
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.backends.remote.workers import WorkerStatus, attempt_of
from makeway_quota.control.reconcile import reconcile
from makeway_quota.control.start_backoff import MANY_TRIES, StartBackoff, backoff_until
from makeway_quota.control.workers.channel import worker_of
from makeway_quota.control.world.checkpoint_failures import PASSES, CheckpointFailures
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import initial_record
from makeway_quota.values import CHECKPOINT_STORAGE, Place
from running import running

SAYS = "no checkpoint can be kept in /makeway/checkpoints/j-1: its volume is read-only. An administrator has to act"
NODES = (NodeStatus("n1", "", (0,), virtual=True),)
POLICY = policy.read_policy("""
version: 1
pools: [{name: a, nodes: {local: {gpus: all}}}]
profiles: [{name: gpu1, gpus: 1, max_workers: 2, policies: [rnd]}]
policies: [{name: rnd, groups: [rnd], quotas: [{reserved: 2}]}]
""")


def row(**changes: object) -> Workload:
    """Return a job whose attempt was just ordered to start."""
    made = initial_record(NewWorkload("j-1", "job", "rnd", "gpu1", "ana", name="x", gpus=1000), 0.0)
    placed = {"state": "starting", "attempt": 1, "started_at": 10.0, "placement": (Place("n1", (0,), (1000,)),)}
    return made._replace(**(placed | changes))  # type: ignore[arg-type]


def after(
    backoff: StartBackoff,
    now: float,
    job: Workload | None = None,
    nodes: tuple[NodeStatus, ...] = NODES,
    **facts: object,
) -> Workload:
    """Return what becomes of a job whose launcher could write no checkpoint, once it is committed."""
    job = job or row()
    seen = AttemptStatus("j-1", 1, Phase.EXITED, exit_code=73, storage_failed=True, message=SAYS)
    result = reconcile(
        {"j-1": job},
        Observation(nodes, (replace(seen, **facts),)),
        now=now,
        max_infra_failures=0,
        document=POLICY,
        backoff=backoff,  # type: ignore[arg-type]
    )
    (change,) = result.changes
    became = job._replace(**change.fields)  # type: ignore[arg-type]
    backoff.committed([became])
    return became


def test_a_job_waits_longer_and_longer_and_never_fails_for_it() -> None:
    backoff, waited = StartBackoff(), list[float]()
    for _ in range(MANY_TRIES + 1):
        waits = after(backoff, 100.0, row(preemptions=3, checkpoint_step=7, max_failures=0))
        assert (waits.state, waits.reason_code, waits.failures) == ("pending", CHECKPOINT_STORAGE, 0)
        assert SAYS in waits.reason_message
        until = backoff_until(waits, 100.0)
        assert until is not None, "the engine leaves it out meanwhile"
        waited.append(until - 100.0)
    assert waited == [60.0, 120.0, 240.0, 480.0, *[900.0] * (MANY_TRIES - 4), 3600.0]


@pytest.mark.parametrize("tries", [4, 40])
def test_tries_for_another_cause_do_not_end_it_either(tries: int) -> None:
    backoff, before = StartBackoff(), row(start_tries=tries)
    backoff.committed([before])
    assert after(backoff, 100.0, before).state == "pending"


def test_another_replica_goes_on_counting() -> None:
    first = StartBackoff()
    for _ in range(3):
        waits = after(first, 100.0)
    second, started = StartBackoff(), waits._replace(state="starting", placement=row().placement)
    second.committed([started])
    assert after(second, 200.0, started).start_tries == 4


@pytest.mark.parametrize("worker", [0, 1])
def test_the_node_of_the_worker_that_could_not_write_is_avoided(worker: int) -> None:
    gang = row(placement=(Place("n1", (0,), (1000,)), Place("n2", (0,), (1000,))), workers=2)
    nodes = tuple(NodeStatus(f"n{n}", "", (0, 1, 2, 3), virtual=True) for n in range(1, 5))
    waits = after(StartBackoff(), 100.0, gang, nodes, worker=worker)
    assert [node for node, _ in waits.avoids] == [f"n{worker + 1}"]


def test_in_a_gang_a_worker_that_cannot_write_ends_the_attempt_before_it_ran() -> None:
    """The other worker has started, and is ended because of it."""
    key = ("j-1", 1)
    failed = WorkerStatus(ended_at=5.0, exit_code=73, storage_failed=True, message=SAYS)
    running = WorkerStatus(started_at=4.0)
    assert attempt_of(key, {0: running, 1: failed}, 2).phase is Phase.STARTING
    ended = WorkerStatus(started_at=4.0, ended_at=6.0, exit_code=-15, message="stopped")
    seen = attempt_of(key, {0: ended, 1: failed}, 2)
    assert (seen.phase, seen.storage_failed, seen.worker) == (Phase.EXITED, True, 1)
    assert (seen.exit_code, seen.message) == (73, SAYS)


def test_a_job_that_is_cancelled_meanwhile_is_cancelled() -> None:
    assert after(StartBackoff(), 100.0, row(cancel_requested=True)).state == "cancelled"


def test_a_folder_that_the_kubelet_cannot_make_counts_the_same() -> None:
    waits = after(StartBackoff(), 100.0, phase=Phase.LOST, never_ran=True, exit_code=None)
    assert waits.reason_code == CHECKPOINT_STORAGE


def test_a_report_of_an_older_launcher_says_nothing_of_it() -> None:
    assert not worker_of({"exit": {"exit_code": 73, "ended_at": 5.0}}).storage_failed
    assert worker_of({"exit": {"exit_code": 73, "ended_at": 5.0, "storage_failed": True}}).storage_failed


def test_a_failure_is_remembered_for_its_team_until_a_job_of_it_runs_or_a_day_has_passed() -> None:
    failures, backoff = CheckpointFailures(), StartBackoff()
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
            entry.status = replace(entry.status, **ended)  # type: ignore[arg-type]


async def test_the_job_its_decisions_and_the_next_dry_run_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_DELAY", "MAX_DELAY", "RARE_DELAY"):
        monkeypatch.setattr(f"makeway_quota.control.start_backoff.{name}", 0.05)
    backend = ReadOnly(NODES, real_time=True)
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        ana, wanted = run.client("ana"), JobRequest(command=["true"], profile="gpu1", dry_run=True)
        assert (await ana.dry_run(wanted)).notes == []
        job = await run.submit("ana", "train", profile="gpu1")
        async with asyncio.timeout(60):
            while [item.code for item in await ana.job_events(job.id)].count(CHECKPOINT_STORAGE) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await ana.job(job.id)).failures == 0
        (note,) = (await ana.dry_run(wanted)).notes
        assert note == (
            "It might not start: the last job of R&D could not keep checkpoints: “train” of ana cannot be started yet: "
            f"{SAYS}."
        )
        again = await run.submit("ana", "again", profile="gpu1")
        assert note in again.notes
        await ana.cancel(again.id)  # there is one GPU
        backend.mended = True
        await run.job(job.id, "running")
        assert (await ana.dry_run(wanted)).notes == []
