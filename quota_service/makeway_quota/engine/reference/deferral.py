"""Find work that may evict others only later, by `min_runtime` or `reclaim_after` (engine rules 5.3 and 5.8)."""

from __future__ import annotations

from ..plan import Code
from .cycle import Cycle
from .state.cluster import Cluster
from .state.queues import Queue, age
from .state.quota import in_quota
from .victims.moves import consolidate
from .victims.selection import select
from .victims.victims import Preemptor, protected_until, rights_of

DEFERRABLE = ("limit", "pool_capacity", "no_free_gpus", "fragmented", "outranked")


def deferral(cycle: Cycle, queue: Queue) -> tuple[Code, str] | None:
    """Return the code and the rule of a queue that may evict for its oldest workload later; None if it may not."""
    cluster = cycle.cluster
    if not queue.need.total:
        return None
    if queue.patient and _evicts(cycle, queue, cluster.now):
        return "patience", "reclaim_after"
    if queue.kind != "job" or (not queue.patient and _evicts(cycle, queue, cluster.now)):
        return None
    running = [allocation.workload for allocation in cluster.running.values()]
    ends = sorted(end for w in running if (end := protected_until(cluster, w)) is not None and end > cluster.now)
    if not ends or not _evicts(cycle, queue, ends[-1]):
        return None
    first = next(end for end in ends if _evicts(cycle, queue, end))
    oldest = min(queue.members, key=age)
    if queue.patient and first <= oldest.submitted_at + queue.profile.reclaim_after:
        return "patience", "reclaim_after"
    return "protected", "min_runtime"


def _evicts(cycle: Cycle, queue: Queue, at: float) -> bool:
    """Whether the oldest workload of a queue could move or evict others if `min_runtime` protected as it will then."""
    cluster = cycle.cluster.copy()
    cluster.protection_at = at
    oldest = min(queue.members, key=age)
    ways = _ways(cycle, cluster, queue)
    for pool in queue.pools:
        if in_quota(cluster, queue.chain, pool, queue.need.total, queue.non_preemptible):
            mover = Preemptor(cluster, oldest, queue.need, queue.chain, pool, ("reservation",))
            if consolidate(mover) is not None:
                return True
    return any(select(way) is not None for way in ways)


def _ways(cycle: Cycle, cluster: Cluster, queue: Queue) -> list[Preemptor]:
    """Return the oldest workload of a queue as a preemptor in each pool, by each of its rights."""
    workload, need, chain = min(queue.members, key=age), queue.need, queue.chain
    preemptors = []
    for pool in queue.pools:
        if in_quota(cluster, chain, pool, need.total, queue.non_preemptible):
            rights = rights_of(cluster, workload, need, pool, True)
            rights += [("reservation", "own_team_any_priority")] if queue.non_preemptible else []
            preemptors += [Preemptor(cluster, workload, need, chain, pool, way) for way in rights]
    for pool in queue.pools if queue.may_borrow else ():
        if pool not in cycle.decisions.holds and not cycle.is_on_its_way(queue, pool):
            rights = rights_of(cluster, workload, need, pool, False)
            preemptors += [Preemptor(cluster, workload, need, chain, pool, way) for way in rights]
    return preemptors
