"""Convert the times of rows to the present clock, where it was set since they were written.

Used by `EngineView` and `reconcile`; all views of a world share one. The rows stay as they are. A process that starts
knows of no step before it, so a start in the future counts as the time at which it was first seen, and the time to save
ends no earlier than when its notice was first seen, nor later than its whole length after that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

from ...engine.snapshot import ADMITTED
from ...store.records import Workload
from ...values import Notice
from .clock_steps import MIN_STEP, ClockSteps


class _Present(NamedTuple):
    """One time of a row as it was written, and what it counts as now."""

    written: float
    counts: float


_Times = dict[str, _Present]
"""The times of one row by field; `deadline` is that of the notice which was written at a time."""


class CorrectedTimes:
    """The times of active rows that count as others than those in the rows."""

    def __init__(self, steps: ClockSteps | None = None) -> None:
        self._steps = steps or ClockSteps()
        self._times: dict[str, _Times] = {}

    def stepped(self, rows: Iterable[Workload], seconds: float, recent: Collection[str] = ()) -> None:
        """Convert the times of these rows, as the clock was set forward by so many seconds since they were written.

        Those of `recent` rows may have been written after it: what is new by the clock as it is now stays.
        """
        now = self._steps.now()
        for row in rows:
            times = self._noted(row)
            for field, written in _written(row).items():
                if written is None or (row.id in recent and abs(now - written) <= MIN_STEP):
                    continue
                counts = times[field].counts if field in times else written
                if field == "deadline" and field not in times and row.notice is not None:
                    counts = row.notice.deadline
                times[field] = _Present(written, counts + seconds)
            self._times[row.id] = times

    def of(self, row: Workload) -> Workload:
        """Return a row with the times that count now."""
        known = row.id in self._times
        if not known and row.state not in ADMITTED:
            return row
        times = self._noted(row) if known else {}
        now = self._steps.now()
        started = times["started_at"].counts if "started_at" in times else row.started_at
        if started is not None and row.state in ADMITTED and started > now + MIN_STEP:
            times["started_at"] = _Present(row.started_at or started, now)
        if row.notice is not None and "deadline" not in times:
            times["deadline"] = _Present(row.notice.at, _deadline(row.notice, now))
        if times:
            self._times[row.id] = times
        elif known:
            del self._times[row.id]
        return _converted(row, times)

    def forget(self, id: str) -> None:
        """Forget a workload that has ended."""
        self._times.pop(id, None)

    def _noted(self, row: Workload) -> _Times:
        """Return what is known of the times that a row has; those of earlier attempts and notices are dropped."""
        written = _written(row)
        return {field: time for field, time in self._times.get(row.id, {}).items() if time.written == written[field]}


def _written(row: Workload) -> dict[str, float | None]:
    """Return the times of a row as they were written; of a deadline, when its notice was."""
    notice = row.notice
    return {
        "submitted_at": row.submitted_at,
        "started_at": row.started_at,
        "checkpoint_at": row.checkpoint_at,
        "deadline": notice.at if notice else None,
    }


def _deadline(notice: Notice, now: float) -> float:
    """Return the deadline of a notice that is seen for the first time."""
    return min(max(notice.deadline, now), now + max(0.0, notice.deadline - notice.at))


def _converted(row: Workload, times: _Times) -> Workload:
    changes: dict[str, object] = {}
    for field, time in times.items():
        if field != "deadline":
            if time.counts != time.written:
                changes[field] = time.counts
        elif row.notice is not None and time.counts != row.notice.deadline:
            changes["notice"] = replace(row.notice, deadline=time.counts)
    return row._replace(**changes) if changes else row  # type: ignore[arg-type]
