"""Find work that may evict others only later, by `min_runtime` or `reclaim_after` (engine rules 5.3 and 5.8)."""

from __future__ import annotations

from ..plan import Code
from .cycle import Cycle
from .state.cluster import Cluster
from .state.groups import WorkloadGroup, age
from .state.quota import in_quota
from .victims.moves import consolidate
from .victims.selection import select
from .victims.victims import Preemptor, protected_until, rights_of

DEFERRABLE = ("limit", "pool_capacity", "no_free_gpus", "fragmented", "outranked")


def deferral(cycle: Cycle, group: WorkloadGroup) -> tuple[Code, str] | None:
    """Return the code and the rule of a group that may evict for its oldest workload later; None if it may not."""
    cluster = cycle.cluster
    if not group.need.total:
        return None
    if group.reclaim_deferred and _evicts(cycle, group, cluster.now):
        return "patience", "reclaim_after"
    if group.kind != "job" or (not group.reclaim_deferred and _evicts(cycle, group, cluster.now)):
        return None
    running = [allocation.workload for allocation in cluster.running.values()]
    ends = sorted(end for w in running if (end := protected_until(cluster, w)) is not None and end > cluster.now)
    if not ends or not _evicts(cycle, group, ends[-1]):
        return None
    first = next(end for end in ends if _evicts(cycle, group, end))
    oldest = min(group.members, key=age)
    if group.reclaim_deferred and first <= oldest.submitted_at + group.profile.reclaim_after:
        return "patience", "reclaim_after"
    return "protected", "min_runtime"


def _evicts(cycle: Cycle, group: WorkloadGroup, at: float) -> bool:
    """Whether the oldest workload of a group could move or evict others if `min_runtime` protected as it will then."""
    cluster = cycle.cluster.copy()
    cluster.protection_at = at
    oldest = min(group.members, key=age)
    ways = _ways(cycle, cluster, group)
    for pool in group.pools:
        if in_quota(cluster, group.chain, pool, group.need.total, group.non_preemptible):
            mover = Preemptor(cluster, oldest, group.need, group.chain, pool, ("reservation",))
            if consolidate(mover) is not None:
                return True
    return any(select(way) is not None for way in ways)


def _ways(cycle: Cycle, cluster: Cluster, group: WorkloadGroup) -> list[Preemptor]:
    """Return the oldest workload of a group as a preemptor in each pool, by each of its rights."""
    workload, need, chain = min(group.members, key=age), group.need, group.chain
    preemptors = []
    for pool in group.pools:
        if in_quota(cluster, chain, pool, need.total, group.non_preemptible):
            rights = rights_of(cluster, workload, need, pool, True)
            rights += [("reservation", "own_team_any_priority")] if group.non_preemptible else []
            preemptors += [Preemptor(cluster, workload, need, chain, pool, way) for way in rights]
    for pool in group.pools if group.may_borrow else ():
        if pool not in cycle.decisions.holds and not cycle.is_on_its_way(group, pool):
            rights = rights_of(cluster, workload, need, pool, False)
            preemptors += [Preemptor(cluster, workload, need, chain, pool, way) for way in rights]
    return preemptors
