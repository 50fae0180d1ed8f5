"""The store of a simulation: the records and rules of the real one, kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
