"""Turn a plan into changes and decisions: every start, eviction, move and reason with its numbers.

Called by the loop, which commits them before anything is actuated. Each change is checked against the row's version at
the commit, so that a workload that was cancelled meanwhile stays as it is; afterwards `actuate.py` gives the orders to
the backend, from the store.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..engine.plan import Evict, Move, Plan, Refusal, Start, Waiting
from ..engine.snapshot import ADMITTED
from ..quarantine import Kind, Quarantine, reason_of
from ..store.records import Attempt, Change, Notice, Workload
from ..wording import IDS, Names, outcomes, sentence
from .change_set import ChangeSet, decide
from .isolation import Faulty, items_of
from .pool_assignment import places
from .reason_throttle import AT_ONCE, ReasonThrottle
from .time_limits import TIME_LIMIT

APPLYING = "writing what was decided"
SET_ASIDE = "set_aside"
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
) -> ChangeSet:
    """Return a plan as changes and decisions; it was made from `rows`, and `names` is how sentences call them.

    `explained`: whether the plan has the reasons of all pending workloads.
    """
    change_set, aside = ChangeSet(), quarantine or Quarantine()
    pending: list[Waiting] = []
    if reasons or plan.pending:
        pending = (reasons or ReasonThrottle(AT_ONCE)).unwritten(plan.pending, rows, names, explained=explained)
    for start in plan.start:
        with aside.guard(APPLYING, "workload", start.id):
            message = sentence(start.facts, names.to(rows[start.id].team))
            _start(change_set, start, message, rows[start.id], now, lease_seconds, lenders(plan, start))
    evictions: tuple[Evict | Move, ...] = (*plan.evict, *plan.move)
    for each in evictions:
        with aside.guard(APPLYING, "workload", each.id):
            _evict(
                change_set,
                each,
                sentence(each.facts, names.to(rows[each.id].team)),
                rows[each.id],
                rows.get(each.preemptor),
                now,
            )
    for refusal in plan.refused:
        with aside.guard(APPLYING, "workload", refusal.id):
            _refuse(
                change_set, refusal, sentence(refusal.facts, names.to(rows[refusal.id].team)), rows[refusal.id], now
            )
    for waiting in pending:
        with aside.guard(APPLYING, "workload", waiting.id):
            _wait(change_set, waiting, sentence(waiting.facts, names.to(rows[waiting.id].team)), rows[waiting.id])
    return change_set


def left_out(faulty: Faulty, rows: Mapping[str, Workload]) -> dict[str, tuple[Kind, Exception]]:
    """Return the pending workloads that the plan was made without, with why: by themselves, or with their team."""
    found: dict[str, tuple[Kind, Exception]] = {}
    wide = any(kind in ("queue", "team", "profile") for kind, _ in faulty.reasons)
    for id in rows if wide else [name for kind, name in faulty.reasons if kind == "workload" and name in rows]:
        row = rows[id]
        if row.state == "pending":
            for item in items_of(id, row.team or "", row.profile):
                if item in faulty.reasons:
                    found[id] = item[0], faulty.reasons[item]
                    break
    return found


def set_aside(
    change_set: ChangeSet,
    waiting: Mapping[str, tuple[Kind, Exception]],
    rows: Mapping[str, Workload],
    aside: Quarantine,
) -> None:
    """Add why workloads wait that the plan was made without."""
    for id in sorted(waiting):
        with aside.guard(APPLYING, "workload", id):
            _set_aside(change_set, rows[id], *waiting[id])


def _set_aside(change_set: ChangeSet, row: Workload, kind: Kind, error: Exception) -> None:
    message = outcomes.set_aside(row.kind, kind, reason_of(error))
    if (row.reason_code, row.reason_message) != (SET_ASIDE, message):
        fields: dict[str, object] = {
            "reason_code": SET_ASIDE,
            "reason_message": message,
            "reason_numbers": {},
            "nomination": (),
            "not_before": None,
        }
        change_set.add(Change(row.id, fields, row.version, ("pending",)), decide(row, "wait", SET_ASIDE, message))


def lenders(plan: Plan, start: Start) -> tuple[str, ...]:
    """Return the policies whose idle reservations a start borrows, most idle first (F37); () for unreserved GPUs."""
    if start.in_quota:
        return ()
    idle = [
        (line.usage - line.reserved, line.policy)
        for line in plan.usage
        if line.usage < line.reserved and (not line.pools or start.pool in line.pools)
    ]
    return tuple(dict.fromkeys(policy for _, policy in sorted(idle)))


def _start(
    change_set: ChangeSet,
    start: Start,
    message: str,
    row: Workload,
    now: float,
    lease_seconds: float,
    borrowed_from: tuple[str, ...],
) -> None:
    number = row.attempt + 1
    placement = places(start.placement)
    fields: dict[str, object] = {
        "state": "starting",
        "attempt": number,
        "placement": placement,
        "nomination": (),
        "started_at": now,
        "over_quota": not start.in_quota,
        "borrowed_from": borrowed_from,
        "failed_node": None,
        "launched_at": None,
        "reason_code": "starting",
        "reason_message": message,
        "reason_numbers": dict(start.numbers),
        "not_before": None,
        "message": "",
        "exit_code": None,
    }
    if row.kind == "session":
        fields["expires_at"] = now + lease_seconds
    attempt = Attempt(row.id, number, now, placement=placement, over_quota=not start.in_quota)
    change = Change(row.id, fields, row.version, ("pending",), open_attempt=attempt)
    change_set.add(change, decide(row, "start", start.rule, message, **_plain(start.numbers)))


def _evict(
    change_set: ChangeSet, evict: Evict | Move, message: str, row: Workload, by: Workload | None, now: float
) -> None:
    moved = isinstance(evict, Move)
    notice = Notice(
        reason=message,
        at=now,
        deadline=evict.deadline,
        kind="move" if moved else "evict",
        by_team=by.team if by else None,
        by_owner=by.owner if by and by.team == row.team else None,
        by_workload=evict.preemptor,
    )
    fields: dict[str, object] = {
        "state": "checkpointing",
        "notice": notice,
        "evicted_for": evict.preemptor,
        "nomination": places(evict.to) if isinstance(evict, Move) else (),
    }
    if row.reason_code != TIME_LIMIT:  # a job that is ended at its limit is not requeued because it also makes way
        reason = "moving" if moved else "making_way"
        fields |= {"reason_code": reason, "reason_message": message, "reason_numbers": dict(evict.numbers)}
    change = Change(row.id, fields, row.version, ADMITTED)
    change_set.add(change, decide(row, "move" if moved else "evict", evict.rule, message, **_plain(evict.numbers)))


def _refuse(change_set: ChangeSet, refusal: Refusal, message: str, row: Workload, now: float) -> None:
    fields: dict[str, object] = {
        "state": "cancelled",
        "ended_at": now,
        "nomination": (),
        "reason_code": refusal.code,
        "reason_message": message,
        "reason_numbers": dict(refusal.numbers),
        "message": message,
    }
    change = Change(row.id, fields, row.version, ("pending",))
    change_set.add(change, decide(row, "refuse", refusal.rule, message, **_plain(refusal.numbers)))


def _wait(change_set: ChangeSet, waiting: Waiting, message: str, row: Workload) -> None:
    fields: dict[str, object] = {
        "reason_code": waiting.code,
        "reason_message": message,
        "reason_numbers": dict(waiting.numbers),
        "nomination": places(waiting.nomination),
        "not_before": waiting.not_before,
    }
    said = None
    if row.reason_code != waiting.code:
        said = decide(row, "wait", waiting.rule, message, **_plain(waiting.numbers))
    change_set.add(Change(row.id, fields, row.version, ("pending",)), said)


def _plain(numbers: Mapping[str, object]) -> dict[str, object]:
    return {str(key): value for key, value in numbers.items()}
