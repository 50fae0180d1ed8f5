"""Connect the service with workers that are no processes of it: their reports, their outputs, their credentials.

Workers send to any replica (`services/jobs/attempts.py`); reports reach the others by the store, and wake the loop.
How long a worker is silent is counted while this process observes: a downtime of the service makes no worker lost.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from makeway_api.models.attempts import WorkerReportIn

from ...backends.base import LOST_AFTER, Key
from ...backends.remote.workers import WorkerStatus
from ...quarantine import Quarantine
from ...store.reports.worker_reports import WorkerKey, WorkerReport
from ...store.storage.outputs import Kind
from ...store.store import Store
from .tokens import AttemptTokens

READING, RECORDING = "reading a report of its worker", "recording the end of its worker"
MAX_STEP = 15.0
"""Seconds that may pass between two observations and still count as time in which a worker could be heard."""
HEARD_EVERY = 20.0
"""Seconds between two writes of when workers were heard of, for other replicas."""
STALE_SECONDS = 15.0
"""Seconds without an answer of the database after which this process cannot tell workers what they have to do."""
READ_ALL_EVERY = 60.0
"""Seconds between two reads of all reports, which also shows those that are gone."""


class WorkerChannel:
    """The reports as they were read last, and when each worker was heard of. For the event loop only."""

    def __init__(
        self,
        store: Store,
        tokens: AttemptTokens,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        lost_after: float = LOST_AFTER,
    ) -> None:
        self.tokens = tokens
        self.lost_after = lost_after
        self.quarantine = Quarantine()
        """that of the loop, once it runs"""
        self._store = store
        self._clock = clock
        self._monotonic = monotonic
        self._wake: Callable[[], None] = lambda: None
        self._connected = False
        self._reports: dict[Key, dict[int, WorkerReport]] = {}
        self._statuses: dict[Key, dict[int, WorkerStatus]] = {}
        self._changed: set[Key] = set()
        self._heard: dict[WorkerKey, float] = {}
        """on `_awake`"""
        self._unwritten: dict[WorkerKey, float] = {}
        self._serial = 0
        self._awake = 0.0
        """seconds in which this process could hear from workers"""
        self._stepped = self._read_at = monotonic()
        self._read_all_at = -READ_ALL_EVERY
        self._written_at = monotonic()
        self._lock = asyncio.Lock()

    @property
    def used(self) -> bool:
        """Whether the backend has workers that report."""
        return self._connected

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a worker reports something new; a backend with such workers does so."""
        self._wake = wake
        self._connected = True

    def wake(self) -> None:
        """Report that a worker has written something new."""
        self._wake()

    # -- for the backend

    async def refresh(self) -> bool:
        """Read the reports that changed; return whether there is something new."""
        async with self._lock:
            now = self._monotonic()
            self._awake += min(MAX_STEP, now - self._stepped)
            self._stepped = now
            whole = now - self._read_all_at >= READ_ALL_EVERY
            result = await asyncio.to_thread(self._store.worker_reports.after, 0 if whole else self._serial)
            self._read_at = self._monotonic()
            if whole:
                self._read_all_at = now
                self._keep({report.key for report in result})
            changed = False
            for report in result:
                with self.quarantine.guard(READING, "workload", report.workload):
                    changed |= self._take(report)
            return changed

    def _take(self, report: WorkerReport) -> bool:
        workers = self._reports.setdefault((report.workload, report.attempt), {})
        before = workers.get(report.worker)
        if before is not None and before.serial >= report.serial:
            return False
        self._serial = max(self._serial, report.serial)
        if report.damaged:  # it stays as it was read before, until the worker reports again
            raise ValueError(report.damaged)
        workers[report.worker] = report
        if before is None or before.heard_at != report.heard_at:
            self._heard[report.key] = self._awake
        if before is not None and before.report == report.report:
            return False
        key = report.workload, report.attempt
        self._statuses.setdefault(key, {})[report.worker] = worker_of(report.report)
        self._changed.add(key)
        return True

    def worker_statuses(self) -> Mapping[Key, Mapping[int, WorkerStatus]]:
        """Return the workers that were heard of, by attempt and number."""
        return self._statuses

    def changed(self) -> set[Key]:
        """Return the attempts whose workers reported something new, or were forgotten, since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def silent(self, seconds: float) -> Mapping[Key, int]:
        """Map each attempt to a worker that has neither reported for `seconds` nor ended.

        Time in which this process did not observe, as before it started, does not count.
        """
        since = self._awake - seconds
        late = [key for key, at in self._heard.items() if at <= since]
        return {key[:2]: key[2] for key in late if (w := self._statuses.get(key[:2], {}).get(key[2])) and not w.ended}

    def stored_report(self, report: WorkerReportIn) -> dict[str, Any]:
        """Return a report as it is stored: with what only this process knows of the service."""
        given = report.model_dump(exclude={"progress"})  # it has rows of its own, written less often
        if report.exit is not None:
            given["exit"]["service_unavailable"] = report.exit.unheard and self.just_started
        return given

    async def record_final_reports(self, ends: Mapping[WorkerKey, WorkerReportIn]) -> set[WorkerKey]:
        """Record the ends of workers that their machines report, and read them, but none that a worker has reported.

        Return the workers whose end could not be recorded. A worker ends after its report was taken, so a report that
        is not there now will not come.
        """
        await self.refresh()
        unknown: dict[WorkerKey, dict[str, Any]] = {}
        for worker, report in ends.items():
            status = self._statuses.get(worker[:2], {}).get(worker[2])
            if status is not None and not status.ended:
                unknown[worker] = self.stored_report(report)

        failed = set(unknown)
        for worker, given in unknown.items():
            if not self.quarantine.is_backing_off(RECORDING, "workload", worker[0]):
                with self.quarantine.guard(RECORDING, "workload", worker[0]):
                    await asyncio.to_thread(self._store.worker_reports.write, worker, given, self._clock())
                    failed.discard(worker)
        if unknown:
            await self.refresh()
        return failed

    async def forget(self, workload: str, attempt: int) -> None:
        """Drop the reports of an attempt whose end is recorded."""
        async with self._lock:  # a read that is under way would bring them back
            if (workers := self._reports.pop((workload, attempt), None)) is not None:
                for report in workers.values():
                    self._heard.pop(report.key, None)
                    self._unwritten.pop(report.key, None)
                self._statuses.pop((workload, attempt), None)
                self._changed.add((workload, attempt))
                await asyncio.to_thread(self._store.worker_reports.forget, workload, attempt)

    def credentials(self, workload: str, attempt: int, worker: int) -> tuple[str, str]:
        """Return the path below the service's address that a worker has to itself, and its first token."""
        return f"api/v1/attempts/{workload}/{attempt}/{worker}", self.tokens.token((workload, attempt, worker))

    async def log(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int]:
        """Return bytes of an attempt's log and its length."""
        return await asyncio.to_thread(self._store.outputs.read, workload, attempt, "log", offset, size)

    async def log_gap(self, workload: str, attempt: int) -> tuple[int, int] | None:
        """Return the bytes of a long log that were dropped."""
        return await asyncio.to_thread(self._store.outputs.gap, workload, attempt)

    async def output(self, workload: str, attempt: int, kind: str, offset: int, size: int) -> tuple[bytes, int] | None:
        """Return bytes of a result or an exception and the size of the whole; None without one."""
        outputs, named = self._store.outputs, cast(Kind, kind)
        data, length = await asyncio.to_thread(outputs.read, workload, attempt, named, offset, size)
        if not length and not await asyncio.to_thread(outputs.has, workload, attempt, named):
            return None
        return data, length

    # -- for the requests of workers

    def record_contact(self, key: WorkerKey) -> None:
        """Note that a worker was heard of now."""
        self._heard[key] = self._awake
        self._unwritten[key] = self._clock()

    @property
    def just_started(self) -> bool:
        """Whether this process has heard workers for less than `lost_after`: the service may have been down before."""
        return self._awake < self.lost_after

    @property
    def stale(self) -> bool:
        """Whether the database has not been read for so long that other replicas may have decided anything."""
        return self._connected and self._monotonic() - self._read_at > STALE_SECONDS

    @property
    def workers(self) -> int:
        """The number of workers that were heard of."""
        return len(self._heard)

    def report(self, key: WorkerKey) -> Mapping[str, Any] | None:
        """Return the last report of a worker that this process knows, None if it knows none."""
        known = self._reports.get(key[:2], {}).get(key[2])
        return None if known is None else known.report

    def gang_failed(self, key: WorkerKey) -> bool:
        """Whether another worker of the same attempt has failed."""
        workers = self._statuses.get(key[:2], {})
        return any(w.ended and w.exit_code not in (0, 75) for number, w in workers.items() if number != key[2])

    def failed_worker(self, key: WorkerKey, notice_signal: str) -> tuple[int, int] | None:
        """Return the other worker of the same attempt that failed first, and its exit code; None if none did.

        One that had notice did not fail if it acknowledged it, or if its signal ended it.
        """
        number_of_ours = _number_of(notice_signal)
        ours = (-number_of_ours, 128 + number_of_ours)
        failed = [
            (w.ended_at or 0.0, number, w.exit_code)
            for number, w in self._statuses.get(key[:2], {}).items()
            if number != key[2] and w.exit_code is not None and w.exit_code not in (0, 75)
            if not (w.notice_received and (w.acknowledged or w.exit_code in ours))
        ]
        return min(failed)[1:] if failed else None

    def gang_stopped_at(self, key: WorkerKey) -> float | None:
        """Return when another worker of the same attempt ended on a notice, in Unix seconds; None if none did."""
        others = [w for number, w in self._statuses.get(key[:2], {}).items() if number != key[2]]
        ends = [w.ended_at or 0.0 for w in others if w.exit_code in (0, 75) and w.notice_received and not w.completed]
        return min(ends, default=None)

    # -- for other replicas

    async def write_heard(self) -> None:
        """Write when workers were heard of here, from time to time."""
        now = self._monotonic()
        if not self._unwritten or now - self._written_at < HEARD_EVERY:
            return
        self._written_at = now
        times, self._unwritten = self._unwritten, {}
        await asyncio.to_thread(self._store.worker_reports.heard, times)

    def _keep(self, keys: Collection[WorkerKey]) -> None:
        """Drop the reports that are not among these: another replica has forgotten them."""
        for key, workers in list(self._reports.items()):
            for number in [number for number, report in workers.items() if report.key not in keys]:
                del workers[number], self._statuses[key][number]
                self._changed.add(key)
            if not workers:
                del self._reports[key], self._statuses[key]
        self._heard = {key: at for key, at in self._heard.items() if key in keys}
        self._unwritten = {key: at for key, at in self._unwritten.items() if key in keys}


def _number_of(name: str) -> int:
    """Return the number of a job's signal."""
    try:
        return signal.Signals[name].value
    except KeyError:
        return signal.SIGTERM.value


def worker_of(report: Mapping[str, Any]) -> WorkerStatus:
    """Return a report as the backend reads it."""
    end = report.get("exit") or {}
    return WorkerStatus(
        started_at=report.get("started_at"),
        step=report.get("step"),
        saved_at=report.get("saved_at"),
        notice_received=bool(report.get("noticed")),
        ended_at=end.get("ended_at"),
        exit_code=end.get("exit_code"),
        killed=bool(end.get("killed")),
        acknowledged=bool(end.get("acknowledged")),
        completed=bool(end.get("completed")) and not end.get("result_unsent"),
        timed_out=bool(end.get("timed_out")),
        storage_failed=bool(end.get("storage_failed")),
        service_unavailable=bool(end.get("service_unavailable") or end.get("service_away")),  # its name before
        result_unsent=bool(end.get("result_unsent")),
        result_refused=bool(end.get("result_refused")),
        message=str(end.get("message") or ""),
    )
