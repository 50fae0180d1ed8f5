"""Order pending workloads within one admission cycle (rule 3)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from ..index.cluster import Cluster
from ..index.ledger import Account
from ..index.nodes import PoolState
from ..index.queues import Queue
from ..snapshot import Profile, Workload

Key = tuple[object, ...]
_NO_SHARES = (0,)
_MAX_IN_VAIN = 16
"""After so many unschedulable queues in a row, all remaining queues are checked at once."""


def rank_in_profile(profile: Profile, policy: str) -> int:
    """Return the policy's rank in the profile; unnamed policies come last."""
    return next((at for at, names in enumerate(profile.policies) if policy in names), len(profile.policies))


def rank(queue: Queue, pool: PoolState) -> tuple[int, int, int]:
    """Return the ranks of a queue in a pool: profile in the pool, policy in the profile, policy priority."""
    known = queue.ranks.get(pool.pool.name)
    if known is None:
        known = queue.ranks[pool.pool.name] = (
            pool.rank.get(queue.profile.name, len(pool.rank)),
            rank_in_profile(queue.profile, queue.account.policy.name),
            -queue.account.policy.priority,
        )
    return known


def common(queue: Queue, pool: PoolState, over_quota: bool) -> Key:
    """Return the part of the sort key that a whole queue shares; smaller is earlier."""
    account, name = queue.account, pool.pool.name
    shares = account.shares(name) if over_quota else _NO_SHARES
    keys = queue.keys[over_quota]
    known = keys.get(name)
    if known is None or known[-2] is not shares:
        last = over_quota and account.policy.weight == "Lowest"
        known = keys[name] = (not queue.nominated, last, *rank(queue, pool), shares, -queue.priority)
    return known


def key(cluster: Cluster, queue: Queue, pool: PoolState, workload: Workload, over_quota: bool) -> Key:
    """Return the sort key of a workload in its class; it ends in the id, so it is total."""
    owner = queue.account.owners.get(workload.owner, 0) if cluster.settings.user_fairness else 0
    return (*common(queue, pool, over_quota), owner, workload.submitted_at, workload.id)


class QueueHeads:
    """The heads of one class's queues in order; each decision may change the order of the rest.

    A queue competes in one pool at a time: `at` says in which of its pools. An entry whose key has grown is pushed
    again with its new one, one whose key has fallen by `lower`. A queue enters as one; its members only do when it is
    the queue's turn (what they share is the beginning of their keys), and not where the queue is `unschedulable`: then
    none of its workloads can start or evict.
    """

    def __init__(
        self,
        cluster: Cluster,
        queues: Iterable[Queue],
        over_quota: bool,
        unschedulable: Callable[[Queue], bool] | None = None,
    ) -> None:
        self.cluster, self.over_quota, self.unschedulable = cluster, over_quota, unschedulable
        self.heap: list[tuple[Key, int, int, Queue, Workload | None]] = []
        self.pushed = 0
        self.in_vain = 0
        """The number of unschedulable queues in a row."""
        self.at: dict[int, int] = {}
        self.queues: list[Queue] = []
        self._by_account: dict[Account, list[Queue]] | None = None
        for queue in queues:
            self.queues.append(queue)
            self.at[id(queue)] = 0
            self.pushed += 1
            self.heap.append((common(queue, queue.pools[0], over_quota), 0, self.pushed, queue, None))
        heapq.heapify(self.heap)

    def enter(self, queue: Queue, at: int) -> None:
        """Push a queue, competing in its pool number `at`."""
        self._know(queue)
        self.at[id(queue)] = at
        self._push(queue, at, None)

    def pool_after(self, queue: Queue, turn: Key) -> int | None:
        """Return the number of the first pool in which a queue comes after `turn`, the key that is served, or None."""
        heads = list(queue.heads())
        for at, pool in enumerate(queue.pools if heads else ()):
            if min(key(self.cluster, queue, pool, head, self.over_quota) for head in heads) > turn:
                return at
        return None

    def again(self, queue: Queue, owner: str) -> None:
        """Push the owner's next workload, after one has been served."""
        line = queue.lines.get(owner)
        if line:
            self._push(queue, self.at[id(queue)], line[0])

    def enter_again(self, queue: Queue, owner: str) -> None:
        """Push an owner's first workload after a requeue, unless the queue was removed."""
        self._know(queue)
        if self.at.setdefault(id(queue), 0 if len(queue.members()) == 1 else -1) >= 0:
            self.again(queue, owner)

    def lower(self, account: Account, owner: str) -> None:
        """Push the entries whose keys may have fallen: an owner uses less of an account than before."""
        if self.over_quota:
            for queue in self._family(account):
                self._push(queue, self.at[id(queue)], None)
        elif self.cluster.settings.user_fairness:
            for queue in self._of_account().get(account, ()):
                if self.at[id(queue)] >= 0:
                    self.again(queue, owner)

    def _know(self, queue: Queue) -> None:
        if id(queue) not in self.at:
            self.queues.append(queue)
            self._by_account = None

    def _of_account(self) -> dict[Account, list[Queue]]:
        if self._by_account is None:
            self._by_account = {}
            for queue in self.queues:
                self._by_account.setdefault(queue.account, []).append(queue)
        return self._by_account

    def _family(self, account: Account) -> list[Queue]:
        """Return the queues that compete and whose shares depend on an account."""
        accounts = self.cluster.ledger.affected(account)
        return [q for account in accounts for q in self._of_account().get(account, ()) if self.at[id(q)] >= 0]

    def remove(self, queue: Queue) -> None:
        """Remove a queue: no workload in it can start or evict."""
        self.at[id(queue)] = -1

    def __iter__(self) -> Iterator[tuple[Queue, Workload, int]]:
        while self.heap:
            old, at, _, queue, workload = heapq.heappop(self.heap)
            if self.at[id(queue)] != at:
                continue
            if workload is None:
                self._open(queue, at, old)
                continue
            if not queue.lines[workload.owner] or queue.lines[workload.owner][0] is not workload:
                continue
            new = key(self.cluster, queue, queue.pools[at], workload, self.over_quota)
            if new != old:
                heapq.heappush(self.heap, (new, at, self.pushed, queue, workload))
                continue
            self.in_vain = 0
            yield queue, workload, at

    def _open(self, queue: Queue, at: int, old: Key) -> None:
        """Push every owner's first workload."""
        if common(queue, queue.pools[at], self.over_quota) != old:
            self._push(queue, at, None)
        elif self.unschedulable is not None and self.unschedulable(queue):
            self.remove(queue)
            self.in_vain += 1
            if self.in_vain == _MAX_IN_VAIN and all(w is None and self.unschedulable(q) for _, _, _, q, w in self.heap):
                self.heap.clear()
        else:
            for workload in queue.heads():
                self._push(queue, at, workload)

    def _push(self, queue: Queue, at: int, workload: Workload | None) -> None:
        pool = queue.pools[at]
        new = (
            key(self.cluster, queue, pool, workload, self.over_quota)
            if workload
            else common(queue, pool, self.over_quota)
        )
        self.pushed += 1
        heapq.heappush(self.heap, (new, at, self.pushed, queue, workload))
