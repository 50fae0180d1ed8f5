"""What one transaction of the loop writes: changes of workloads, and the decisions that explain them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..store.records import Change, NewDecision, Workload
from ..wording import outcomes


@dataclass(slots=True)
class ChangeSet:
    """Changes to commit together, and the decisions that explain them."""

    changes: list[Change] = field(default_factory=list)
    decisions: list[NewDecision] = field(default_factory=list)

    def add(self, change: Change, decision: NewDecision | None = None) -> None:
        """Add one change, and the decision that explains it."""
        self.changes.append(change)
        if decision is not None:
            self.decisions.append(decision)

    def parts(self, max_changes: int) -> Iterator[ChangeSet]:
        """Divide into change sets of at most `max_changes`, in order, each with the decisions that explain them."""
        decisions: dict[str | None, list[NewDecision]] = {}
        for decision in self.decisions:
            decisions.setdefault(decision.workload, []).append(decision)
        for begin in range(0, len(self.changes), max_changes):
            changes = self.changes[begin : begin + max_changes]
            yield ChangeSet(changes, [item for change in changes for item in decisions.get(change.workload, ())])


def job_name(row: Workload) -> str:
    """Return what decisions call the job of a row: `“train” of ana`."""
    return outcomes.job_of(row.name or row.id, row.owner)


def decide(row: Workload, verb: str, code: str, message: str, **numbers: object) -> NewDecision:
    """Return a decision about one workload for the log."""
    return NewDecision(verb, row.id, row.team, row.owner, code, message, numbers)
