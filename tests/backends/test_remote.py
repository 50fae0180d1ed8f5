"""Attempts of workers elsewhere: what their reports mean together, and what silence and absence mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from makeway_quota.backends.base import (
    LOST_AFTER,
    AttemptStatus,
    BackendUnavailable,
    Key,
    NodeStatus,
    Phase,
    StartOrder,
)
from makeway_quota.backends.remote.backend import REPORT_GRACE, REPORT_WITHIN, RemoteBackend, WorkerHosts
from makeway_quota.backends.remote.workers import WorkerStatus, attempt_of
from makeway_quota.values import Notice

KEY = ("j1", 1)
RUNS = WorkerStatus(started_at=10.0)
ENDED = replace(RUNS, ended_at=20.0, exit_code=0)
NOTICE = Notice("reclaim", at=100.0, deadline=130.0)


class Reported:
    """A channel whose reports the test writes."""

    def __init__(self) -> None:
        self.workers: dict[Key, dict[int, WorkerStatus]] = {}
        self.silent_for = [0.0, 0.0]
        """seconds, by worker"""
        self.forgotten: list[Key] = []

    def on_change(self, wake: Callable[[], None]) -> None:
        """Never wake."""

    async def refresh(self) -> bool:
        return True

    def worker_statuses(self) -> Mapping[Key, Mapping[int, WorkerStatus]]:
        return self.workers

    def changed(self) -> set[Key]:
        return set(self.workers)

    def silent(self, seconds: float) -> Mapping[Key, int]:
        late = [n for n, w in self.workers.get(KEY, {}).items() if not w.ended and self.silent_for[n] >= seconds]
        return dict.fromkeys([KEY], late[0]) if late else {}

    async def forget(self, workload: str, attempt: int) -> None:
        self.forgotten.append((workload, attempt))
        self.workers.pop((workload, attempt), None)

    def credentials(self, workload: str, attempt: int, worker: int) -> tuple[str, str]:
        return "", ""

    async def log(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int]:
        return b"", 0

    async def log_gap(self, workload: str, attempt: int) -> tuple[int, int] | None:
        return None

    async def output(self, workload: str, attempt: int, kind: str, offset: int, size: int) -> tuple[bytes, int] | None:
        whole = b"r" * 3_000_000
        return (whole[offset : offset + size], len(whole)) if kind == "result" else None


class Cluster(RemoteBackend):
    """Machines that the test brings and takes."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(monotonic=lambda: self.now, clock=lambda: self.now)
        self.reported = Reported()
        self.connect(self.reported)
        self.there: dict[Key, WorkerHosts] = {KEY: WorkerHosts(1)}
        self.synced = True
        self.removed: list[Key] = []
        self.away = False
        """machines cannot be removed at the moment"""

    async def nodes(self) -> Mapping[str, NodeStatus]:
        return {}

    async def hosts(self) -> Mapping[Key, WorkerHosts] | None:
        return self.there if self.synced else None

    async def start(self, order: StartOrder) -> None:
        self.there.setdefault((order.workload, order.attempt), WorkerHosts(len(order.workers)))

    async def remove(self, workload: str, attempt: int) -> None:
        if self.away:
            raise BackendUnavailable("nothing answers")
        self.removed.append((workload, attempt))
        self.there.pop((workload, attempt), None)

    async def one(self) -> AttemptStatus | None:
        """What is reported about the attempt."""
        return next((seen for seen in (await self.observe()).attempts if seen.key == KEY), None)

    def report(self, *workers: WorkerStatus) -> None:
        self.reported.workers[KEY] = dict(enumerate(workers))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


async def phase(cluster: Cluster) -> Phase:
    seen = await cluster.one()
    assert seen is not None
    return seen.phase


async def test_an_attempt_starts_runs_and_ends_by_its_workers_reports(cluster: Cluster) -> None:
    assert await phase(cluster) is Phase.STARTING
    cluster.report(WorkerStatus())
    assert await phase(cluster) is Phase.STARTING, "it was claimed, and reads its files"
    cluster.report(replace(RUNS, step=3, saved_at=15.0))
    seen = await cluster.one()
    assert seen is not None
    assert (seen.phase, seen.started_at, seen.step, seen.checkpoint_at) == (Phase.RUNNING, 10.0, 3, 15.0)
    cluster.report(replace(ENDED, completed=True, message="done"))
    seen = await cluster.one()
    assert seen is not None
    assert (seen.phase, seen.exit_code, seen.completed, seen.ended_at) == (Phase.EXITED, 0, True, 20.0)
    await cluster.forget(*KEY)
    assert await cluster.one() is None
    assert cluster.removed == cluster.reported.forgotten == [KEY]


def gang(*workers: WorkerStatus, size: int = 0) -> AttemptStatus:
    return attempt_of(KEY, dict(enumerate(workers)), size or len(workers))


def test_a_gang_runs_when_all_run_and_ends_when_all_have_ended() -> None:
    assert gang(RUNS, size=2).phase is Phase.STARTING
    assert gang(RUNS, WorkerStatus()).phase is Phase.STARTING
    assert gang(RUNS, RUNS).phase is Phase.RUNNING
    assert gang(RUNS, replace(RUNS, notice_received=True)).phase is Phase.STOPPING
    assert gang(RUNS, ENDED).phase is Phase.RUNNING
    assert gang(ENDED, ENDED).phase is Phase.EXITED


def test_a_failure_of_one_worker_is_that_of_the_gang() -> None:
    failed = replace(ENDED, exit_code=3, message="exit code 3: ValueError")
    killed = replace(ENDED, exit_code=-9, killed=True, message="stopped")
    seen = gang(killed, failed, ENDED)
    assert (seen.exit_code, seen.message, seen.completed) == (3, "exit code 3: ValueError", False)
    assert gang(killed, ENDED).exit_code == -9
    saved = replace(ENDED, exit_code=75, acknowledged=True, notice_received=True)
    assert gang(saved, saved).acknowledged
    assert gang(saved, ENDED).acknowledged
    assert not gang(saved, killed).acknowledged
    assert gang(replace(ENDED, completed=True), ENDED).completed
    assert not gang(replace(ENDED, completed=True), saved).completed
    assert not gang(replace(ENDED, result_unsent=True), replace(ENDED, completed=True)).completed
    assert gang(replace(ENDED, result_unsent=True), ENDED).result_lost
    assert gang(replace(ENDED, result_refused=True, completed=True), ENDED).result_lost
    assert not gang(ENDED, ENDED).result_lost


def test_an_unavailable_service_says_nothing_about_the_job() -> None:
    ended = replace(ENDED, exit_code=75, acknowledged=True, notice_received=True)
    assert not gang(ended).node_lost
    assert gang(replace(ended, service_unavailable=True), ENDED).node_lost


async def test_a_worker_that_is_silent_for_too_long_is_lost_and_stays_so(cluster: Cluster) -> None:
    cluster.report(RUNS)
    cluster.reported.silent_for[0] = LOST_AFTER - 1
    assert await phase(cluster) is Phase.RUNNING
    cluster.reported.silent_for[0] = LOST_AFTER
    seen = await cluster.one()
    assert seen is not None
    assert seen.phase is Phase.LOST
    assert not seen.node_lost, "its machine is there: the job may have stopped its launcher"
    assert "not heard of for 5 min" in seen.message
    cluster.reported.silent_for[0] = 0.0
    assert await phase(cluster) is Phase.LOST, "its attempt is fenced by now"
    cluster.report(replace(ENDED, completed=True))
    assert await phase(cluster) is Phase.LOST


async def test_silence_does_not_count_where_the_node_is_gone_or_nothing_is_known(cluster: Cluster) -> None:
    cluster.report(RUNS)
    cluster.reported.silent_for[0] = LOST_AFTER
    cluster.there[KEY] = WorkerHosts(1, node_lost=True)
    seen = await cluster.one()
    assert seen is not None
    assert (seen.phase, seen.node_lost) == (Phase.LOST, True)
    unknown = Cluster()
    unknown.synced = False
    unknown.report(RUNS)
    unknown.reported.silent_for[0] = LOST_AFTER
    seen = await unknown.one()
    assert seen is not None
    assert (seen.phase, seen.node_lost) == (Phase.LOST, True)


async def test_one_that_ended_may_be_silent(cluster: Cluster) -> None:
    cluster.report(ENDED, RUNS)
    cluster.reported.silent_for[0] = 10 * LOST_AFTER
    cluster.there[KEY] = WorkerHosts(2)
    assert await phase(cluster) is Phase.RUNNING


async def test_a_machine_that_is_gone_has_a_moment_for_its_report(cluster: Cluster) -> None:
    cluster.report(RUNS)
    cluster.there[KEY] = WorkerHosts(1, present=False)
    assert await phase(cluster) is Phase.RUNNING
    cluster.now += REPORT_GRACE
    seen = await cluster.one()
    assert seen is not None
    assert (seen.phase, seen.node_lost) == (Phase.LOST, False)
    assert "vanished without a report" in seen.message


async def test_a_machine_that_comes_back_in_time_is_not_lost(cluster: Cluster) -> None:
    cluster.report(RUNS)
    cluster.there[KEY] = WorkerHosts(1, present=False)
    await cluster.observe()
    cluster.there[KEY] = WorkerHosts(1)
    cluster.now += REPORT_GRACE
    await cluster.observe()
    cluster.there[KEY] = WorkerHosts(1, present=False)
    assert await phase(cluster) is Phase.RUNNING


async def test_a_machine_that_went_with_its_node_does_not_count(cluster: Cluster) -> None:
    cluster.report(RUNS)
    cluster.there[KEY] = WorkerHosts(1, present=False, node_lost=True)
    await cluster.observe()
    cluster.now += REPORT_GRACE
    seen = await cluster.one()
    assert seen is not None
    assert (seen.phase, seen.node_lost) == (Phase.LOST, True)


async def test_machines_that_never_report_are_lost_but_not_while_they_wait(cluster: Cluster) -> None:
    cluster.there[KEY] = WorkerHosts(1, waiting_reason="image_pull", message="pulling the image")
    for _ in range(3):
        seen = await cluster.one()
        assert seen is not None
        assert (seen.phase, seen.waiting_reason, seen.message) == (Phase.STARTING, "image_pull", "pulling the image")
        cluster.now += REPORT_WITHIN
    cluster.there[KEY] = WorkerHosts(1)
    assert await phase(cluster) is Phase.STARTING
    cluster.now += REPORT_WITHIN
    seen = await cluster.one()
    assert seen is not None
    assert (seen.phase, seen.node_lost) == (Phase.LOST, False)


@pytest.mark.parametrize("end", ["notice", "kill"])
async def test_machines_that_do_not_end_in_time_are_removed(cluster: Cluster, end: str) -> None:
    cluster.report(RUNS)
    if end == "notice":
        await cluster.notice(*KEY, NOTICE)
        await cluster.notice(*KEY, replace(NOTICE, deadline=200.0))
        assert await phase(cluster) is Phase.RUNNING
        cluster.now += 30.0
    else:
        await cluster.kill(*KEY)
    cluster.now += REPORT_GRACE - 1
    assert await phase(cluster) is Phase.RUNNING
    cluster.now += 1
    await cluster.observe()
    seen = await cluster.one()
    assert cluster.removed == [KEY]
    assert seen is not None
    assert (seen.phase, seen.exit_code, seen.killed) == (Phase.EXITED, -9, True)


async def test_the_report_of_a_worker_goes_before_the_removal_of_its_machine(cluster: Cluster) -> None:
    cluster.report(RUNS)
    await cluster.notice(*KEY, NOTICE)
    cluster.report(replace(ENDED, exit_code=75, acknowledged=True, notice_received=True))
    del cluster.there[KEY]
    cluster.now += 10 * REPORT_GRACE
    seen = await cluster.one()
    assert seen is not None
    assert (seen.exit_code, seen.acknowledged) == (75, True)
    assert cluster.removed == []


async def test_outputs_are_read_whole(cluster: Cluster) -> None:
    assert len(await cluster.result(*KEY) or b"") == 3_000_000
    assert await cluster.error(*KEY) is None


async def test_a_follower_concludes_nothing_for_good_and_removes_nothing(cluster: Cluster) -> None:
    leads = False
    cluster.fence_with(lambda: leads)
    cluster.report(RUNS)
    await cluster.kill(*KEY)
    cluster.reported.silent_for[0] = LOST_AFTER
    cluster.now += 10 * REPORT_GRACE
    assert await phase(cluster) is Phase.LOST
    assert cluster.removed == []
    cluster.reported.silent_for[0] = 0.0
    assert await phase(cluster) is Phase.RUNNING, "another replica heard of it meanwhile"
    leads = True
    await cluster.observe()
    assert cluster.removed == [KEY]


async def test_a_new_term_concludes_anew(cluster: Cluster) -> None:
    """What the last term concluded may never have been committed, and another replica may have led since."""
    cluster.report(RUNS)
    await cluster.kill(*KEY)
    cluster.reported.silent_for[0] = LOST_AFTER
    assert await phase(cluster) is Phase.LOST
    cluster.reported.silent_for[0] = 0.0
    assert await phase(cluster) is Phase.LOST
    cluster.begin_term()
    assert await phase(cluster) is Phase.RUNNING
    cluster.now += 10 * REPORT_GRACE
    assert await phase(cluster) is Phase.RUNNING
    assert cluster.removed == [], "it was not ordered in this term"


async def test_a_kill_before_any_report_removes_the_machines_at_once(cluster: Cluster) -> None:
    await cluster.kill(*KEY)
    await cluster.observe()
    assert cluster.removed == [KEY]


async def test_nothing_is_new_while_nothing_changes(cluster: Cluster) -> None:
    cluster.report(RUNS)
    first = await cluster.observe()
    again = await cluster.observe(first.version)
    assert (again.whole, again.attempts, again.version) == (False, (), first.version)


async def test_before_the_list_is_complete_absence_means_nothing(cluster: Cluster) -> None:
    cluster.synced = False
    cluster.report(RUNS)
    for _ in range(3):
        seen = await cluster.observe()
        assert (seen.synced, [item.phase for item in seen.attempts]) == (False, [Phase.RUNNING])
        cluster.now += 10 * REPORT_GRACE
    cluster.synced = True
    assert await phase(cluster) is Phase.RUNNING
    del cluster.there[KEY]
    await cluster.observe()
    cluster.now += REPORT_GRACE
    assert await phase(cluster) is Phase.LOST


async def test_machines_that_ended_by_their_job_end_it_with_their_exit_code(cluster: Cluster) -> None:
    cluster.report(RUNS)
    assert await phase(cluster) is Phase.RUNNING
    cluster.there[KEY] = WorkerHosts(1, present=False, message="it used more memory than it has", exit_code=137)
    assert await phase(cluster) is Phase.RUNNING, "its report may still come"
    cluster.now += REPORT_GRACE
    seen = await cluster.one()
    assert seen is not None
    assert (seen.phase, seen.exit_code, seen.message) == (Phase.EXITED, 137, "it used more memory than it has")


async def test_the_message_of_lost_machines_is_that_of_the_attempt(cluster: Cluster) -> None:
    cluster.report(RUNS)
    await cluster.observe()
    cluster.there[KEY] = WorkerHosts(1, present=False, node_lost=True, message="its node n1 is gone")
    await cluster.observe()
    cluster.now += REPORT_GRACE
    seen = await cluster.one()
    assert seen is not None
    assert (seen.phase, seen.node_lost, seen.message) == (Phase.LOST, True, "its node n1 is gone")


async def test_a_removal_that_fails_is_tried_again(cluster: Cluster) -> None:
    cluster.report(RUNS)
    await cluster.observe()
    await cluster.kill(*KEY)
    cluster.now += REPORT_GRACE
    cluster.away = True
    assert await phase(cluster) is Phase.RUNNING
    assert not cluster.removed
    cluster.away = False
    await cluster.observe()
    assert cluster.removed == [KEY]
