"""Widen the elastic gangs that this plan starts onto GPUs that no pending work in quota wants."""

from __future__ import annotations

from dataclasses import replace

from ..index.cluster import Cluster
from ..index.groups import WorkloadGroup
from ..index.nodes import Allocation
from ..placement.fit import find_placement, within_limits
from ..plan_builder import PlanBuilder


def grow(cluster: Cluster, builder: PlanBuilder, waiting: list[WorkloadGroup]) -> bool:
    """Add workers to the gangs that this plan starts, up to their request, in the order of their starts.

    Return whether any gang grew.
    """
    elastic = [t for name in builder.started if (t := cluster.allocations[name]).need.workers > t.need.min_workers]
    if not elastic:
        return False
    wanted = {
        pool.pool.name
        for group in waiting
        for pool in group.pools
        if any(group.owner_queues.values())
        and cluster.ledger.in_quota(group.account, pool.pool.name, group.need.total, group.non_preemptible)
    }
    wanted.update([name for pool in wanted for name in cluster.pools[pool].peer_pools])
    grew = False
    for allocation in elastic:
        if allocation.pool.pool.name not in wanted:
            grew |= _widen(cluster, builder, allocation)
    return grew


def _widen(cluster: Cluster, builder: PlanBuilder, allocation: Allocation) -> bool:
    need = replace(allocation.need, min_workers=1, workers=1)
    account, pool, non_preemptible = (
        cluster.account(allocation.workload),
        allocation.pool,
        allocation.workload.non_preemptible,
    )
    may_borrow = not non_preemptible and account.team.weight != "None"
    while len(allocation.parts) < allocation.need.workers and within_limits(cluster, account, pool, need.gpus):
        if not may_borrow and not cluster.ledger.in_quota(account, pool.pool.name, need.gpus, non_preemptible):
            break
        parts = find_placement(pool, need)
        if not parts:
            break
        cluster.widen(allocation, parts[0]._replace(worker=len(allocation.parts)))
    wider = len(allocation.parts) > allocation.need.min_workers
    if wider:
        builder.widen(allocation)
    return wider
