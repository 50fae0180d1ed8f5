"""A job past its time limit and its grace is ended by the service, even where its launcher does not end it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from makeway_api.errors import MakewayError
from makeway_quota.backends.base import AttemptStatus, Observation, Phase
from makeway_quota.backends.local.backend import LocalBackend
from makeway_quota.control import time_limits
from makeway_quota.control.reconcile import reconcile
from makeway_quota.control.time_limits import AGAIN, LATE_MARGIN, MARGIN, TimeLimits
from makeway_quota.control.transitions import TIME_LIMIT, notice, overrun
from makeway_quota.engine.plan import Evict, Move
from makeway_quota.services import Caller
from makeway_quota.store import rows
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.values import Notice
from running import SAMPLE, python, running

QUICK = SAMPLE.read_text(encoding="utf-8").replace("grace: 30", "grace: 1")


def job(**fields: Any) -> Workload:
    """A job that runs with a limit of 100 s and a grace of 10 s."""
    new = NewWorkload("j-1", "job", "rnd", "gpu1", "ana", time_limit=100.0, grace=10.0)
    return rows.initial_record(new, 0.0)._replace(**{"state": "running", "attempt": 1, **fields})


class Watch:
    """Time limits on a clock of the test: the monotonic one at 1000, the time of day at 5000."""

    def __init__(self, shared: bool = False) -> None:
        self.at = 1000.0
        self.limits = TimeLimits(shared, lambda: self.at)
        self.seen = AttemptStatus("j-1", 1, Phase.RUNNING, started_at=5000.0)

    def ended(self, passed: float, row: Workload, clock: float = 0.0, **seen: Any) -> list[str]:
        """Return what is ended once so many seconds have passed, and the clock is `clock` ahead of that."""
        self.at = 1000.0 + passed
        self.seen = replace(self.seen, **seen)
        result = self.limits.overdue({row.id: row}, [self.seen], {self.seen.key: self.seen}, 5000.0 + passed + clock)
        return [change.workload for change in result.changes]


def test_a_job_is_ended_after_its_limit_its_grace_and_a_margin_and_once_only() -> None:
    watch = Watch()
    assert watch.ended(0, job()) == []
    assert watch.limits.wait() == 100 + 10 + MARGIN
    assert watch.ended(100 + 10 + MARGIN - 0.1, job()) == []
    assert watch.ended(100 + 10 + MARGIN, job()) == ["j-1"]
    assert watch.ended(5000, job(reason_code=TIME_LIMIT)) == []


def test_an_end_that_was_not_written_is_tried_again_until_it_is() -> None:
    watch = Watch()
    assert watch.ended(0, job()) == []
    assert watch.ended(200, job()) == ["j-1"]
    assert watch.limits.wait() == AGAIN
    assert watch.ended(200 + AGAIN, job()) == ["j-1"], "a report had changed the row before"
    assert watch.ended(200 + 2 * AGAIN, job(reason_code=TIME_LIMIT)) == []
    assert watch.limits.wait() is None


def test_a_launcher_that_has_given_notice_has_longer() -> None:
    watch = Watch()
    assert watch.ended(0, job()) == []
    assert watch.ended(200, job(), phase=Phase.STOPPING) == []
    assert watch.ended(100 + 10 + LATE_MARGIN, job()) == ["j-1"]


def test_a_clock_that_is_set_ends_no_job_early_nor_late() -> None:
    for ahead in (-50_000.0, 50_000.0):
        watch = Watch()
        watch.ended(0, job())
        assert watch.ended(100, job(), clock=ahead) == []
        assert watch.ended(100 + 10 + MARGIN, job(), clock=ahead) == ["j-1"]


@pytest.mark.parametrize(("started_at", "left"), [(4940.0, 40.0), (5_000_000.0, 100.0), (-1e10, 0.0), (None, 100.0)])
def test_what_ran_before_this_process_counts_as_far_as_it_can_have(started_at: float | None, left: float) -> None:
    watch = Watch()
    watch.ended(0, job(), started_at=started_at)
    assert watch.limits.wait() == left + 10 + MARGIN


def test_other_attempts_and_what_ends_anyway_is_left_alone() -> None:
    notice = Notice("for devops", 0.0, 30.0)
    for row in (
        job(time_limit=None),
        job(notice=notice),
        job(cancel_requested=True),
        job(attempt=2),
        job(state="pending"),
    ):
        watch = Watch()
        watch.ended(0, row)
        assert watch.ended(100_000, row) == []
    waiting = Watch(shared=True)
    waiting.ended(0, job(), started_at=None)
    assert waiting.ended(100_000, job()) == [], "a pod that pulls its image runs nothing yet"


def test_limits_count_for_each_attempt() -> None:
    watch = Watch()
    watch.ended(0, job())
    watch.seen = replace(watch.seen, attempt=2, started_at=5090.0)
    assert watch.ended(90, job(attempt=2)) == []
    assert watch.ended(90 + 100 + 10 + MARGIN - 1, job(attempt=2)) == []
    assert watch.ended(90 + 100 + 10 + MARGIN, job(attempt=2)) == ["j-1"]


@pytest.mark.parametrize("moved", [False, True])
def test_a_job_that_is_ended_at_its_limit_stays_so_when_it_also_makes_way(moved: bool) -> None:
    row = job(reason_code=TIME_LIMIT, reason_message="It ran past its limit.")
    evict: Evict | Move = Evict("j-1", "p", 900.0, "reclaim", (), {})
    if moved:
        evict = Move("j-1", "p", (), (), 900.0, "consolidate", (), {})
    change = notice(row, evict, "It makes way for p.", None, 800.0).change
    notice_received = row._replace(**change.fields)
    assert (notice_received.state, notice_received.reason_code, notice_received.reason_message) == (
        "checkpointing", TIME_LIMIT, "It ran past its limit.",
    )  # fmt: skip
    assert notice_received.notice is not None
    seen = AttemptStatus("j-1", 1, Phase.EXITED, exit_code=75, acknowledged=True, notice_received=True)
    [ended] = reconcile({"j-1": notice_received}, Observation((), (seen,)), now=810.0, max_infra_failures=3).changes
    assert ended.fields["state"] == "failed", "it is not requeued"
    assert "time limit" in str(ended.fields["reason_message"])


@pytest.mark.parametrize("limit_first", [True, False])
def test_what_came_first_decides_whether_a_job_is_requeued(limit_first: bool) -> None:
    """A launcher notifies its job once: of its time limit, or to make way; the other changes nothing."""
    given = Notice("It makes way for p.", 800.0, 810.0, by_team="devops", by_workload="p")
    row = job(state="checkpointing", notice=given, reason_code="making_way", evicted_for="p", max_failures=5)
    message = "time limit of 1 min 40 s reached; saved at step 4" if limit_first else "saved at step 4"
    seen = AttemptStatus(
        "j-1", 1, Phase.EXITED, exit_code=75, timed_out=limit_first, acknowledged=not limit_first,
        notice_received=not limit_first, step=4, checkpoint_at=805.0, message=message,
    )  # fmt: skip
    [ended] = reconcile({"j-1": row}, Observation((), (seen,)), now=810.0, max_infra_failures=3).changes
    assert ended.close_attempt is not None
    if limit_first:
        assert (ended.fields["state"], ended.close_attempt["outcome"]) == ("failed", "failed")
        assert "time limit of 1 min 40 s reached" in str(ended.fields["reason_message"])
    else:
        assert (ended.fields["state"], ended.close_attempt["outcome"]) == ("pending", "preempted")
        assert ended.fields["preemptions"] == 1


async def test_a_notice_to_a_job_that_its_launcher_ends_at_its_limit_does_not_requeue_it(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, lambda *_: (time.sleep(3), exit(75))); print('up', flush=True)"
    command = python(f"{code}\nwhile True: time.sleep(0.1)")
    async with running(tmp_path, QUICK.replace("grace: 1", "grace: 20")) as run:
        made = await run.submit("ana", "late", command=command, profile="gpu1", time_limit=2, max_failures=3)
        await run.job(made.id, "running")
        backend = run.service.components.backend
        assert isinstance(backend, LocalBackend)
        await run.until(lambda: any(a.files.stamp("stop.json") for a in backend._attempts.values()), "its limit")
        await run.client("ana").preempt_test(made.id)
        done = await run.job(made.id, "failed", "pending", seconds=60)
        assert (done.state.value, done.preemptions) == ("failed", 0)
        assert "time limit of 2 s reached" in done.reason.message


async def test_a_preemption_test_at_the_moment_of_the_limit_does_not_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, QUICK) as run:
        made = await run.submit("ana", "late", profile="gpu1")
        await run.job(made.id, "running")
        store = run.service.components.store
        commit, row = store.commit, store.workload(made.id)
        assert row is not None

        def late(changes: Any, decisions: Any = (), **more: Any) -> Any:
            if any("notice" in change.fields for change in changes):
                monkeypatch.setattr(store, "commit", commit)
                now = store.workload(made.id)
                assert now is not None
                commit([overrun(now, "It ran past its time limit.", "1 s").change], now=more["now"])
            return commit(changes, decisions, **more)

        monkeypatch.setattr(store, "commit", late)
        with pytest.raises(MakewayError, match=r"is ended at its time limit|is failed"):
            await run.client("ana").preempt_test(made.id)
        assert (await run.job(made.id, "failed")).preemptions == 0


async def test_a_preemption_test_of_a_job_that_is_ended_at_its_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, QUICK) as run:
        made = await run.submit("ana", "late", profile="gpu1")
        await run.job(made.id, "running")
        access = run.service.services.jobs._access
        read = access.changeable

        async def late(caller: Caller, id: str, what: str) -> Workload:
            return (await read(caller, id, what))._replace(reason_code=TIME_LIMIT)

        monkeypatch.setattr(access, "changeable", late)
        with pytest.raises(MakewayError, match="is ended at its time limit"):
            await run.client("ana").preempt_test(made.id)


async def test_a_launcher_that_its_job_stops_keeps_no_gpu_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limits, "MARGIN", 1.0)
    code = "import os, signal, time; time.sleep(1); os.kill(os.getppid(), signal.SIGSTOP); time.sleep(600)"
    async with running(tmp_path, QUICK, MAKEWAY_TICK_SECONDS=0.5) as run:
        made = await run.submit("ana", "stops it", command=python(code), profile="gpu1", time_limit=3, max_failures=3)
        done = await run.job(made.id, "failed", seconds=60)
        assert "time limit of 3 s reached" in done.reason.message
        backend = run.service.components.backend
        assert isinstance(backend, LocalBackend)
        await run.until(lambda: not backend._attempts, "nothing of it is left")
        assert (await run.used())["rnd"] == 0
        assert not _stopped()


def _stopped() -> list[int]:
    """Return the processes of this test's account that are stopped by a signal."""
    result = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_text(errors="replace")
            except OSError:
                continue
            if stat.rpartition(")")[2].split()[0] == "T" and b"launcher" in Path(f"/proc/{name}/cmdline").read_bytes():
                result.append(int(name))
    return result
