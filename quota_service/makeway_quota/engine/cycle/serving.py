"""Serve one class of pending workloads in order: start them, nominate them, or evict for them (rules 3 to 5).

Called for every class by the rounds of the admission cycle (rounds.py).
"""

from __future__ import annotations

from ..index.cluster import Cluster
from ..index.groups import WorkloadGroup
from ..index.nodes import PoolState, WorkerPlacement
from ..plan_builder import PlanBuilder
from ..rules.order import GroupHeads, sort_key
from ..snapshot import Workload
from .admission import start_beside_hold, try_nominate, try_reclaim
from .booting import await_nodes, only_booting_helps
from .unschedulable import Unschedulable


def guaranteed(cluster: Cluster, group: WorkloadGroup, pool: PoolState, workers: int = 0) -> bool:
    """Whether one of a group, with so many workers, is within the reservation in a pool."""
    amount = max(group.need.total, group.need.gpus * workers)
    return cluster.ledger.in_quota(group.account, pool.pool.name, amount, group.non_preemptible)


def serve(
    cluster: Cluster, builder: PlanBuilder, waiting: list[WorkloadGroup], unschedulable: Unschedulable | None = None
) -> None:
    """Serve a class: each workload in the first pool with room, else by a nomination, else by reclaim.

    Work in quota in one of its pools may start over quota in another: better than an eviction.
    `unschedulable`: the check for groups of the class over quota with neither room nor candidates.
    """
    over_quota = unschedulable is not None

    def may(group: WorkloadGroup, pool: PoolState) -> bool:
        return group.may_borrow if over_quota else guaranteed(cluster, group, pool)

    entered, out = _split(cluster, waiting, unschedulable)
    if not entered:
        return
    heads = GroupHeads(cluster, entered, over_quota, unschedulable)
    builder.withdrawn_starts.clear()
    builder.lowered_usage.clear()
    releases = builder.progress.releases
    for group, workload, at in heads:
        pool = group.pools[at]
        turn = sort_key(cluster, group, pool, workload, over_quota) if out else ()
        nominated = cluster.withdraw_nomination(workload)
        if not (over_quota or nominated) and _awaited_as_others(builder, heads, group, workload, at):
            continue
        eligible_pools = [p for p in group.pools if may(group, p)]
        startable_pools = _startable_pools(group, nominated, eligible_pools)
        nominated_in_quota = bool(nominated) and nominated[0].node.pool in eligible_pools
        may_start_here = pool in startable_pools or (  # else its nomination outlives its quota
            bool(startable_pools) and group.may_borrow and (over_quota or not nominated_in_quota)
        )
        starts_over_quota = pool not in startable_pools or (over_quota and group.may_borrow)
        if may_start_here and start_beside_hold(builder, group, workload, pool, nominated, starts_over_quota):
            _pop(heads, group, workload)
        elif startable_pools and at + 1 < len(group.pools):
            if nominated:
                cluster.nominate(workload, group.need, nominated)
            heads.enter(group, at + 1)
        elif not (_kept_elsewhere(group, nominated, startable_pools) and not over_quota) and (
            try_nominate(builder, group, workload, startable_pools, nominated, over_quota)
            or _try_reclaim(builder, group, workload, eligible_pools, over_quota)
            or (not (over_quota or nominated) and await_nodes(builder, group, workload, eligible_pools))
        ):
            _pop(heads, group, workload)
        else:
            heads.remove(group)
            if nominated and not over_quota and not group.non_preemptible:
                cluster.nominate(workload, group.need, nominated)
            elif nominated:
                builder.progress.decisions += 1  # the nomination no longer fits: its GPUs are free for others
                builder.progress.releases += 1
        if nominated:
            builder.lowered_usage.append((group.account, workload.owner))
        _enter_again(heads, builder, waiting)
        if out and builder.progress.releases != releases:
            for other in out:  # these may have room now; one that came before this turn gets it in the next round
                if (number := heads.pool_after(other, turn)) is not None:
                    heads.enter(other, number)
            out = []


def _awaited_as_others(
    builder: PlanBuilder, heads: GroupHeads, group: WorkloadGroup, workload: Workload, at: int
) -> bool:
    """Whether only nodes that boot could help a workload, as one of its group before; it was nominated there if so."""
    if at + 1 < len(group.pools) or not only_booting_helps(builder, group):
        return False
    pools = [pool for pool in group.pools if guaranteed(builder.cluster, group, pool)]
    if await_nodes(builder, group, workload, pools):
        _pop(heads, group, workload)
    else:
        heads.remove(group)
    return True


def _enter_again(heads: GroupHeads, builder: PlanBuilder, waiting: list[WorkloadGroup]) -> None:
    """Push what the last decision brought forward: work of owners who use less now, and withdrawn starts."""
    while builder.lowered_usage:
        heads.push_lowered(*builder.lowered_usage.pop())
    while builder.withdrawn_starts:
        back, owner = builder.withdrawn_starts.pop()
        if any(group is back for group in waiting):
            heads.reenter(back, owner)


def _startable_pools(
    group: WorkloadGroup, nominated: tuple[WorkerPlacement, ...], eligible_pools: list[PoolState]
) -> list[PoolState]:
    """Return the pools in which a workload may start: the eligible ones, and that of a nomination that stays valid."""
    if not nominated:
        return eligible_pools
    return [p for p in group.pools if p in eligible_pools or nomination_outlives_quota(group, nominated, p)]


def _kept_elsewhere(
    group: WorkloadGroup, nominated: tuple[WorkerPlacement, ...], startable_pools: list[PoolState]
) -> bool:
    """Whether a workload is nominated over quota in another pool: then nothing is evicted for it."""
    return bool(nominated) and group.may_borrow and not any(nominated[0].node.pool is pool for pool in startable_pools)


def nomination_outlives_quota(group: WorkloadGroup, nominated: tuple[WorkerPlacement, ...], pool: PoolState) -> bool:
    """Whether a nomination in a pool stays valid although the reservation is used up.

    True for work that may not run over quota: other teams of its department may have used the department's
    reservation meanwhile.
    """
    return (group.non_preemptible or not group.may_borrow) and nominated[0].node.pool is pool


def _split(
    cluster: Cluster, waiting: list[WorkloadGroup], unschedulable: Unschedulable | None
) -> tuple[list[WorkloadGroup], list[WorkloadGroup]]:
    """Return the groups of a class that may start or evict, and (over quota) those without room yet."""
    able: list[WorkloadGroup] = []
    out: list[WorkloadGroup] = []
    if unschedulable is not None:
        for group in waiting:
            if group.nominated or group.may_borrow:
                (out if unschedulable(group) else able).append(group)
        return able, out
    # These use less of a reservation once a nomination of theirs starts in another pool.
    easing = {level for group in waiting if group.nominated for level in group.account.chain}
    for group in waiting:
        if group.nominated or group.in_quota_somewhere() or (easing and not easing.isdisjoint(group.account.chain)):
            able.append(group)
    return able, out


def _pop(heads: GroupHeads, group: WorkloadGroup, workload: Workload) -> None:
    group.pop(workload)
    heads.push_next(group, workload.owner)


def _try_reclaim(
    builder: PlanBuilder, group: WorkloadGroup, workload: Workload, pools: list[PoolState], over_quota: bool
) -> bool:
    """Evict for a workload; over quota only where no GPUs are held, or where they are held for it.

    A workload that requests no GPUs never evicts (rule 2).
    """
    if not group.total or group.reclaim_deferred or (over_quota and not _may_evict(builder.cluster, group, pools)):
        return False
    holds = [builder.holds[pool.pool.name] for pool in pools if over_quota and pool.pool.name in builder.holds]
    mine = [hold for hold in holds if hold.workload is workload]
    open_to_all = [pool for pool in pools if not any(hold.pool is pool for hold in holds)]
    if try_reclaim(builder, group, workload, open_to_all, over_quota):
        return True
    for hold in mine:
        with hold.in_state(enforced=False):
            if try_reclaim(builder, group, workload, [hold.pool], over_quota):
                return True
    return False


def _may_evict(cluster: Cluster, group: WorkloadGroup, pools: list[PoolState]) -> bool:
    """Whether there may be victims for a workload over quota."""
    if cluster.settings.fair_share == "reclaim":
        return True
    return (
        cluster.lowest_priority(group.account.team.name, cluster.pools_with_candidates(group.account, pools))
        < group.priority
    )
