"""Order pending workloads within one admission cycle (rule 3)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from ..index.cluster import Cluster
from ..index.groups import WorkloadGroup
from ..index.ledger import Account
from ..index.nodes import PoolState
from ..snapshot import Profile, Workload

Key = tuple[object, ...]
_NO_SHARES = (0,)
_MAX_IN_VAIN = 16
"""After so many unschedulable groups in a row, all remaining groups are checked at once."""


def rank_in_profile(profile: Profile, team: str) -> int:
    """Return the team's rank in the profile; unnamed teams come last."""
    return next((at for at, names in enumerate(profile.policies) if team in names), len(profile.policies))


def rank(group: WorkloadGroup, pool: PoolState) -> tuple[int, int, int]:
    """Return the ranks of a group in a pool: profile in the pool, team in the profile, the team's priority."""
    known = group.ranks.get(pool.pool.name)
    if known is None:
        known = group.ranks[pool.pool.name] = (
            pool.rank.get(group.profile.name, len(pool.rank)),
            rank_in_profile(group.profile, group.account.team.name),
            -group.account.team.priority,
        )
    return known


def common(group: WorkloadGroup, pool: PoolState, over_quota: bool) -> Key:
    """Return the part of the sort key that a whole group shares; smaller is earlier."""
    account, name = group.account, pool.pool.name
    shares = account.shares(name) if over_quota else _NO_SHARES
    keys = group.keys[over_quota]
    known = keys.get(name)
    if known is None or known[-2] is not shares:
        last = over_quota and account.team.weight == "Lowest"
        known = keys[name] = (not group.nominated, last, *rank(group, pool), shares, -group.priority)
    return known


def key(cluster: Cluster, group: WorkloadGroup, pool: PoolState, workload: Workload, over_quota: bool) -> Key:
    """Return the sort key of a workload in its class; it ends in the id, so it is total."""
    owner = group.account.used_by_owner.get(workload.owner, 0) if cluster.settings.user_fairness else 0
    return (*common(group, pool, over_quota), owner, workload.submitted_at, workload.id)


class GroupHeads:
    """The heads of one class's groups in order; each decision may change the order of the rest.

    A group competes in one pool at a time: `at` says in which of its pools. An entry whose key has grown is pushed
    again with its new one, one whose key has fallen by `lower`. A group enters as one; its members only do when it is
    the group's turn (what they share is the beginning of their keys), and not where the group is `unschedulable`: then
    none of its workloads can start or evict.
    """

    def __init__(
        self,
        cluster: Cluster,
        groups: Iterable[WorkloadGroup],
        over_quota: bool,
        unschedulable: Callable[[WorkloadGroup], bool] | None = None,
    ) -> None:
        self.cluster, self.over_quota, self.unschedulable = cluster, over_quota, unschedulable
        self.heap: list[tuple[Key, int, int, WorkloadGroup, Workload | None]] = []
        self.pushed = 0
        self.in_vain = 0
        """The number of unschedulable groups in a row."""
        self.at: dict[int, int] = {}
        self.groups: list[WorkloadGroup] = []
        self._by_account: dict[Account, list[WorkloadGroup]] | None = None
        for group in groups:
            self.groups.append(group)
            self.at[id(group)] = 0
            self.pushed += 1
            self.heap.append((common(group, group.pools[0], over_quota), 0, self.pushed, group, None))
        heapq.heapify(self.heap)

    def enter(self, group: WorkloadGroup, at: int) -> None:
        """Push a group, competing in its pool number `at`."""
        self._know(group)
        self.at[id(group)] = at
        self._push(group, at, None)

    def pool_after(self, group: WorkloadGroup, turn: Key) -> int | None:
        """Return the number of the first pool in which a group comes after `turn`, the key that is served, or None."""
        heads = list(group.heads())
        for at, pool in enumerate(group.pools if heads else ()):
            if min(key(self.cluster, group, pool, head, self.over_quota) for head in heads) > turn:
                return at
        return None

    def again(self, group: WorkloadGroup, owner: str) -> None:
        """Push the owner's next workload, after one has been served."""
        line = group.owner_queues.get(owner)
        if line:
            self._push(group, self.at[id(group)], line[0])

    def enter_again(self, group: WorkloadGroup, owner: str) -> None:
        """Push an owner's first workload after a requeue, unless the group was removed."""
        self._know(group)
        if self.at.setdefault(id(group), 0 if len(group.members()) == 1 else -1) >= 0:
            self.again(group, owner)

    def lower(self, account: Account, owner: str) -> None:
        """Push the entries whose keys may have fallen: an owner uses less of an account than before."""
        if self.over_quota:
            for group in self._family(account):
                self._push(group, self.at[id(group)], None)
        elif self.cluster.settings.user_fairness:
            for group in self._of_account().get(account, ()):
                if self.at[id(group)] >= 0:
                    self.again(group, owner)

    def _know(self, group: WorkloadGroup) -> None:
        if id(group) not in self.at:
            self.groups.append(group)
            self._by_account = None

    def _of_account(self) -> dict[Account, list[WorkloadGroup]]:
        if self._by_account is None:
            self._by_account = {}
            for group in self.groups:
                self._by_account.setdefault(group.account, []).append(group)
        return self._by_account

    def _family(self, account: Account) -> list[WorkloadGroup]:
        """Return the groups that compete and whose shares depend on an account."""
        accounts = self.cluster.ledger.affected(account)
        return [q for account in accounts for q in self._of_account().get(account, ()) if self.at[id(q)] >= 0]

    def remove(self, group: WorkloadGroup) -> None:
        """Remove a group: no workload in it can start or evict."""
        self.at[id(group)] = -1

    def __iter__(self) -> Iterator[tuple[WorkloadGroup, Workload, int]]:
        while self.heap:
            old, at, _, group, workload = heapq.heappop(self.heap)
            if self.at[id(group)] != at:
                continue
            if workload is None:
                self._open(group, at, old)
                continue
            if not group.owner_queues[workload.owner] or group.owner_queues[workload.owner][0] is not workload:
                continue
            new = key(self.cluster, group, group.pools[at], workload, self.over_quota)
            if new != old:
                heapq.heappush(self.heap, (new, at, self.pushed, group, workload))
                continue
            self.in_vain = 0
            yield group, workload, at

    def _open(self, group: WorkloadGroup, at: int, old: Key) -> None:
        """Push every owner's first workload."""
        if common(group, group.pools[at], self.over_quota) != old:
            self._push(group, at, None)
        elif self.unschedulable is not None and self.unschedulable(group):
            self.remove(group)
            self.in_vain += 1
            if self.in_vain == _MAX_IN_VAIN and all(w is None and self.unschedulable(q) for _, _, _, q, w in self.heap):
                self.heap.clear()
        else:
            for workload in group.heads():
                self._push(group, at, workload)

    def _push(self, group: WorkloadGroup, at: int, workload: Workload | None) -> None:
        pool = group.pools[at]
        new = (
            key(self.cluster, group, pool, workload, self.over_quota)
            if workload
            else common(group, pool, self.over_quota)
        )
        self.pushed += 1
        heapq.heappush(self.heap, (new, at, self.pushed, group, workload))
