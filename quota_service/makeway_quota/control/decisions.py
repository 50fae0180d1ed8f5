"""Turn a plan into changes and decisions: every start, eviction, move and reason with its numbers.

Called by the loop, which commits them before anything is actuated. Each change is checked against the row's version at
the commit, so that a workload that was cancelled meanwhile stays as it is; afterwards `actuate.py` gives the orders to
the backend, from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..engine.plan import Evict, Move, Plan, Start, Waiting
from ..quarantine import Kind, Quarantine, reason_of
from ..store.records import Workload
from ..wording import IDS, Names, outcomes, sentence
from . import transitions
from .change_set import ChangeSet
from .reason_throttle import AT_ONCE, ReasonThrottle
from .world.isolation import Faulty, items_of

APPLYING = "writing what was decided"
QUARANTINED = "set_aside"
"""The reason code of a workload that no plan can be made with"""


def change_set_of(
    plan: Plan,
    rows: Mapping[str, Workload],
    *,
    now: float,
    lease_seconds: float,
    reasons: ReasonThrottle | None = None,
    names: Names = IDS,
    explained: bool = True,
    quarantine: Quarantine | None = None,
    backend_of: Callable[[str], str] = lambda node: "",
) -> ChangeSet:
    """Return a plan as changes and decisions; it was made from `rows`, and `names` is how sentences call them.

    `explained`: whether the plan has the reasons of all pending workloads; `backend_of` tells which of several backends
    has a node.
    """
    change_set, quarantine = ChangeSet(), quarantine or Quarantine()
    pending: list[Waiting] = []
    if reasons or plan.pending:
        pending = (reasons or ReasonThrottle(AT_ONCE)).unwritten(plan.pending, rows, names, explained=explained)
    for start in plan.start:
        with quarantine.guard(APPLYING, "workload", start.id):
            row = rows[start.id]
            message = sentence(start.facts, names.to(row.team))
            borrowed = lenders(plan, start)
            change_set.add(*transitions.start(row, start, message, now, lease_seconds, borrowed, backend_of))
    evictions: tuple[Evict | Move, ...] = (*plan.evict, *plan.move)
    for eviction in evictions:
        with quarantine.guard(APPLYING, "workload", eviction.id):
            row, by = rows[eviction.id], rows.get(eviction.preemptor)
            change_set.add(*transitions.notice(row, eviction, sentence(eviction.facts, names.to(row.team)), by, now))
    for refusal in plan.refused:
        with quarantine.guard(APPLYING, "workload", refusal.id):
            row = rows[refusal.id]
            change_set.add(*transitions.refuse(row, refusal, sentence(refusal.facts, names.to(row.team)), now))
    for waiting in pending:
        with quarantine.guard(APPLYING, "workload", waiting.id):
            row = rows[waiting.id]
            change_set.add(*transitions.explain(row, waiting, sentence(waiting.facts, names.to(row.team))))
    return change_set


def excluded(faulty: Faulty, rows: Mapping[str, Workload]) -> dict[str, tuple[Kind, Exception]]:
    """Return the pending workloads that the plan was made without, with why: by themselves, or with their team."""
    result: dict[str, tuple[Kind, Exception]] = {}
    wide = any(kind in ("queue", "team", "profile") for kind, _ in faulty.reasons)
    for id in rows if wide else [name for kind, name in faulty.reasons if kind == "workload" and name in rows]:
        row = rows[id]
        if row.state == "pending":
            for item in items_of(id, row.team or "", row.profile):
                if item in faulty.reasons:
                    result[id] = item[0], faulty.reasons[item]
                    break
    return result


def explain_excluded(
    change_set: ChangeSet,
    waiting: Mapping[str, tuple[Kind, Exception]],
    rows: Mapping[str, Workload],
    quarantine: Quarantine,
) -> None:
    """Add why workloads wait that the plan was made without."""
    for id in sorted(waiting):
        with quarantine.guard(APPLYING, "workload", id):
            _explain_excluded(change_set, rows[id], *waiting[id])


def _explain_excluded(change_set: ChangeSet, row: Workload, kind: Kind, error: Exception) -> None:
    message = outcomes.quarantined(row.kind, kind, reason_of(error))
    if (row.reason_code, row.reason_message) != (QUARANTINED, message):
        change_set.add(*transitions.exclude(row, QUARANTINED, message))


def lenders(plan: Plan, start: Start) -> tuple[str, ...]:
    """Return the policies whose idle reservations a start borrows, most idle first (F37); () for unreserved GPUs."""
    if start.in_quota:
        return ()
    idle = [
        (line.usage - line.reserved, line.team)
        for line in plan.usage
        if line.usage < line.reserved and (not line.pools or start.pool in line.pools)
    ]
    return tuple(dict.fromkeys(policy for _, policy in sorted(idle)))
