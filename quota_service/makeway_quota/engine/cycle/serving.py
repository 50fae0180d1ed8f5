"""Serve one class of pending workloads in order: start them, nominate them, or evict for them (rules 3 to 5).

Called for every class by the rounds of the admission cycle (rounds.py).
"""

from __future__ import annotations

from ..index.cluster import Cluster
from ..index.nodes import PoolState, WorkerPlacement
from ..index.queues import Queue
from ..plan_builder import PlanBuilder
from ..rules.order import QueueHeads, key
from ..snapshot import Workload
from .admission import start_beside_hold, try_nominate, try_reclaim
from .unschedulable import Unschedulable


def guaranteed(cluster: Cluster, queue: Queue, pool: PoolState, workers: int = 0) -> bool:
    """Whether one of a queue, with so many workers, is within the reservation in a pool."""
    amount = max(queue.need.total, queue.need.gpus * workers)
    return cluster.ledger.in_quota(queue.account, pool.pool.name, amount, queue.non_preemptible)


def serve(
    cluster: Cluster, builder: PlanBuilder, waiting: list[Queue], unschedulable: Unschedulable | None = None
) -> None:
    """Serve a class: each workload in the first pool with room, else by a nomination, else by reclaim.

    Work in quota in one of its pools may start over quota in another: better than an eviction.
    `unschedulable`: the check for queues of the class over quota with neither room nor candidates.
    """
    if not waiting:
        return
    over_quota = unschedulable is not None

    def may(queue: Queue, pool: PoolState) -> bool:
        return queue.borrows if over_quota else guaranteed(cluster, queue, pool)

    entered, out = _split(cluster, waiting, unschedulable)
    if not entered:
        return
    heads = QueueHeads(cluster, entered, over_quota, unschedulable)
    builder.returned.clear()
    builder.lowered.clear()
    releases = builder.progress.releases
    for queue, workload, at in heads:
        pool = queue.pools[at]
        turn = key(cluster, queue, pool, workload, over_quota) if out else ()
        nominated = cluster.withdraw_nomination(workload)
        eligible_pools = [p for p in queue.pools if may(queue, p)]
        startable_pools = _startable_pools(queue, nominated, eligible_pools)
        nominated_in_quota = bool(nominated) and nominated[0].node.pool in eligible_pools
        may_start_here = pool in startable_pools or (
            bool(startable_pools) and queue.borrows and (over_quota or not nominated_in_quota)
        )
        # else its nomination outlives its quota
        starts_over_quota = pool not in startable_pools or (over_quota and queue.borrows)
        if may_start_here and start_beside_hold(builder, queue, workload, pool, nominated, starts_over_quota):
            _pop(heads, queue, workload)
        elif startable_pools and at + 1 < len(queue.pools):
            if nominated:
                cluster.nominate(workload, queue.need, nominated)
            heads.enter(queue, at + 1)
        elif not (_kept_elsewhere(queue, nominated, startable_pools) and not over_quota) and (
            try_nominate(builder, queue, workload, startable_pools, nominated, over_quota)
            or _try_reclaim(builder, queue, workload, eligible_pools, over_quota)
        ):
            _pop(heads, queue, workload)
        else:
            heads.remove(queue)
            if nominated and not over_quota and not queue.non_preemptible:
                cluster.nominate(workload, queue.need, nominated)
            elif nominated:
                builder.progress.decisions += 1  # the nomination no longer fits: its GPUs are free for others
                builder.progress.releases += 1
        if nominated:
            builder.lowered.append((queue.account, workload.owner))
        _queue_again(heads, builder, waiting)
        if out and builder.progress.releases != releases:
            for other in out:  # these may have room now; one that came before this turn gets it in the next round
                if (number := heads.pool_after(other, turn)) is not None:
                    heads.enter(other, number)
            out = []


def _queue_again(heads: QueueHeads, builder: PlanBuilder, waiting: list[Queue]) -> None:
    """Push what the last decision brought forward: work of owners who use less now, and withdrawn starts."""
    while builder.lowered:
        heads.lower(*builder.lowered.pop())
    while builder.returned:
        back, owner = builder.returned.pop()
        if any(queue is back for queue in waiting):
            heads.enter_again(back, owner)


def _startable_pools(
    queue: Queue, nominated: tuple[WorkerPlacement, ...], eligible_pools: list[PoolState]
) -> list[PoolState]:
    """Return the pools in which a workload may start: the eligible ones, and that of a nomination that stays valid."""
    if not nominated:
        return eligible_pools
    return [p for p in queue.pools if p in eligible_pools or nomination_outlives_quota(queue, nominated, p)]


def _kept_elsewhere(queue: Queue, nominated: tuple[WorkerPlacement, ...], startable_pools: list[PoolState]) -> bool:
    """Whether a workload is nominated over quota in another pool: then nothing is evicted for it."""
    return bool(nominated) and queue.borrows and not any(nominated[0].node.pool is pool for pool in startable_pools)


def nomination_outlives_quota(queue: Queue, nominated: tuple[WorkerPlacement, ...], pool: PoolState) -> bool:
    """Whether a nomination in a pool stays valid although the reservation is used up.

    True for work that may not run over quota: other teams of its department may have used the department's
    reservation meanwhile.
    """
    return (queue.non_preemptible or not queue.borrows) and nominated[0].node.pool is pool


def _split(
    cluster: Cluster, waiting: list[Queue], unschedulable: Unschedulable | None
) -> tuple[list[Queue], list[Queue]]:
    """Return the queues of a class that may start or evict, and (over quota) those without room yet."""
    able: list[Queue] = []
    out: list[Queue] = []
    if unschedulable is not None:
        for queue in waiting:
            if queue.nominated or queue.borrows:
                (out if unschedulable(queue) else able).append(queue)
        return able, out
    # These use less of a reservation once a nomination of theirs starts in another pool.
    easing = {level for queue in waiting if queue.nominated for level in queue.account.chain}
    for queue in waiting:
        if queue.nominated or queue.in_quota_somewhere() or (easing and not easing.isdisjoint(queue.account.chain)):
            able.append(queue)
    return able, out


def _pop(heads: QueueHeads, queue: Queue, workload: Workload) -> None:
    queue.pop(workload)
    heads.again(queue, workload.owner)


def _try_reclaim(
    builder: PlanBuilder, queue: Queue, workload: Workload, pools: list[PoolState], over_quota: bool
) -> bool:
    """Evict for a workload; over quota only where no GPUs are held, or where they are held for it.

    A workload that requests no GPUs never evicts (rule 2).
    """
    if not queue.total or queue.patient or (over_quota and not _may_evict(builder.cluster, queue, pools)):
        return False
    holds = [builder.holds[pool.pool.name] for pool in pools if over_quota and pool.pool.name in builder.holds]
    mine = [hold for hold in holds if hold.workload is workload]
    open_to_all = [pool for pool in pools if not any(hold.pool is pool for hold in holds)]
    if try_reclaim(builder, queue, workload, open_to_all, over_quota):
        return True
    for hold in mine:
        with hold.in_state(enforced=False):
            if try_reclaim(builder, queue, workload, [hold.pool], over_quota):
                return True
    return False


def _may_evict(cluster: Cluster, queue: Queue, pools: list[PoolState]) -> bool:
    """Whether there may be victims for a workload over quota."""
    if cluster.settings.fair_share == "reclaim":
        return True
    return cluster.lowest(queue.account.policy.name, cluster.reach(queue.account, pools)) < queue.priority
