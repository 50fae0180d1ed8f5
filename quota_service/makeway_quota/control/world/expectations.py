"""Decide what it means that an attempt is not reported: not started yet, expected, or lost.

Used by `World` for jobs that hold GPUs. An attempt that was ordered to start is expected until it was seen once or
its start deadline has passed; it is never started a second time. Once it was seen, absence means that it is lost.
Before the backend is synced, and while it cannot be observed, absence means nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from ...backends.base import AttemptStatus, Key
from ...store.records import Workload

Verdict = Literal["start", "wait", "lost"]

NOTE_AFTER = 2.0
"""Seconds after the order when a start that is still not running is written down (most are running by then)."""

MIN_REMAINING = 10.0
"""Seconds that are left at least, when a process sees it first, of the deadline of a start that an earlier one ordered:
its clock may have been another."""


class Expectations:
    """The attempts that this process ordered to start or has seen. Times are kept on a clock that never jumps."""

    def __init__(self, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.deadline = deadline
        self._clock = clock
        self._ordered: dict[Key, float] = {}
        self._unknown: dict[Key, float] = {}
        """when it could not be told last whether an ordered attempt is there: its deadline begins again then"""
        self._reported: set[Key] = set()

    def expect_starts(self, keys: Iterable[Key]) -> None:
        """Expect attempts that the backend was just ordered to start."""
        now = self._clock()
        for key in keys:
            self._ordered.setdefault(key, now)

    def note(self, attempts: Iterable[AttemptStatus]) -> None:
        """Note attempts that the backend reports; one whose start broke off has yet to be seen."""
        for attempt in attempts:
            (self._reported.discard if attempt.start_broke_off else self._reported.add)(attempt.key)

    def keep(self, rows: Mapping[str, Workload]) -> None:
        """Drop the attempts that are not the present one of a workload in `rows`, those that may hold GPUs."""
        for known in (self._ordered, self._unknown, self._reported):
            for key in [key for key in known if (row := rows.get(key[0])) is None or row.attempt != key[1]]:
                known.discard(key) if isinstance(known, set) else known.pop(key)

    def verdict(self, row: Workload, synced: bool, now: float) -> Verdict:
        """Return what to do about an attempt that is not reported; `now` is the time of day, as in the row."""
        key = (row.id, row.attempt)
        if not synced:
            if key in self._ordered:
                self._unknown[key] = self._clock()
            return "wait"
        if key in self._reported or row.state == "running":
            return "lost"
        ordered = self._ordered.get(key)
        if ordered is None and row.launched_at is not None:  # by an earlier process
            passed = min(max(0.0, now - row.launched_at), max(0.0, self.deadline - MIN_REMAINING))
            ordered = self._ordered[key] = self._clock() - passed
        if ordered is None:
            return "lost" if row.state == "checkpointing" else "start"
        since = max(ordered, self._unknown.get(key, ordered))
        return "lost" if self._clock() - since >= self.deadline else "wait"

    def launch_times_to_store(self, rows: Iterable[Workload], now: float) -> dict[str, float]:
        """Return when attempts were ordered that are not running after a while, where the store does not say so."""
        result = {}
        for row in rows:
            ordered = self._ordered.get((row.id, row.attempt))
            if ordered is not None and row.launched_at is None and row.state == "starting":
                passed = self._clock() - ordered
                if passed >= NOTE_AFTER:
                    result[row.id] = now - passed
        return result
