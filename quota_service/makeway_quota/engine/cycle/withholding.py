"""Withhold starts over quota that the very next plan would evict for work in quota (invariant I7).

Called once nothing else changes in a plan. A start over quota can put its policy above its reservation: from the next
plan on all work of that policy is a candidate, the start among them, and would be evicted again at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..index.cluster import Cluster
from ..index.nodes import Allocation, PoolState
from ..index.queues import Queue
from ..plan_builder import PlanBuilder
from ..rules.reclaim import reclaim
from ..rules.trial import restore
from ..rules.victims import Preemptor, Right
from ..state import Workload


def withhold(builder: PlanBuilder, heads: Iterable[Queue]) -> bool:
    """Withdraw the starts over quota that the next plan would evict; return whether there were any.

    Their queues start nothing over quota in this plan.
    """
    cluster = builder.cluster
    fresh = [cluster.allocations[start.id] for start in builder.started.values() if not start.in_quota]
    fresh = [allocation for allocation in fresh if allocation.amount]
    waiting = list(_waiting(cluster, heads, fresh)) if fresh else []
    if not waiting:
        return False
    builder.lift_holds()
    names: dict[str, Workload] = {}
    with _as_running(cluster, [cluster.allocations[name] for name in builder.started]):
        for queue, pool in waiting:
            victims = _next_victims(cluster, queue, pool)
            for name in _to_withdraw(cluster, fresh, victims):
                names.setdefault(name, next(queue.heads()))
    for name in sorted(names):
        allocation = cluster.allocations[name]
        cluster.withdraw(allocation)
        builder.withdraw(allocation.workload)
        queue = builder.came_from.pop(name)
        queue.put_back(allocation.workload)
        queue.withhold(names[name])
    return bool(names)


def _waiting(cluster: Cluster, heads: Iterable[Queue], fresh: list[Allocation]) -> Iterator[tuple[Queue, PoolState]]:
    """Iterate over the queues in quota, and their pools, in which a start may have made candidates."""
    above = {pool for allocation in fresh for pool in _reserved_pools(cluster, allocation)}
    for queue in heads:
        if queue.total and not queue.patient and queue.has_members() and queue.in_quota_somewhere():
            for pool in queue.pools:
                name = pool.pool.name
                if name in above and cluster.ledger.in_quota(queue.account, name, queue.total, queue.non_preemptible):
                    yield queue, pool


def _reserved_pools(cluster: Cluster, allocation: Allocation) -> set[str]:
    """Return the names of the pools that share a reservation of the start's policy, its own pool among them."""
    name = allocation.pool.pool.name
    lines = [line for level in cluster.account(allocation.workload).chain for line in level.reserving(name)]
    return {name, *(pool for pool in cluster.pools if any(line.quota.covers(pool) for line in lines))}


@contextmanager
def _as_running(cluster: Cluster, starts: list[Allocation]) -> Iterator[None]:
    """Treat the starts of this plan as running work, as the next plan does, within a block."""
    before, rankings = [allocation.workload for allocation in starts], cluster.rankings
    cluster.rankings = {}
    for allocation in starts:
        allocation.fresh = False
        allocation.workload = replace(allocation.workload, state="running", started_at=cluster.now)
    try:
        yield
    finally:
        cluster.rankings = rankings
        for allocation, workload in zip(starts, before, strict=True):
            allocation.fresh, allocation.workload = True, workload


def _next_victims(cluster: Cluster, queue: Queue, pool: PoolState) -> list[Allocation]:
    """Return the victims of a queue's next workload in a pool, by the strongest right that finds any."""
    rights: list[Right] = ["reservation"]
    if queue.kind == "job" and cluster.settings.in_team_preemption and not queue.non_preemptible:
        rights.append("own_team")
    if queue.non_preemptible:
        rights.append("own_policy")
    head = next(queue.heads())
    for right in rights:
        preemptor = Preemptor(cluster, head, queue.need, queue.account, pool, right)
        choice = reclaim(preemptor)
        if choice is not None:
            for victim in choice.victims:
                restore(preemptor, victim)
            return [victim.allocation for victim in choice.victims]
    return []


def _to_withdraw(cluster: Cluster, fresh: list[Allocation], victims: list[Allocation]) -> list[str]:
    """Return the starts among the victims; else those of the victims' policies, or else of their departments."""
    mine = [allocation for allocation in fresh if any(allocation is victim for victim in victims)]
    if not mine:
        accounts = [cluster.account(victim.workload) for victim in victims]
        mine = [allocation for allocation in fresh if cluster.account(allocation.workload) in accounts]
        above = {level for account in accounts for level in account.chain}
        mine = mine or [a for a in fresh if not above.isdisjoint(cluster.account(a.workload).chain)]
    return [allocation.workload.id for allocation in mine]
