"""End jobs that run past their time limit and grace although their launcher should have ended them.

A limit is the launcher's to keep: it has the clock, and the job its grace to save. This is for a launcher that a job
stopped, or that hangs. Limits are per attempt, and counted on the monotonic clock from when an attempt was seen first:
a clock that is set ends no job early. Called by the loop in each cycle, with what is reported.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Mapping

from makeway_api.durations import duration

from ..backends.base import AttemptStatus, Key, Phase
from ..engine.snapshot import ADMITTED
from ..quarantine import Quarantine
from ..store.records import Workload
from ..wording import outcomes
from . import transitions
from .change_set import ChangeSet, job_name
from .transitions import TIME_LIMIT

MARGIN = 15.0
"""Seconds beyond limit and grace after which a launcher that has not even given its job notice never will"""
LATE_MARGIN = 900.0
"""The same for one that has given notice: what its job wrote may take as long to reach its disk, or the service"""
AGAIN = 5.0
"""Seconds after which an attempt that is overdue, or has notice, is looked at again"""
STEP = "keeping to its time limit"


class TimeLimits:
    """When the running attempts have to be over. `monotonic` never jumps."""

    def __init__(self, reports_begin: bool, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`reports_begin`: as the backend's; an attempt counts from then on, not before."""
        self.quarantine = Quarantine()
        """that of the loop, once it runs"""
        self._reports_begin = reports_begin
        self._monotonic = monotonic
        self._known: dict[Key, float] = {}
        """when an attempt reaches its limit"""
        self._due: list[tuple[float, Key]] = []

    def wait(self) -> float | None:
        """Return the seconds until an attempt has to be looked at; None where none has a limit."""
        return max(0.0, self._due[0][0] - self._monotonic()) if self._due else None

    def overdue(
        self,
        rows: Mapping[str, Workload],
        changed: Iterable[AttemptStatus],
        attempts: Mapping[Key, AttemptStatus],
        now: float,
    ) -> ChangeSet:
        """Return the changes that end overdue jobs; `changed` are those of `attempts` that are new or differ."""
        change_set, at = ChangeSet(), self._monotonic()
        for status in changed:
            row = rows.get(status.workload)
            if row is not None and status.key not in self._known and self._counts(row, status):
                with self.quarantine.guard(STEP, "workload", row.id):
                    self._note(row, status, at, now)
        while self._due and self._due[0][0] <= at:
            _, key = heapq.heappop(self._due)
            row, attempt = rows.get(key[0]), attempts.get(key)
            if row is None or attempt is None or not self._counts(row, attempt):
                self._known.pop(key, None)
                continue
            # Its change may be refused, as by a report in the same cycle: it is looked at until it is in the row.
            heapq.heappush(self._due, (at + AGAIN, key))
            with self.quarantine.guard(STEP, "workload", row.id):
                self._check(change_set, row, attempt, at)
        return change_set

    def _counts(self, row: Workload, status: AttemptStatus) -> bool:
        """Whether an attempt runs that has a limit, and that nothing else is about to end."""
        if row.time_limit is None or row.kind != "job" or row.state not in ADMITTED or row.attempt != status.attempt:
            return False
        ending = row.notice is not None or row.cancel_requested or row.reason_code == TIME_LIMIT
        began = status.started_at is not None or not self._reports_begin
        return began and not ending and status.phase not in (Phase.EXITED, Phase.LOST)

    def _note(self, row: Workload, status: AttemptStatus, at: float, now: float) -> None:
        limit = row.time_limit or 0.0
        passed = 0.0 if status.started_at is None else min(limit, max(0.0, now - status.started_at))
        self._known[status.key] = at + limit - passed
        heapq.heappush(self._due, (self._known[status.key] + row.grace + MARGIN, status.key))

    def _check(self, change_set: ChangeSet, row: Workload, status: AttemptStatus, at: float) -> None:
        notice_received = status.notice_received or status.phase is Phase.STOPPING
        last = self._known[status.key] + row.grace + (LATE_MARGIN if notice_received else MARGIN)
        if at < last:
            return
        message = outcomes.over_time_limit(job_name(row), row.time_limit or 0.0)
        change_set.add(*transitions.overrun(row, message, duration(row.time_limit or 0.0)))
