"""Keep the rows and attempts that the next cycle has to reconcile: those that changed, and those it may act upon.

A running job without changes costs a cycle nothing. Every RESYNC_SECONDS everything is reconciled, so that nothing
depends on a change being noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from ...backends.base import AttemptStatus, Key, Observation, Phase
from ...quarantine import Quarantine
from ...store.records import Workload
from .active_rows import ActiveRows
from .expectations import Expectations
from .observation import Observed, backend_of

STEP = "looking for its attempt"
RESYNC_SECONDS = 60.0
"""Seconds from one cycle that reconciles everything to the next."""

TERMINAL_PHASES = (Phase.EXITED, Phase.LOST)


class PendingChanges:
    """The changes that no cycle has handled yet. Used by the loop only."""

    def __init__(
        self,
        active: ActiveRows,
        observed: Observed,
        expectations: Expectations,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.active, self.observed, self.expectations = active, observed, expectations
        self.quarantine = Quarantine()
        """The loop's quarantine, once the loop runs"""
        self._clock = clock
        self._ids: set[str] = set()
        self._resync_at: float | None = None
        """The time of the last full reconciliation; None: one is due."""
        self._reconcile_all = False

    def resync(self) -> None:
        """Make the next cycle reconcile everything: this process just became the leader, or missed something."""
        self._resync_at = None

    def rows(self) -> dict[str, Workload]:
        """Return the rows that a cycle may have to act upon, and those of the attempts in `observation`."""
        self._gather()
        rows = self.active.holding
        if self._reconcile_all:
            return dict(rows)
        return {id: rows[id] for id in self._ids if id in rows}

    def observation(self, now: float) -> Observation:
        """Return the reported attempts of the rows in scope, those that belong to no row, and a LOST entry for each
        attempt judged lost.
        """
        rows = self.rows()
        attempts = self.observed.attempts
        if self._reconcile_all:
            result = list(attempts.values())
        else:
            keys = {(id, row.attempt) for id, row in rows.items()} | self.observed.changed
            result = [attempts[key] for key in keys if key in attempts]
        lost = [self._lost(row) for row in self._absent(rows.values()) if self._verdict(row, now) == "lost"]
        return Observation(tuple(self.observed.nodes.values()), (*result, *lost), synced=self.observed.synced)

    def not_to_start(self, now: float) -> set[Key]:
        """Return the attempts that are not reported and must not be started (again)."""
        absent = self._absent(self.rows().values())
        return {(row.id, row.attempt) for row in absent if self._verdict(row, now) != "start"}

    def expect_starts(self, now: float, postponed: Collection[Key] = ()) -> None:
        """Expect the attempts that were just ordered to start: not reported, to be started, and not postponed."""
        absent = self._absent(self.rows().values())
        keys = [(row.id, row.attempt) for row in absent if self._verdict(row, now) == "start"]
        self.expectations.expect_starts(key for key in keys if key not in postponed)

    def launch_times_to_store(self, now: float) -> dict[str, float]:
        """Return when attempts were ordered that are not running after a while, where the store does not say so."""
        return self.expectations.launch_times_to_store(self.rows().values(), now)

    def end_cycle(self) -> None:
        """End a cycle that went through; keep attempts that are over, or that should not run, until they are gone.

        Rows that some step has quarantined stay, too.
        """
        attempts = self.observed.attempts
        self.observed.changed = {
            key for key in self.observed.changed if key in attempts and self._is_obsolete(attempts[key])
        }
        self._ids = self.quarantine.all("workload")
        if self._reconcile_all:
            self._reconcile_all, self._resync_at = False, self._clock()
            self.observed.changed |= {key for key, attempt in attempts.items() if self._is_obsolete(attempt)}
            self.expectations.keep(self.active.holding)

    def _gather(self) -> None:
        if self._resync_at is None or self._clock() - self._resync_at >= RESYNC_SECONDS:
            self._reconcile_all = True
        self._ids |= self.active.changed
        self.active.changed.clear()
        self._ids.update(self.active.urgent)
        self._ids.update(id for id, _ in self.observed.changed)

    def _absent(self, rows: Iterable[Workload]) -> list[Workload]:
        """List the jobs that hold GPUs and whose present attempt is not reported."""
        attempts = self.observed.attempts
        return [
            row
            for row in rows
            if row.kind == "job" and row.state != "pending" and (row.id, row.attempt) not in attempts
        ]

    def _verdict(self, row: Workload, now: float) -> str:
        """Return what to do about an attempt that is not reported: "start", "lost", or "wait" if it is not known."""
        with self.quarantine.guard(STEP, "workload", row.id):
            backend = backend_of(row)
            if self.observed.backends.is_removed(backend):
                return "lost" if row.cancel_requested else "wait"
            return self.expectations.verdict(row, self.observed.absence_is_certain(backend), now)
        return "wait"

    def _lost(self, row: Workload) -> AttemptStatus:
        return AttemptStatus(row.id, row.attempt, Phase.LOST, message="the backend no longer reports it")

    def _is_obsolete(self, attempt: AttemptStatus) -> bool:
        """Whether an attempt is over, or is not the present one of a workload that holds GPUs."""
        row = self.active.holding.get(attempt.workload)
        present = row is not None and row.attempt == attempt.attempt and row.state != "pending"
        return attempt.phase in TERMINAL_PHASES or not present
