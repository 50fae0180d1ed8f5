"""Orders that a backend cannot carry out, and impossible reports: other jobs are not affected."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import time
from pathlib import Path

import pytest
from makeway_quota.backends.base import (
    AttemptStatus,
    BackendError,
    BackendFull,
    BackendRejected,
    BackendUnavailable,
    NodeStatus,
    Observation,
    Phase,
    StartOrder,
)
from makeway_quota.backends.local.backend import LocalBackend
from makeway_quota.backends.memory import MemoryAttempt, MemoryBackend
from makeway_quota.control.reconcile import reconcile
from makeway_quota.store.records import Change, NewWorkload, Workload
from makeway_quota.store.rows import initial_record
from makeway_quota.values import Notice
from running import Running, python, running

NODE = NodeStatus("local", "", tuple(range(10)), virtual=True)


class Faulty(MemoryBackend):
    """A backend whose disk is full: `broken` has the names of the jobs for which an order fails, by order."""

    def __init__(self) -> None:
        super().__init__([NODE], real_time=True)
        self.broken: dict[str, set[str]] = {"start": set(), "notice": set(), "kill": set(), "forget": set()}
        self.error: Exception = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/state/jobs")

    def _check(self, order: str, workload: str, attempt: int) -> None:
        known = self.attempts.get((workload, attempt))
        name = known.order.name if known else ""
        if name in self.broken[order]:
            raise self.error

    async def start(self, order: StartOrder) -> None:
        if order.name in self.broken["start"]:
            raise self.error
        await super().start(order)

    async def notice(self, workload: str, attempt: int, notice: Notice) -> None:
        self._check("notice", workload, attempt)
        await super().notice(workload, attempt, notice)

    async def kill(self, workload: str, attempt: int) -> None:
        self._check("kill", workload, attempt)
        await super().kill(workload, attempt)

    async def forget(self, workload: str, attempt: int) -> None:
        self._check("forget", workload, attempt)
        await super().forget(workload, attempt)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/state/jobs"), "No space left on device (/state/jobs)"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), "Permission denied"),
        (OSError("the pipe broke"), "the pipe broke"),
        (TimeoutError(), "TimeoutError"),
        (BackendError("There is no command to run."), "There is no command to run."),
    ],
)
async def test_a_job_that_cannot_be_started_fails_alone(tmp_path: Path, error: Exception, said: str) -> None:
    backend = Faulty()
    backend.broken["start"], backend.error = {"ill"}, error
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        ill = await run.submit("ana", "ill", profile="gpu3")
        well = await run.submit("ana", "well", profile="gpu3")
        assert (await run.job(well.id, "running")).state.value == "running"
        failed = await run.job(ill.id, "failed")
        assert failed.message == f"“ill” of ana could not be started: {said}"
        assert failed.reason is not None
        assert failed.reason.code == "could_not_start"
        assert run.service.components.world.failure is None
        assert (await run.used())["rnd"] == 3, "its GPUs are free"


async def test_a_job_starts_with_the_cpu_and_memory_that_it_was_planned_with(tmp_path: Path) -> None:
    """The policy document may give its profile others while it waits."""
    backend = Faulty()
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        first = await run.submit("ana", "first", profile="gpu8")
        await run.job(first.id, "running")
        job = await run.submit("ana", "sized", profile="gpu8")
        size = {"cpu": 1500, "memory": 2048}
        run.service.components.store.commit([Change(job.id, size)], [], now=time.time())
        await run.client("ana").cancel(first.id)
        await run.job(job.id, "running")
        order = backend.attempts[job.id, 1].order
        assert {"cpu": order.cpu, "memory": order.memory} == size


async def test_gpus_of_a_job_that_the_backend_has_no_room_for_go_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("makeway_quota.control.start_backoff.FIRST_DELAY", 300.0)
    backend = Faulty()
    backend.broken["start"], backend.error = {"large"}, BackendFull("the quota of the namespace is used up.")
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        large = await run.submit("ana", "large", profile="gpu8")
        await run.until(lambda: (row := run.service.components.store.workload(large.id)) and row.attempt == 1, "a try")
        small = await run.submit("ana", "small", profile="gpu3")
        await run.job(small.id, "running")
        waits = await run.job(large.id, "pending")
        assert waits.reason is not None
        assert waits.reason.code == "no_room"
        assert waits.reason.message == (
            "“large” of ana cannot be started yet: the quota of the namespace is used up. Its GPUs go to others; it "
            "waits 5 min before the next try."
        )
        await run.client("ana").cancel(small.id)
        await run.job(small.id, "cancelled")
        backend.broken["start"].clear()
        run.service.components.store.commit([Change(large.id, {"not_before": time.time()})], [], now=time.time())
        done = await run.job(large.id, "running")
        assert (done.failures, len(done.attempts)) == (0, 1), "what was never started is no attempt"


async def test_the_output_of_an_earlier_attempt_is_shown_while_a_later_one_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("makeway_quota.control.start_backoff.FIRST_DELAY", 300.0)

    class Later(LocalBackend):
        async def start(self, order: StartOrder) -> None:
            if order.attempt > 1:
                raise BackendFull("the quota of the namespace is used up.")
            await super().start(order)

    backend = Later(tmp_path, virtual_gpus=10, tick=0.2)
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        ana = run.client("ana")
        code = "import time; print('half way', flush=True); time.sleep(600)"
        job = await run.submit("ana", "train", command=python(code), profile="gpu3")

        async def there(line: str) -> bool:
            return line in (await ana.logs(job.id)).text

        await run.job(job.id, "running")
        await run.until(lambda: there("half way"), "its first line")
        await ana.preempt_test(job.id)
        await run.until(lambda: (row := run.service.components.store.workload(job.id)) and row.attempt == 2, "a try")
        waits = await run.job(job.id, "pending")
        assert waits.reason is not None
        assert waits.reason.code == "no_room"
        assert await there("half way")
        await ana.cancel(job.id)


async def test_a_start_that_is_refused_in_ever_new_words_is_repeated_less_and_less(tmp_path: Path) -> None:
    """A webhook that is down names another port of the API server each time."""

    class Down(Faulty):
        tries = 0

        async def start(self, order: StartOrder) -> None:
            self.tries += 1
            raise BackendRejected(f"read tcp 10.0.0.2:{40000 + self.tries}: connection reset by peer")

    backend = Down()
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.05) as run:
        store = run.service.components.store
        job = await run.submit("ana", "refused", profile="gpu1")
        await run.until(lambda: backend.tries == 1, "a first try")
        reason = lambda: (row := store.workload(job.id)) and row.reason_message  # noqa: E731
        await run.until(lambda: "40001" in (reason() or ""), "its reason")
        before, cycles = store.last_event_id(), run.service.loop.cycles
        await run.until(lambda: backend.tries == 3, "two more tries")
        assert run.service.loop.cycles - cycles > 2 * backend.tries, "cycles between them try nothing"
        assert store.last_event_id() == before, "a reason with other digits is not written"
        await run.client("ana").cancel(job.id)
        await run.job(job.id, "cancelled")
        await run.converged()
        assert run.service.loop.actuator.retries.due() is None


async def test_the_backoff_of_a_job_that_is_cancelled_is_forgotten(tmp_path: Path) -> None:
    backend = Faulty()
    backend.broken["start"], backend.error = {"large"}, BackendFull("the quota of the namespace is used up.")
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        job, backoff = await run.submit("ana", "large", profile="gpu8"), run.service.loop.actuator.backoff
        await run.until(lambda: job.id in backoff.refused, "it is in backoff")
        await run.client("ana").cancel(job.id)
        await run.job(job.id, "cancelled")
        assert backoff.refused == {}


async def test_a_job_is_cancelled_while_the_backend_finds_no_room_for_it(tmp_path: Path) -> None:
    """The request is committed while the start is under way, which is refused then."""
    asked, answer = asyncio.Event(), asyncio.Event()

    class Slow(Faulty):
        async def start(self, order: StartOrder) -> None:
            asked.set()
            await answer.wait()
            raise BackendFull("the quota of the namespace is used up.")

    async with running(tmp_path, backend=Slow(), MAKEWAY_TICK_SECONDS=0.1) as run:
        job = await run.submit("ana", "large", profile="gpu8")
        await asked.wait()
        store = run.service.components.store
        store.commit([Change(job.id, {"cancel_requested": True}, expect_states=("starting",))], [], now=time.time())
        answer.set()
        await run.job(job.id, "cancelled")


async def test_a_cancelled_job_that_waits_again_can_be_cancelled(tmp_path: Path) -> None:
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=0.1) as run:
        first = await run.submit("ana", "first", profile="gpu8", command=python("import time; time.sleep(600)"))
        job = await run.submit("ana", "waits", profile="gpu8")
        store = run.service.components.store
        store.commit([Change(job.id, {"cancel_requested": True})], [], now=time.time())
        await run.client("ana").cancel(job.id)
        await run.job(job.id, "cancelled")
        await run.client("ana").cancel(first.id)


async def test_orders_that_fail_are_repeated_and_block_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Faulty()
    backend.broken = {"start": set(), "notice": {"a"}, "kill": {"a"}, "forget": {"a"}}
    with caplog.at_level(logging.WARNING, "makeway.actuate"):
        async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
            jobs = [await run.submit("ana", name, profile="gpu3") for name in "ab"]
            for job in jobs:
                await run.job(job.id, "running")
            for job in jobs:
                await run.client("ana").preempt_test(job.id)
            await run.job(jobs[1].id, "pending", "starting", "running")
            assert (await run.job(jobs[0].id)).state.value == "checkpointing"
            backend.broken["notice"].clear()
            await attempts(run, jobs[0].id, 2)
            await run.job(jobs[0].id, "running")  # one that waits needs no order to be cancelled
            for job in jobs:
                await run.client("ana").cancel(job.id)
            await run.job(jobs[1].id, "cancelled")
            assert (await run.job(jobs[0].id)).state.value != "cancelled"
            backend.broken["kill"].clear()
            await run.job(jobs[0].id, "cancelled")
            backend.broken["forget"].clear()
            await run.until(lambda: not backend.attempts, "all is forgotten")
            assert run.service.components.world.failure is None
    message = [r.getMessage() for r in caplog.records if "could not be" in r.getMessage()]
    assert len(message) == len(set(message)), "each only once"
    assert any("could not be given its notice: No space left" in line for line in message)


async def attempts(run: Running, id: str, number: int) -> None:
    async def there() -> bool:
        return bool((await run.client("root").job(id)).attempt == number)

    await run.until(there, f"{id} has its attempt {number}")


@pytest.mark.parametrize("at", [math.inf, -math.inf, math.nan, 1e300, 1e10])
def test_times_that_cannot_be_true_are_not_believed(at: float) -> None:
    now = time.time()
    made = initial_record(NewWorkload("j-12345678", "job", "rnd", "gpu3", "ana", name="x"), now - 100)
    row: Workload = made._replace(state="running", attempt=1, started_at=now - 60, max_failures=3)
    for code in (0, 1, 75):
        for phase in (Phase.EXITED, Phase.LOST, Phase.RUNNING):
            seen = AttemptStatus(row.id, 1, phase, ended_at=at, exit_code=code, step=3, checkpoint_at=at)
            change_set = reconcile({row.id: row}, Observation((NODE,), (seen,)), now=now, max_infra_failures=3)
            for change in change_set.changes:
                assert change.fields.get("ran", 60.0) == pytest.approx(60)
                assert change.fields.get("checkpoint_at") is None
                closed = change.close_attempt or {"ended_at": now, "lost_seconds": None}
                assert closed["ended_at"] == now
                assert closed["lost_seconds"] in (None, 0.0, pytest.approx(60))


async def test_a_start_that_is_not_possible_now_is_tried_again(tmp_path: Path) -> None:
    backend = Faulty()
    backend.error = BackendUnavailable("the cluster does not answer")
    backend.broken["start"] = {"later"}
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as service:
        job = await service.submit("ana", "later", profile="gpu1")
        other = await service.submit("ana", "other", profile="gpu1")
        await service.job(other.id, "running")
        await service.converged()
        waits = await service.job(job.id, "starting")
        assert waits.attempt == 1
        assert waits.reason is not None
        assert waits.reason.message == "“later” of ana cannot be started yet: the cluster does not answer"
        backend.broken["start"] = set()
        result = await service.job(job.id, "running")
        assert (result.attempt, result.failures) == (1, 0)


class Unfinished(Faulty):
    """A backend whose first start of a job breaks off: it reports the attempt, and that its start broke off."""

    def __init__(self) -> None:
        super().__init__()
        self.tries = 0
        self.killed: list[str] = []

    async def start(self, order: StartOrder) -> None:
        self.tries += 1
        key = (order.workload, order.attempt)
        if key not in self.attempts:
            seen = AttemptStatus(*key, Phase.STARTING, start_broke_off=True)
            self.attempts[key] = MemoryAttempt(order, seen)
        elif order.name not in self.broken["start"]:
            del self.attempts[key]
            await super().start(order)
            return
        self._changed()
        raise BackendUnavailable("the cluster does not answer")

    async def kill(self, workload: str, attempt: int) -> None:
        self.killed.append(workload)
        self.attempts.pop((workload, attempt), None)
        self._changed()


async def test_a_start_that_broke_off_is_ordered_again_and_costs_no_attempt(tmp_path: Path) -> None:
    backend = Unfinished()
    backend.broken["start"] = {"never"}
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        job = await run.submit("ana", "again", profile="gpu1")
        result = await run.job(job.id, "running")
        assert (result.attempt, result.failures, len(result.attempts)) == (1, 0, 1)
        never = await run.submit("ana", "never", profile="gpu1")
        await run.until(lambda: backend.tries > 5, "it is ordered again and again")
        await run.client("ana").cancel(never.id)
        result = await run.job(never.id, "cancelled")
        assert (result.attempt, backend.killed) == (1, [never.id])
