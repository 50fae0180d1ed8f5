"""Derive which running workloads are over quota now, from the policy in force and what runs, never from their start.

A workload is over quota if its team uses more than it reserves, the workload included, once everything that is less
protected has left (rules 2 and 5.3). Only preemptible work is over quota.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from ...engine.index.ledger import Ledger, LineState
from ...engine.snapshot import PRIORITIES
from ...store.records import Workload

SortKey = tuple[bool, int, int, float, float, str]
"""Most protected first: non-preemptible work, then by priority of the team, priority, start, submission and id."""


class CountedWorkload(NamedTuple):
    """One workload: its place in the order of protection, and the reservations that it counts in."""

    sort_key: SortKey
    amounts: Mapping[LineState, int]
    """milli-GPUs by line, of the team and of its departments"""
    guarantors: frozenset[LineState] | None
    """the lines that must all cover it; None: nothing is reserved for it"""


class CoveredWork:
    """The workloads that count in one line, most protected first, of which the reservation covers the first.

    The sum only grows along the order, so that a change moves the end of what is covered by a few workloads.
    """

    def __init__(self, reserved: int) -> None:
        self._reserved = reserved
        self._order: list[SortKey] = []
        self._amounts: dict[str, int] = {}
        self._covered = 0
        """how many workloads are covered"""
        self._used = 0
        """milli-GPUs of the covered workloads"""
        self.beyond: set[str] = set()
        """ids of the workloads that are not covered"""

    def put(self, sort_key: SortKey, amount: int) -> set[str]:
        """Count a workload; return its id, and those that became covered or ceased to be."""
        at, id = bisect_left(self._order, sort_key), sort_key[-1]
        self._order.insert(at, sort_key)
        self._amounts[id] = amount
        if at <= self._covered:
            self._covered += 1
            self._used += amount
        else:
            self.beyond.add(id)
        return self._move_end() | {id}

    def remove(self, sort_key: SortKey) -> set[str]:
        """Stop counting a workload; return the ids of others that are covered now."""
        at, id = bisect_left(self._order, sort_key), sort_key[-1]
        del self._order[at]
        amount = self._amounts.pop(id)
        if at < self._covered:
            self._covered -= 1
            self._used -= amount
        self.beyond.discard(id)
        return self._move_end()

    def _move_end(self) -> set[str]:
        moved = set()
        while self._used > self._reserved:
            self._covered -= 1
            moved.add(id := self._order[self._covered][-1])
            self._used -= self._amounts[id]
            self.beyond.add(id)
        while self._covered < len(self._order):
            id = self._order[self._covered][-1]
            if self._used + self._amounts[id] > self._reserved:
                break
            self._covered += 1
            self._used += self._amounts[id]
            self.beyond.discard(id)
            moved.add(id)
        return moved


class QuotaStanding:
    """The running workloads that are over quota; a change costs what it changes, not all that a team runs."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._counted: dict[str, CountedWorkload] = {}
        self._lines: dict[LineState, CoveredWork] = {}
        self._changed: set[str] = set()
        self._standing: dict[str, bool] = {}

    def put(self, row: Workload, amounts: tuple[tuple[str, int], ...]) -> None:
        """Count a workload that holds GPUs in these pools; none of them is in the policy if `amounts` is empty."""
        self.remove(row.id)
        account = self._ledger.account(row.team or "")
        started = row.submitted_at if row.started_at is None else row.started_at
        priority = -account.team.priority, -PRIORITIES[row.priority]
        sort_key = row.preemptible, *priority, started, row.submitted_at, row.id
        by_line: dict[LineState, int] = {}
        for pool, amount in amounts:
            for level in account.chain:
                for line in level.reserving(pool):
                    by_line[line] = by_line.get(line, 0) + amount
        levels = [(account.guarantor(pool), pool) for pool, _ in amounts]
        covering = {line for level, pool in levels if level is not None for line in level.reserving(pool)}
        reserved = bool(levels) and all(level is not None for level, _ in levels)
        self._counted[row.id] = CountedWorkload(sort_key, by_line, frozenset(covering) if reserved else None)
        self._changed.add(row.id)
        for line, amount in by_line.items():
            if line not in self._lines:
                self._lines[line] = CoveredWork(line.quota.reserved)
            self._changed |= self._lines[line].put(sort_key, amount)

    def remove(self, id: str) -> None:
        """Stop counting a workload."""
        counted = self._counted.pop(id, None)
        if counted is not None:
            self._changed.add(id)
            for line in counted.amounts:
                self._changed |= self._lines[line].remove(counted.sort_key)

    def over_quota(self) -> Mapping[str, bool]:
        """Return the id of every counted workload to whether it is over quota; the same object until it changes."""
        changed, self._changed = self._changed, set()
        now = {id: self._is_over(self._counted[id]) for id in changed if id in self._counted}
        gone = changed - now.keys()
        if any(self._standing.get(id) is not over for id, over in now.items()) or not gone.isdisjoint(self._standing):
            self._standing = self._standing | now
            for id in gone:
                self._standing.pop(id, None)
        return self._standing

    def _is_over(self, counted: CountedWorkload) -> bool:
        """Whether a workload is preemptible, and the reservations of its team, or a department's, do not cover it."""
        preemptible, *_, id = counted.sort_key
        if not preemptible or counted.guarantors is None:
            return preemptible
        return any(id in self._lines[line].beyond for line in counted.guarantors)
