"""A plan, written into the books: every start, eviction, move and reason with its numbers, before anything is done.

Called by the loop. The books are checked against fresh versions when they are committed, so that a workload that
somebody cancelled meanwhile is left alone; the backend is told afterwards, from the books (loop.py).
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, get_args

from .engine.plan import Code, Evict, Move, Plan, Refusal, Start, Waiting
from .engine.state import Placement
from .machines import machine_of
from .settle import HOLDS, Books, decide, with_names
from .store.records import Attempt, Change, Notice, Place, Workload

Said = TypeVar("Said", Start, Evict, Move, Refusal, Waiting)

WAITING = frozenset(get_args(Code))
"""Reasons that the engine gave; other codes say what happened before."""

AT_ONCE = 1e9
"""A pace that nobody is too many for."""

NOT_BEFORE_SLACK = 5.0
"""Seconds that a forecast may shift before it is written again."""


class Reasons:
    """What those who wait were told, so that only news is written.

    A first reason and a claim are written at once. Where only the words or their numbers changed, at most `pace` are
    written a second (thousands may wait, and their numbers change with every start); the others have their turn later.
    """

    def __init__(self, pace: float = 100.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.pace = pace
        self.behind = False
        """Somebody's sentence is not what it should be; look again soon."""
        self._clock = clock
        self._told: dict[str, tuple[int, Waiting]] = {}
        self._left = 2 * pace
        self._at = clock()
        self._last = ""

    def news(self, pending: Sequence[Waiting], rows: Mapping[str, Workload]) -> list[Waiting]:
        """Choose whom to write to; `pending` is in the order of ids."""
        told = self._told
        first: list[Waiting] = []
        other: list[Waiting] = []
        for waiting in pending:
            row = rows[waiting.id]
            known = told.get(waiting.id)
            if known is not None and known[0] == row.version:
                if _alike(known[1], waiting):
                    continue
            elif _is_told(row, waiting, rows):
                told[waiting.id] = row.version, waiting
                continue
            (other if _may_wait(row, waiting) else first).append(waiting)
        if len(told) > 2 * len(pending) + 1000:
            self._told = {waiting.id: told[waiting.id] for waiting in pending if waiting.id in told}
        return first + self._paced(other)

    def _paced(self, waiting: list[Waiting]) -> list[Waiting]:
        """Choose as many as the pace allows, going on behind the one that was last."""
        now = self._clock()
        self._left = min(2 * self.pace, self._left + (now - self._at) * self.pace)
        self._at = now
        many = min(len(waiting), int(self._left))
        self._left -= many
        self.behind = many < len(waiting)
        if self.behind:
            begin = bisect_right(waiting, self._last, key=lambda each: each.id)
            waiting = (waiting[begin : begin + many] + waiting[:begin])[:many]
            self._last = waiting[-1].id if waiting else self._last
        return waiting


def books_of(
    plan: Plan, rows: Mapping[str, Workload], *, now: float, lease_seconds: float, reasons: Reasons | None = None
) -> Books:
    """Turn a plan into changes and decisions; `rows` is what the plan was made from."""
    books = Books()
    pending = (reasons or Reasons(AT_ONCE)).news(plan.pending, rows)
    plan = replace(plan, pending=tuple(pending))
    plan = named(plan, rows)
    for start in plan.start:
        _start(books, start, rows[start.id], now, lease_seconds, lenders(plan, start))
    for evict in plan.evict:
        _leave(books, evict, rows[evict.id], rows.get(evict.beneficiary), now)
    for move in plan.move:
        _leave(books, move, rows[move.id], rows.get(move.beneficiary), now)
    for refusal in plan.refused:
        _refuse(books, refusal, rows[refusal.id], now)
    for waiting in plan.pending:
        _wait(books, waiting, rows[waiting.id])
    return books


def named(plan: Plan, rows: Mapping[str, Workload]) -> Plan:
    """Say names where the engine says ids: people know their jobs by name."""

    def said(items: Sequence[Said]) -> tuple[Said, ...]:
        return tuple(replace(item, message=with_names(item.message, rows)) for item in items)

    return replace(
        plan,
        start=said(plan.start),
        evict=said(plan.evict),
        move=said(plan.move),
        refused=said(plan.refused),
        pending=said(plan.pending),
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
    books: Books, start: Start, row: Workload, now: float, lease_seconds: float, borrowed_from: tuple[str, ...]
) -> None:
    number = row.attempt + 1
    placement = places(start.placement)
    fields: dict[str, object] = {
        "state": "starting",
        "attempt": number,
        "placement": placement,
        "claim": (),
        "started_at": now,
        "over_quota": not start.in_quota,
        "borrowed_from": borrowed_from,
        "failed_node": None,
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
    books.add(change, decide(row, "start", start.rule, start.message, **_plain(start.numbers)))


def _leave(books: Books, leave: Evict | Move, row: Workload, by: Workload | None, now: float) -> None:
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
        "promised_to": leave.beneficiary,
        "claim": places(leave.to) if isinstance(leave, Move) else (),
        "reason_code": "moving" if moved else "making_way",
        "reason_message": leave.message,
        "reason_numbers": dict(leave.numbers),
    }
    change = Change(row.id, fields, row.version, HOLDS)
    books.add(change, decide(row, "move" if moved else "evict", leave.rule, leave.message, **_plain(leave.numbers)))


def _refuse(books: Books, refusal: Refusal, row: Workload, now: float) -> None:
    fields: dict[str, object] = {
        "state": "cancelled",
        "ended_at": now,
        "claim": (),
        "reason_code": refusal.code,
        "reason_message": refusal.message,
        "reason_numbers": dict(refusal.numbers),
        "message": refusal.message,
    }
    change = Change(row.id, fields, row.version, ("pending",))
    books.add(change, decide(row, "refuse", refusal.rule, refusal.message, **_plain(refusal.numbers)))


def _wait(books: Books, waiting: Waiting, row: Workload) -> None:
    fields: dict[str, object] = {
        "reason_code": waiting.code,
        "reason_message": waiting.message,
        "reason_numbers": dict(waiting.numbers),
        "claim": places(waiting.claim),
        "not_before": waiting.not_before,
    }
    said = None
    if row.reason_code != waiting.code:
        said = decide(row, "wait", waiting.rule, waiting.message, **_plain(waiting.numbers))
    books.add(Change(row.id, fields, row.version, ("pending",)), said)


def _is_told(row: Workload, waiting: Waiting, rows: Mapping[str, Workload]) -> bool:
    """Say whether the books have this reason already."""
    if row.reason_code != waiting.code or not _close_enough(row.not_before, waiting.not_before):
        return False
    return _claimed(row, waiting) and row.reason_message == with_names(waiting.message, rows)


def _may_wait(row: Workload, waiting: Waiting) -> bool:
    """Say whether the reason in the books will do for a moment: there is one, and no claim begins or ends."""
    return row.reason_code in WAITING and _claimed(row, waiting)


def _claimed(row: Workload, waiting: Waiting) -> bool:
    """Say whether the books have this claim already."""
    return row.claim == places(waiting.claim) if row.claim or waiting.claim else True


def _alike(a: Waiting, b: Waiting) -> bool:
    """Say whether two reasons would be written the same."""
    if a is b:
        return True
    same = a.message == b.message and a.code == b.code and a.claim == b.claim
    return same and _close_enough(a.not_before, b.not_before)


def _close_enough(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= NOT_BEFORE_SLACK


def _plain(numbers: Mapping[str, object]) -> dict[str, object]:
    return {str(key): value for key, value in numbers.items()}


def places(placement: Placement) -> tuple[Place, ...]:
    """Write a placement of the engine as the store keeps it, one entry a worker."""
    ordered = sorted(placement, key=lambda placed: placed.worker)
    return tuple(Place(machine_of(p.node), tuple(p.devices), (p.milli,) * len(p.devices)) for p in ordered)
