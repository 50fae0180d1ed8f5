"""Derive which running workloads are over quota now, from the policy in force and what runs, never from their start.

A workload is over quota if its policy uses more than it reserves, the workload included, once everything that is less
protected has left (rules 2 and 5.3). Only what may be preempted is over quota.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...engine.index.ledger import Account, Ledger, LineState
from ...engine.snapshot import PRIORITIES
from ...store.records import Workload

Rank = tuple[bool, int, int, float, float, str]
"""Most protected first: non-preemptible work, then by policy priority, priority, start, submission and id."""


class Counted(NamedTuple):
    """One workload in the order of protection, with its milli-GPUs by pool."""

    rank: Rank
    account: Account
    amounts: tuple[tuple[str, int], ...]


class QuotaStanding:
    """The running workloads that are over quota; only departments and teams that changed are counted again."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._families: dict[Account, dict[str, Counted]] = {}
        """The highest department of a team, or the team itself, to the workloads that count there."""
        self._family_of: dict[str, Account] = {}
        self._changed: set[Account] = set()
        self._standing: Mapping[str, bool] = {}

    def put(self, row: Workload, amounts: tuple[tuple[str, int], ...]) -> None:
        """Count a workload that holds GPUs in these pools; none of them is in the policy if `amounts` is empty."""
        account = self._ledger.account(row.team or "")
        family = account.chain[-1]
        started = row.submitted_at if row.started_at is None else row.started_at
        priority = -account.policy.priority, -PRIORITIES[row.priority]
        rank = row.preemptible, *priority, started, row.submitted_at, row.id
        self._families.setdefault(family, {})[row.id] = Counted(rank, account, amounts)
        self._family_of[row.id] = family
        self._changed.add(family)

    def remove(self, id: str) -> None:
        """Stop counting a workload."""
        family = self._family_of.pop(id, None)
        if family is not None:
            del self._families[family][id]
            self._changed.add(family)

    def over_quota(self) -> Mapping[str, bool]:
        """Return the id of every workload that counts to whether it is over quota; the same object until it changes."""
        if self._changed:
            standing = {id: over for id, over in self._standing.items() if self._family_of.get(id) not in self._changed}
            standing = {id: over for id, over in standing.items() if id in self._family_of}
            for family in self._changed:
                standing.update(_over_quota(self._families[family].values()))
            self._changed.clear()
            if standing != self._standing:
                self._standing = standing
        return self._standing


def _over_quota(workloads: Iterable[Counted]) -> Mapping[str, bool]:
    """Return ids to whether they are over quota; `workloads` are all that count in one family of policies."""
    used: dict[LineState, int] = {}
    found = {}
    for each in sorted(workloads, key=lambda counted: counted.rank):
        for pool, amount in each.amounts:
            for level in each.account.chain:
                for line in level.reserving(pool):
                    used[line] = used.get(line, 0) + amount
        preemptible, *_, id = each.rank
        found[id] = preemptible and not _covered(each, used)
    return found


def _covered(each: Counted, used: Mapping[LineState, int]) -> bool:
    """Whether the reservations of a workload's policy, or of the nearest department that has some, cover it."""
    guarantors = [(each.account.guarantor(pool), pool) for pool, _ in each.amounts]
    return bool(guarantors) and all(
        guarantor is not None and all(used[line] <= line.quota.reserved for line in guarantor.reserving(pool))
        for guarantor, pool in guarantors
    )
