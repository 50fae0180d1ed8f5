"""Who is next."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from .cluster import Cluster
from .limits import Account
from .state import Profile, Workload
from .world import Need, PoolState

Key = tuple[object, ...]


@dataclass(slots=True)
class Queue:
    """Pending workloads that are alike for every rule but their owner and their age.

    What one of them is denied, all of them are: so a queue is asked once, not once per workload.
    """

    account: Account
    profile: Profile
    need: Need
    firm: bool
    session: bool
    priority: int
    patient: bool
    promised: bool
    pools: tuple[PoolState, ...]
    lines: dict[str, deque[Workload]] = field(default_factory=dict)
    """Owner to that owner's workloads, oldest first."""

    def heads(self) -> Iterator[Workload]:
        """List each owner's first workload."""
        return (line[0] for line in self.lines.values() if line)

    def pop(self, workload: Workload) -> None:
        """Take the first workload of an owner out."""
        self.lines[workload.owner].popleft()

    def put_back(self, workload: Workload) -> None:
        """Let somebody wait again whose start was withdrawn."""
        line = self.lines[workload.owner]
        self.lines[workload.owner] = deque(sorted([*line, workload], key=lambda w: (w.submitted_at, w.id)))

    def members(self) -> list[Workload]:
        """List everybody who is still waiting."""
        return [workload for line in self.lines.values() for workload in line]


def queues(cluster: Cluster, pending: Iterable[Workload]) -> list[Queue]:
    """Put pending workloads that are alike into one queue, oldest first within an owner."""
    promised = {t.workload.promised_to for t in cluster.tenancies.values() if t.leaving}
    found: dict[tuple[object, ...], Queue] = {}
    in_line = sorted(pending, key=lambda w: (w.submitted_at, w.id))
    held_for = in_line[:1] and cluster.waits_too_long(in_line[0])  # then it matters who ends in time
    for w in in_line:
        need = cluster.need(w)
        profile = cluster.profiles[w.profile]
        patient = cluster.now - w.submitted_at < profile.reclaim_after
        own = w.id if w.id in promised or w.id in cluster.claims else ""
        key = (own, w.policy, w.profile, need, w.firm, w.kind, w.priority, patient, held_for and cluster.time_limit(w))
        queue = found.get(key)
        if queue is None:
            queue = found[key] = Queue(
                cluster.account(w),
                profile,
                need,
                w.firm,
                w.firm and w.kind == "session",
                w.priority,
                patient,
                bool(own),
                cluster.pools_of(w),
            )
        queue.lines.setdefault(w.owner, deque()).append(w)
    return list(found.values())


def rank_in_profile(profile: Profile, policy: str) -> int:
    """Give the policy's rank in the profile; unnamed policies come last."""
    return next((at for at, names in enumerate(profile.policies) if policy in names), len(profile.policies))


def rank(queue: Queue, pool: PoolState) -> tuple[int, int, int]:
    """Give the part of the order that comes from ranks: profile in the pool, policy in the profile, policy priority."""
    return (
        pool.rank.get(queue.profile.name, len(pool.rank)),
        rank_in_profile(queue.profile, queue.account.policy.name),
        -queue.account.policy.priority,
    )


def common(queue: Queue, pool: PoolState, over: bool) -> Key:
    """Give the part of the order of one class that everybody in a queue shares: smaller is earlier."""
    account = queue.account
    last = over and account.policy.weight == "Lowest"
    shares = tuple(level.share(pool.pool.name) for level in reversed(account.chain)) if over else (0,)
    return (not queue.promised, last, *rank(queue, pool), shares, -queue.priority)


def key(cluster: Cluster, queue: Queue, pool: PoolState, workload: Workload, over: bool) -> Key:
    """Give the place in the order of one class; it ends in the id, so it is total."""
    owner = queue.account.owners.get(workload.owner, 0) if cluster.settings.user_fairness else 0
    return (*common(queue, pool, over), owner, workload.submitted_at, workload.id)


class Turn:
    """Hands out who is next, again and again, while what is handed out changes the order.

    A queue competes in one pool at a time: `at` says in which of its pools. Keys only grow while a plan is
    made, so an entry whose key is stale goes back with its new one. A queue enters as one; its members only do
    when it is the queue's turn (what they share is the beginning of their keys), and not where the queue is
    `hopeless`: then nothing in it could be done for anybody.
    """

    def __init__(
        self, cluster: Cluster, queues: Iterable[Queue], over: bool, hopeless: Callable[[Queue], bool] | None = None
    ) -> None:
        self.cluster, self.over, self.hopeless = cluster, over, hopeless
        self.heap: list[tuple[Key, int, int, Queue, Workload | None]] = []
        self.pushed = 0
        self.at: dict[int, int] = {}
        for queue in queues:
            self.enter(queue, 0)

    def enter(self, queue: Queue, at: int) -> None:
        """Let a queue compete in its pool number `at`."""
        self.at[id(queue)] = at
        self._push(queue, at, None)

    def again(self, queue: Queue, owner: str) -> None:
        """Let the owner's next workload compete, after one has been served."""
        line = queue.lines.get(owner)
        if line:
            self._push(queue, self.at[id(queue)], line[0])

    def leave(self, queue: Queue) -> None:
        """Take a queue out: nothing it may do is left."""
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
            new = key(self.cluster, queue, queue.pools[at], workload, self.over)
            if new != old:
                heapq.heappush(self.heap, (new, at, self.pushed, queue, workload))
                continue
            yield queue, workload, at

    def _open(self, queue: Queue, at: int, old: Key) -> None:
        """Let every owner's first workload compete."""
        if common(queue, queue.pools[at], self.over) != old:
            self._push(queue, at, None)
        elif self.hopeless is not None and self.hopeless(queue):
            self.leave(queue)
        else:
            for workload in queue.heads():
                self._push(queue, at, workload)

    def _push(self, queue: Queue, at: int, workload: Workload | None) -> None:
        pool = queue.pools[at]
        new = key(self.cluster, queue, pool, workload, self.over) if workload else common(queue, pool, self.over)
        self.pushed += 1
        heapq.heappush(self.heap, (new, at, self.pushed, queue, workload))
