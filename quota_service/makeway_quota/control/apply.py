"""A plan, written to the store: every start, eviction, move and reason with its numbers, before anything is done.

Called by the loop. The change_set are checked against fresh versions when they are committed, so that a workload that
somebody cancelled meanwhile is left alone; the backend is told afterwards, from the store (loop.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from ..engine.plan import Evict, Move, Plan, Refusal, Start, Waiting
from ..store.records import Attempt, Change, Notice, Workload
from .pool_assignment import places
from .reasons import AT_ONCE, Reasons
from .reconcile import HOLDS, ChangeSet, decide, with_names

Said = TypeVar("Said", Start, Evict, Move, Refusal, Waiting)


def change_set_of(
    plan: Plan, rows: Mapping[str, Workload], *, now: float, lease_seconds: float, reasons: Reasons | None = None
) -> ChangeSet:
    """QueueHeads a plan into changes and decisions; `rows` is what the plan was made from."""
    change_set = ChangeSet()
    pending = (reasons or Reasons(AT_ONCE)).news(plan.pending, rows) if reasons or plan.pending else []
    for start in _said(plan.start, rows):
        _start(change_set, start, rows[start.id], now, lease_seconds, lenders(plan, start))
    for evict in _said(plan.evict, rows):
        _leave(change_set, evict, rows[evict.id], rows.get(evict.beneficiary), now)
    for move in _said(plan.move, rows):
        _leave(change_set, move, rows[move.id], rows.get(move.beneficiary), now)
    for refusal in _said(plan.refused, rows):
        _refuse(change_set, refusal, rows[refusal.id], now)
    for waiting in _said(pending, rows):
        _wait(change_set, waiting, rows[waiting.id])
    return change_set


def named(plan: Plan, rows: Mapping[str, Workload]) -> Plan:
    """Say names where the engine says ids: people know their jobs by name."""
    return replace(
        plan,
        start=_said(plan.start, rows),
        evict=_said(plan.evict, rows),
        move=_said(plan.move, rows),
        refused=_said(plan.refused, rows),
        pending=_said(plan.pending, rows),
    )


def _said(items: Iterable[Said], rows: Mapping[str, Workload]) -> tuple[Said, ...]:
    return tuple(
        [
            item if (message := with_names(item.message, rows)) == item.message else replace(item, message=message)
            for item in items
        ]
    )


def lenders(plan: Plan, start: Start) -> tuple[str, ...]:
    """Whose idle reservation an over-quota start borrows from, most idle first (F37); () where nobody reserved it."""
    if start.in_quota:
        return ()
    idle = [
        (line.usage - line.reserved, line.policy)
        for line in plan.usage
        if line.usage < line.reserved and (not line.pools or start.pool in line.pools)
    ]
    return tuple(dict.fromkeys(policy for _, policy in sorted(idle)))


def _start(
    change_set: ChangeSet, start: Start, row: Workload, now: float, lease_seconds: float, borrowed_from: tuple[str, ...]
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
        "reason_message": start.message,
        "reason_numbers": dict(start.numbers),
        "not_before": None,
        "message": "",
        "exit_code": None,
    }
    if row.kind == "session":
        fields["expires_at"] = now + lease_seconds
    attempt = Attempt(row.id, number, now, placement=placement, over_quota=not start.in_quota)
    change = Change(row.id, fields, row.version, ("pending",), open_attempt=attempt)
    change_set.add(change, decide(row, "start", start.rule, start.message, **_plain(start.numbers)))


def _leave(change_set: ChangeSet, leave: Evict | Move, row: Workload, by: Workload | None, now: float) -> None:
    moved = isinstance(leave, Move)
    notice = Notice(
        reason=leave.message,
        at=now,
        deadline=leave.deadline,
        kind="move" if moved else "evict",
        by_team=by.team if by else None,
        by_owner=by.owner if by else None,
        by_workload=leave.beneficiary,
    )
    fields: dict[str, object] = {
        "state": "checkpointing",
        "notice": notice,
        "evicted_for": leave.beneficiary,
        "nomination": places(leave.to) if isinstance(leave, Move) else (),
        "reason_code": "moving" if moved else "making_way",
        "reason_message": leave.message,
        "reason_numbers": dict(leave.numbers),
    }
    change = Change(row.id, fields, row.version, HOLDS)
    change_set.add(
        change, decide(row, "move" if moved else "evict", leave.rule, leave.message, **_plain(leave.numbers))
    )


def _refuse(change_set: ChangeSet, refusal: Refusal, row: Workload, now: float) -> None:
    fields: dict[str, object] = {
        "state": "cancelled",
        "ended_at": now,
        "nomination": (),
        "reason_code": refusal.code,
        "reason_message": refusal.message,
        "reason_numbers": dict(refusal.numbers),
        "message": refusal.message,
    }
    change = Change(row.id, fields, row.version, ("pending",))
    change_set.add(change, decide(row, "refuse", refusal.rule, refusal.message, **_plain(refusal.numbers)))


def _wait(change_set: ChangeSet, waiting: Waiting, row: Workload) -> None:
    fields: dict[str, object] = {
        "reason_code": waiting.code,
        "reason_message": waiting.message,
        "reason_numbers": dict(waiting.numbers),
        "nomination": places(waiting.nomination),
        "not_before": waiting.not_before,
    }
    said = None
    if row.reason_code != waiting.code:
        said = decide(row, "wait", waiting.rule, waiting.message, **_plain(waiting.numbers))
    change_set.add(Change(row.id, fields, row.version, ("pending",)), said)


def _plain(numbers: Mapping[str, object]) -> dict[str, object]:
    return {str(key): value for key, value in numbers.items()}
