"""Average the past over-quota use of every policy: those with less come first (`history_half_life`).

A policy's history is the average of its over-quota use, in milli-GPUs, weighed by age: what was a half-life ago counts
half. Constant use gives a history equal to it. For a department all its teams count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ..engine.index.ledger import Account, Ledger, LineState
from ..engine.snapshot import ADMITTED, TeamQuota
from ..engine.weights import decayed
from ..store.records import Workload

HISTORY_STEP = 100
"""Milli-GPUs that a history changes by before the engine sees it: every change costs the engine work."""

WRITE_EVERY = 1.0
"""Least seconds between two writes."""

Amounts = Callable[[Workload], Iterable[tuple[str, int]]]
"""The pools that a workload holds GPUs in, with how many milli-GPUs."""


class Accounting:
    """The histories of all policies, carried forward from change to change. `clock` never runs backwards.

    With a half-life of 0 nothing is counted and what was known is forgotten.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.half_life = 0.0
        self.clock = clock
        self._at = clock()
        self._history: dict[str, float] = {}
        self._policies: tuple[TeamQuota, ...] = ()
        self._current: tuple[TeamQuota, ...] = ()
        self._ledger = Ledger(())
        self._pools: tuple[str, ...] = ()
        self._amounts: Amounts = lambda _: ()
        self._recorded: dict[str, tuple[str, tuple[tuple[str, int], ...]]] = {}
        self._over: dict[str, int] = {}
        self._stale = False
        self._written: dict[str, int] | None = None
        self._written_at = self._at - WRITE_EVERY
        self._known = False

    @property
    def on(self) -> bool:
        """Whether past use counts at all."""
        return self.half_life > 0

    def use(
        self,
        policies: tuple[TeamQuota, ...],
        pools: Iterable[str],
        half_life: float,
        amounts: Amounts,
        rows: Iterable[Workload],
    ) -> None:
        """Count by these policies from now on; `rows` are all that may hold GPUs."""
        self.advance()
        self.half_life = half_life
        self._policies = self._current = policies
        self._pools, self._amounts = tuple(pools), amounts
        self._recorded = {}
        self._ledger = Ledger(policies if self.on else ())
        self._history = {p.name: self._history.get(p.name, 0.0) for p in policies} if self.on else {}
        self._stale = True
        self._written = None
        self.follow(rows)

    def recall(self, kept: Mapping[str, float], age: float) -> None:
        """Go on from what was written `age` seconds ago, unless it is already known.

        The time between counts as what runs now, but for one half-life at most: a clock that was set wrong cannot
        erase the histories. A clock that was set back counts nothing.
        """
        if self._known or not self.on:
            return
        self._known = True
        self._history |= {name: kept[name] for name in self._history if name in kept}
        self._at = self.clock()
        self._carry(min(max(0.0, age), self.half_life))

    def follow(self, rows: Iterable[Workload]) -> None:
        """Record the allocations of changed workloads."""
        if not self.on:
            return
        self.advance()
        for row in rows:
            team, before = self._recorded.pop(row.id, ("", ()))
            self._record(team, before, -1)
            if row.team is not None and row.state in ADMITTED:
                now = tuple(self._amounts(row))
                self._recorded[row.id] = row.team, now
                self._record(row.team, now, 1)
            self._stale = True
        self._ledger.changed.clear()

    def _record(self, team: str, amounts: Iterable[tuple[str, int]], sign: int) -> None:
        for pool, amount in amounts:
            self._ledger.record(self._ledger.account(team), pool, False, "", usage=sign * amount)

    def advance(self) -> None:
        """Carry the histories forward to now."""
        now = self.clock()
        elapsed, self._at = max(0.0, now - self._at), now
        if self.on:
            self._carry(elapsed)

    def _carry(self, seconds: float) -> None:
        over = self.over()
        for name, before in self._history.items():
            self._history[name] = over[name] + decayed(before - over[name], seconds, self.half_life)

    def over(self) -> Mapping[str, int]:
        """Return the present over-quota use of every policy, in milli-GPUs."""
        if self._stale:
            self._over = {name: over_quota(self._ledger.account(name), self._pools) for name in self._history}
            self._stale = False
        return self._over

    def history(self, name: str) -> int:
        """Return the history of one policy, in whole steps."""
        return round(self._history.get(name, 0.0) / HISTORY_STEP) * HISTORY_STEP

    def policies(self) -> tuple[TeamQuota, ...]:
        """Return the policies with their histories; the same object as before while these are the same."""
        if self.on:
            self.advance()
            if any(self.history(policy.name) != policy.history for policy in self._current):
                self._current = self.applied(self._policies)
        return self._current

    def applied(self, policies: tuple[TeamQuota, ...], half_life: float = 1.0) -> tuple[TeamQuota, ...]:
        """Return other policies with the histories of those of the same names, if they count."""
        return (
            policies
            if half_life <= 0
            else tuple(replace(policy, history=self.history(policy.name)) for policy in policies)
        )

    def unwritten(self, at_once: bool = False) -> Mapping[str, float] | None:
        """Return the histories to write now; None if they are written already (or just were, unless `at_once`).

        While over-quota use stays the same, what was written can be carried forward from the store alone.
        """
        over = dict(self.over()) if self.on else {}
        if over == self._written or not (at_once or self.clock() - self._written_at >= WRITE_EVERY):
            return None
        self.advance()
        self._written, self._written_at = over, self.clock()
        return {name: milli for name, milli in self._history.items() if milli > 0}


def over_quota(account: Account, pools: Iterable[str]) -> int:
    """Return what a policy uses beyond its reservations; pools under the same reservation count as one."""
    pools_of_lines: dict[tuple[LineState, ...], list[str]] = {}
    for pool in pools:
        guarantor = account.guarantor(pool)
        pools_of_lines.setdefault(guarantor.reserving(pool) if guarantor else (), []).append(pool)
    total = 0
    for lines, members in pools_of_lines.items():
        used = sum(account.used_in_pool.get(pool, 0) for pool in members)
        total += min(used, lines[0].account.over_quota_use(members[0])) if lines else used
    return total
