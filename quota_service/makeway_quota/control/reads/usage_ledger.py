"""Count the usage of teams row by row, with the engine's own ledger, so that no request builds a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...backends.base import NodeStatus
from ...engine.index.ledger import Ledger
from ...engine.rules.usage import TeamCount, add_usage, count_usage
from ...engine.snapshot import ADMITTED
from ...policy import Document
from ...store.records import Workload
from ...values import Place
from ..world.pool_assignment import PoolAssignment
from .quota_standing import QuotaStanding


class Record(NamedTuple):
    """The part of one workload in the counts: its team, and its milli-GPUs by pool."""

    team: str
    non_preemptible: bool
    amounts: tuple[tuple[str, int], ...]


class UsageLedger:
    """The usage of all rows that were added, equal to `usage_by_team` of the same world.

    One exception: a worker that holds devices of several pools on one node counts in one of them.
    """

    def __init__(self, document: Document, assignment: PoolAssignment) -> None:
        self._document = document
        self._ledger = Ledger(document.policies)
        self._standing = QuotaStanding(self._ledger)
        self._used: dict[str, dict[str, tuple[int, int]]] = {}
        self._records: dict[str, Record] = {}
        self._assign(assignment)

    def _assign(self, assignment: PoolAssignment) -> None:
        self._assignment = assignment
        self._devices: dict[str, dict[str, tuple[int, ...]]] = {}
        self._totals = {pool.name: 0 for pool in self._document.pools}
        for node in assignment.nodes:
            self._devices.setdefault(node.name, {})[node.pool] = node.devices
            self._totals[node.pool] = self._totals.get(node.pool, 0) + usable(node)

    def use(self, assignment: PoolAssignment) -> set[str]:
        """Use new nodes; return those whose pools or devices changed, whose rows must be counted again."""
        before = self._devices
        self._assign(assignment)
        return {name for name in before.keys() | self._devices.keys() if before.get(name) != self._devices.get(name)}

    def add(self, row: Workload) -> None:
        """Count a workload that holds GPUs; all others count nothing."""
        if row.team is None or row.state not in ADMITTED:
            return
        record = self._record(row)
        self._standing.put(row, record.amounts if record else ())
        if record is not None:
            self._records[row.id] = record
            self._count(record, 1)

    def remove(self, id: str) -> None:
        """Stop counting a workload."""
        self._standing.remove(id)
        record = self._records.pop(id, None)
        if record is not None:
            self._count(record, -1)

    def count(self) -> dict[str, TeamCount]:
        """Return every policy's usage by name."""
        return count_usage(self._ledger, self._totals, self._used)

    def over_quota(self) -> Mapping[str, bool]:
        """Return the id of every workload that counts to whether it is over quota now."""
        return self._standing.over_quota()

    def _count(self, record: Record, sign: int) -> None:
        account = self._ledger.account(record.team)
        for pool, amount in record.amounts:
            self._ledger.record(account, pool, record.non_preemptible, "", usage=sign * amount)
            self._ledger.changed.clear()
            add_usage(self._used, account, pool, sign * amount if record.non_preemptible else 0, sign * amount)

    def _record(self, row: Workload) -> Record | None:
        """Return what a row counts: what it was started with, whatever its nodes show, in the pools where they are now.

        A worker whose node is gone counts with the first of the others; work whose nodes are all gone in the first pool
        of its profile.
        """
        profile = self._document.profile(row.profile)
        pools = profile.pools if profile else ()
        homes = [self._pool_of(place, pools) for place in row.placement]
        first = next((home for home in homes if home is not None), None)
        if first is None:
            known = [pool for pool in pools or sorted(self._totals) if pool in self._totals]
            amounts = {known[0]: row.gpus * row.workers} if known else {}
        else:
            amounts = {}
            for place, home in zip(row.placement, homes, strict=True):
                held = sum(place.milli) if place.devices and home is not None else row.gpus
                amounts[home or first] = amounts.get(home or first, 0) + held
        return Record(row.team or "", not row.preemptible, tuple(amounts.items())) if amounts else None

    def _pool_of(self, place: Place, pools: tuple[str, ...]) -> str | None:
        return self._assignment.pool_of(place, pools)


def usable(node: NodeStatus) -> int:
    """Return the milli-GPUs of a node that work of Makeway can use, as the engine counts them."""
    if not node.ready or node.cordoned:
        return 0
    foreign = sum(min(milli, 1000) for index, milli in node.foreign.items() if index in node.devices)
    return max(0, 1000 * len(node.devices) - foreign - node.foreign_gpus)
