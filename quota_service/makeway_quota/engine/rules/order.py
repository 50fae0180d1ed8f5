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
_MAX_UNSCHEDULABLE_IN_A_ROW = 16
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


def group_sort_key(group: WorkloadGroup, pool: PoolState, over_quota: bool) -> Key:
    """Return the part of the sort key that a whole group shares; smaller is earlier."""
    account, name = group.account, pool.pool.name
    shares = account.shares(name) if over_quota else _NO_SHARES
    keys = group.keys[over_quota]
    known = keys.get(name)
    if known is None or known[-2] is not shares:
        last = over_quota and account.team.weight == "Lowest"
        known = keys[name] = (not group.nominated, last, *rank(group, pool), shares, -group.priority)
    return known


def sort_key(cluster: Cluster, group: WorkloadGroup, pool: PoolState, workload: Workload, over_quota: bool) -> Key:
    """Return the sort key of a workload, in quota or over quota; it ends in the id, so it is total."""
    owner = group.account.used_by_owner.get(workload.owner, 0) if cluster.settings.user_fairness else 0
    return (*group_sort_key(group, pool, over_quota), owner, workload.submitted_at, workload.id)


class GroupHeads:
    """The heads of groups in their order, in quota or over quota; each decision may change the order of the rest.

    A group competes in one pool at a time, that at its `pool_index` (-1: it was removed). An entry whose key has grown
    is pushed again with the new one; `push_lowered` pushes those whose keys have fallen. A group is one entry until it
    is the first (what its members share is the beginning of their keys); then the heads of its owners are pushed, but
    not where it is `unschedulable`: none of its workloads can start or evict then.
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
        self.unschedulable_in_a_row = 0
        """The number of unschedulable groups in a row."""
        self.pool_index: dict[int, int] = {}
        """The `id()` of a group to the index of the pool in which it competes."""
        self.groups: list[WorkloadGroup] = []
        self._by_account: dict[Account, list[WorkloadGroup]] | None = None
        for group in groups:
            self.groups.append(group)
            self.pool_index[id(group)] = 0
            self.pushed += 1
            self.heap.append((group_sort_key(group, group.pools[0], over_quota), 0, self.pushed, group, None))
        heapq.heapify(self.heap)

    def enter(self, group: WorkloadGroup, at: int) -> None:
        """Push a group, which competes in its pool at this index."""
        self._register(group)
        self.pool_index[id(group)] = at
        self._push(group, at, None)

    def pool_after(self, group: WorkloadGroup, served_key: Key) -> int | None:
        """Return the index of the first of its pools in which a group comes after the key that is served, or None."""
        heads = list(group.heads())
        for at, pool in enumerate(group.pools if heads else ()):
            if min(sort_key(self.cluster, group, pool, head, self.over_quota) for head in heads) > served_key:
                return at
        return None

    def push_next(self, group: WorkloadGroup, owner: str) -> None:
        """Push the owner's next workload, after one has been served."""
        queue = group.owner_queues.get(owner)
        if queue:
            self._push(group, self.pool_index[id(group)], queue[0])

    def reenter(self, group: WorkloadGroup, owner: str) -> None:
        """Push an owner's first workload after a requeue, unless the group was removed."""
        self._register(group)
        if self.pool_index.setdefault(id(group), 0 if len(group.members()) == 1 else -1) >= 0:
            self.push_next(group, owner)

    def push_lowered(self, account: Account, owner: str) -> None:
        """Push the entries whose keys may have fallen: an owner uses less of an account than before."""
        if self.over_quota:
            for group in self._affected_groups(account):
                self._push(group, self.pool_index[id(group)], None)
        elif self.cluster.settings.user_fairness:
            for group in self._groups_of_account().get(account, ()):
                if self.pool_index[id(group)] >= 0:
                    self.push_next(group, owner)

    def _register(self, group: WorkloadGroup) -> None:
        if id(group) not in self.pool_index:
            self.groups.append(group)
            self._by_account = None

    def _groups_of_account(self) -> dict[Account, list[WorkloadGroup]]:
        if self._by_account is None:
            self._by_account = {}
            for group in self.groups:
                self._by_account.setdefault(group.account, []).append(group)
        return self._by_account

    def _affected_groups(self, account: Account) -> list[WorkloadGroup]:
        """Return the groups that compete and whose shares depend on an account."""
        accounts = self.cluster.ledger.affected(account)
        return [
            q for account in accounts for q in self._groups_of_account().get(account, ()) if self.pool_index[id(q)] >= 0
        ]

    def remove(self, group: WorkloadGroup) -> None:
        """Remove a group: no workload in it can start or evict."""
        self.pool_index[id(group)] = -1

    def __iter__(self) -> Iterator[tuple[WorkloadGroup, Workload, int]]:
        while self.heap:
            old, at, _, group, workload = heapq.heappop(self.heap)
            if self.pool_index[id(group)] != at:
                continue
            if workload is None:
                self._push_heads(group, at, old)
                continue
            if not group.owner_queues[workload.owner] or group.owner_queues[workload.owner][0] is not workload:
                continue
            new = sort_key(self.cluster, group, group.pools[at], workload, self.over_quota)
            if new != old:
                heapq.heappush(self.heap, (new, at, self.pushed, group, workload))
                continue
            self.unschedulable_in_a_row = 0
            yield group, workload, at

    def _push_heads(self, group: WorkloadGroup, at: int, old: Key) -> None:
        """Push every owner's first workload."""
        if group_sort_key(group, group.pools[at], self.over_quota) != old:
            self._push(group, at, None)
        elif self.unschedulable is not None and self.unschedulable(group):
            self.remove(group)
            self.unschedulable_in_a_row += 1
            if self.unschedulable_in_a_row == _MAX_UNSCHEDULABLE_IN_A_ROW and all(
                w is None and self.unschedulable(q) for _, _, _, q, w in self.heap
            ):
                self.heap.clear()
        else:
            for workload in group.heads():
                self._push(group, at, workload)

    def _push(self, group: WorkloadGroup, at: int, workload: Workload | None) -> None:
        pool = group.pools[at]
        new = (
            sort_key(self.cluster, group, pool, workload, self.over_quota)
            if workload
            else group_sort_key(group, pool, self.over_quota)
        )
        self.pushed += 1
        heapq.heappush(self.heap, (new, at, self.pushed, group, workload))
