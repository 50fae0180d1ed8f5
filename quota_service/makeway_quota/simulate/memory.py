"""The stores of a simulation: the records and rules of the real ones, kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..autoscale.backoff import LaunchBackoff
from ..autoscale.machine import Machine
from ..autoscale.step import MachineChanges, MachineRows
from ..history.durations import Durations
from ..store.records import LIVE_STATES, Change, NewDecision, Workload
from ..store.rows import changed, refuse_unstorable

Listener = Callable[[Workload, Workload], None]


class MemoryStore:
    """A store in memory for `decisions` and `reconcile`, with the same expectations as the database's store.

    Only what has not ended is kept; `on_change` is called with every change as (before, after), `durations`
    learns from what ended.
    """

    def __init__(self, on_change: Listener, durations: Durations | None = None) -> None:
        self.rows: dict[str, Workload] = {}
        self.decided: dict[str, int] = {}
        """How many decisions of each verb were made."""
        self._on_change = on_change
        self._durations = durations

    def add_like(self, like: Workload, id: str, team: str | None, owner: str, *, now: float) -> Workload:
        """Add a submission with the same request as an earlier one; ValueError if its id is taken."""
        if id in self.rows:
            raise ValueError(f"There is a workload {id} already; every job of a trace needs its own id.")
        for text, name in ((id, "id"), (team, "team"), (owner, "owner")):
            refuse_unstorable(text, name)
        row = self.rows[id] = like._replace(id=id, team=team, owner=owner, submitted_at=now)
        return row

    def active(self) -> list[Workload]:
        """Read all that have not ended, first submitted first."""
        return sorted(self.rows.values(), key=lambda row: (row.submitted_at, row.id))

    def commit(
        self, changes: Sequence[Change], decisions: Sequence[NewDecision] = (), *, now: float, term: int | None = None
    ) -> frozenset[str]:
        """Apply the changes whose expectations hold; answer their ids."""
        applied = set()
        for change in changes:
            row = self.rows.get(change.workload)
            if row is None or (change.expect_states is not None and row.state not in change.expect_states):
                continue
            if change.expect_version is not None and row.version != change.expect_version:
                continue
            after = changed(row, change.fields)
            applied.add(row.id)
            if after.state in LIVE_STATES:
                self.rows[row.id] = after
            else:
                del self.rows[row.id]
                if self._durations is not None:
                    self._durations.learn(after)
            self._on_change(row, after)
        for decision in decisions:
            if decision.workload is None or decision.workload in applied:
                self.decided[decision.verb] = self.decided.get(decision.verb, 0) + 1
        return frozenset(applied)


class MemoryMachineStore:
    """The machines of one deployment: one term at a time, and no change of a row that was changed since it was read.

    `rows` are those that are not finished, `finished` the others.
    """

    def __init__(self) -> None:
        self.term = 1
        self.revision = 0
        self.rows: dict[str, Machine] = {}
        self.finished: dict[str, Machine] = {}
        self.backoffs: tuple[LaunchBackoff, ...] = ()
        self.closed_spend: dict[str, int] = {}
        self.first_seen: dict[str, float] = {}

    def read(self, deployment: str) -> MachineRows:
        """Return the rows as they are committed."""
        return MachineRows(tuple(self.rows.values()), self.backoffs, dict(self.closed_spend), dict(self.first_seen))

    def commit(self, deployment: str, term: int, changes: MachineChanges) -> bool:
        """Write all changes or none; False if the term is over, or a row or the document has changed meanwhile."""
        if term != self.term or changes.revision not in (None, self.revision):
            return False
        if any(one.id not in self.rows or self.rows[one.id].version != one.version for one in changes.changed):
            return False
        for one in (*changes.launched, *changes.changed):
            row = replace(one, version=one.version + 1)
            if row.finished:
                self.rows.pop(row.id, None)
                self.finished[row.id] = row
            else:
                self.rows[row.id] = row
        if changes.backoffs is not None:
            self.backoffs = changes.backoffs
        if changes.first_seen is not None:
            self.first_seen = dict(changes.first_seen)
        for month, amount in changes.spent.items():
            self.closed_spend[month] = self.closed_spend.get(month, 0) + amount
        return True

    def all_machines(self) -> dict[str, Machine]:
        """Return all machines by id, those that are finished first."""
        return {**self.finished, **self.rows}
