"""Measure the storage of a job once for all pages that show it. Used by `storage`.

A measurement walks the job's folder and asks its backend about each attempt. However many pages are open, there is one
measurement of a job at a time, at most AT_ONCE of all jobs, and a pause after each that grows with its duration.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from makeway_api.errors import MakewayError
from makeway_api.models import JobStorage

from ...store.records import Workload

log = logging.getLogger(__name__)

AT_ONCE = 2
"""Measurements at the same time, of all jobs"""
WAIT_SECONDS = 1.0
"""Seconds that a page waits for a measurement before it shows the previous one"""
PAUSE_SECONDS = 30.0
"""Between two measurements of a job that has not ended"""
SHORT_PAUSE_SECONDS = 2.0
"""The same of an ended job, which changes only where something is deleted, and after a failure"""
PAUSE_FACTOR = 20
"""The pause is at least this many times the duration of the measurement"""
MAX_JOBS = 1000
"""Jobs whose measurements are kept in memory"""


@dataclass(frozen=True, slots=True)
class MeasuredStorage:
    """What a job keeps, as it was measured last."""

    storage: JobStorage | None = None
    """None until the first measurement has ended"""
    at: datetime | None = None
    error: str = ""
    """Why a measurement after that failed, as a sentence"""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A measurement, the state and attempt of the job that it is of, and the monotonic time of the next one."""

    measured: MeasuredStorage
    of: tuple[str, int]
    due: float


class StorageMeasurements:
    """The newest measurement of each job that is shown on a page."""

    def __init__(self, measure: Callable[[Workload], Awaitable[JobStorage]], clock: Callable[[], float]) -> None:
        self._measure = measure
        self._clock = clock
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def latest(self, job: Workload) -> MeasuredStorage:
        """Return what a job keeps, measured now or a moment ago; an older measurement where that takes long."""
        kept = self._kept.get(job.id)
        if kept is None or kept.of != (job.state, job.attempt) or kept.due <= time.monotonic():
            task = self._tasks.get(job.id)
            if task is None:
                task = self._tasks[job.id] = asyncio.create_task(self._run(job))
            await asyncio.wait([task], timeout=WAIT_SECONDS)
            kept = self._kept.get(job.id)
        return kept.measured if kept is not None else MeasuredStorage()

    def forget(self, id: str) -> None:
        """Measure a job anew at the next request: what it keeps was changed; one under way counts for nothing."""
        self._kept.pop(id, None)
        self._tasks.pop(id, None)

    async def _run(self, row: Workload) -> None:
        """Measure a job; keep what was found, or the measurement before with the reason."""
        async with self._slots:
            began = time.monotonic()
            try:
                measured = MeasuredStorage(await self._measure(row), datetime.fromtimestamp(self._clock(), UTC))
            except Exception as error:
                before = self._kept.get(row.id)
                reason = _reason(row, error)
                known = before.measured if before is not None else MeasuredStorage()
                measured = MeasuredStorage(known.storage, known.at, f"What this job keeps was not measured: {reason}")
            finally:
                is_newest = self._tasks.get(row.id) is asyncio.current_task()
                if is_newest:
                    del self._tasks[row.id]
        if is_newest:
            now = time.monotonic()
            short = not row.live or measured.error
            pause = max(SHORT_PAUSE_SECONDS if short else PAUSE_SECONDS, PAUSE_FACTOR * (now - began))
            self._kept[row.id] = _Kept(measured, (row.state, row.attempt), now + pause)
            self._kept.move_to_end(row.id)
            while len(self._kept) > MAX_JOBS:
                self._kept.popitem(last=False)


def _reason(row: Workload, error: Exception) -> str:
    """Return why a measurement failed, as a sentence; the log has what is no refusal."""
    if isinstance(error, MakewayError):
        return str(error)
    log.error("What the job %s keeps was not measured", row.id, exc_info=error)
    return "the log of the service has the reason."
