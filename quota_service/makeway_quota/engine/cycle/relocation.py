"""Move victims to what their own plan leaves free: those that get room are moved, not stopped (rule 5.6).

Called once no victim can be spared. A start of the plan that comes after a victim in the order of rule 3 is withdrawn
where the victim can have its room: the victim would take it in the next plan, or evict the start.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..index.cluster import Cluster
from ..index.nodes import Allocation, Part, PoolState
from ..index.queues import PendingQueues, Queue, cannot_start_at_all
from ..placement.fit import allowed, find
from ..plan_builder import PlanBuilder
from ..rules.consolidation import Moving
from ..rules.order import key
from ..snapshot import Workload
from .admission import MOST_WITHDRAWN, put_back


def relocate(builder: PlanBuilder, queues: PendingQueues) -> bool:
    """Move the victims that get room, in the order of rule 3; return whether any does."""
    cluster = builder.cluster
    if not builder.started and not any(max(pool.free, pool.future) > 0 for pool in cluster.pools.values()):
        return False
    able = [(queues.queue_of(w), w) for w in map(cluster.workloads.__getitem__, builder.evicted)]
    able = [(queue, workload) for queue, workload in able if queue.total and (builder.started or _has_space(queue))]
    waiting = [(queue, workload) for queue, workload in able if cannot_start_at_all(cluster, workload) is None]
    waiting.sort(key=lambda each: _place_in_order(cluster, *each))
    preemptors = {each.preemptor for each in builder.evicted.values()}
    preemptors |= {each.preemptor for each in builder.moved.values()}
    found = [workload for queue, workload in waiting if _relocated(builder, queue, workload, preemptors)]
    return bool(found)


def _has_space(queue: Queue) -> bool:
    """Whether a pool of the queue has as many free GPUs as one of it requests; False is certain, True is not."""
    return any(max(pool.free, pool.future) >= queue.total for pool in queue.pools)


def _place_in_order(cluster: Cluster, queue: Queue, workload: Workload) -> tuple[bool, tuple[object, ...]]:
    over = not any(_in_quota(queue, pool) for pool in queue.pools)
    return over, key(cluster, queue, queue.pools[0], workload, over)


def _in_quota(queue: Queue, pool: PoolState) -> bool:
    """Whether a victim is in quota in a pool once all that terminates is gone."""
    guarantor = queue.account.guarantor(pool.pool.name)
    lines = guarantor.reserving(pool.pool.name) if guarantor else ()
    return bool(lines) and all(line.future + queue.total <= line.quota.reserved for line in lines)


def _relocated(builder: PlanBuilder, queue: Queue, workload: Workload, preemptors: set[str]) -> bool:
    """Move a victim if it gets room; none of the `preemptors` makes way for it."""
    cluster = builder.cluster
    able = [
        pool
        for pool in queue.pools
        if _in_quota(queue, pool) or (queue.borrows and pool.pool.name not in builder.holds)
    ]
    for pool in able:
        if parts := _room(cluster, queue, pool, _in_quota(queue, pool)):
            _move(builder, queue, workload, parts)
            return True
    for pool in able if builder.progress.withdrawn_starts < MOST_WITHDRAWN else ():
        later = _later_starts(builder, queue, workload, pool, preemptors)
        if later is not None:
            for start in later:
                put_back(builder, start)
            _move(builder, queue, workload, _room(cluster, queue, pool, _in_quota(queue, pool)))
            return True
    return False


def _room(cluster: Cluster, queue: Queue, pool: PoolState, in_quota: bool) -> tuple[Part, ...]:
    """Return where a victim could start now, its old devices not counted; empty if it could not.

    In quota, also where it could once all that terminates is gone: the next plan would nominate it there.
    """
    if not allowed(cluster, queue.account, pool, queue.total, True):
        return ()
    return find(pool, queue.need) or (find(pool, queue.need, True) if in_quota else ())


def _later_starts(
    builder: PlanBuilder, queue: Queue, workload: Workload, pool: PoolState, preemptors: set[str]
) -> list[Allocation] | None:
    """Return starts of this plan in a pool, later in the order, without which a victim has room; None if none do.

    No workload for which others are evicted (`preemptors`) is among them.
    """
    cluster = builder.cluster
    started = [cluster.allocations[name] for name in sorted(builder.started) if name not in preemptors]
    light = queue.need.cpu or queue.need.memory  # then what requests no GPUs may be in the way, too
    fresh = [a for a in started if a.pool is pool and (a.amount or light) and _may_wait(cluster, a)]
    if not fresh:
        return None
    with _Withdrawn(cluster, fresh):
        over = not _in_quota(queue, pool)
        mine = key(cluster, queue, pool, workload, over)
        later = []
        for start in fresh:
            theirs = key(cluster, builder.came_from[start.workload.id], pool, start.workload, over)
            in_quota = builder.started[start.workload.id].in_quota
            if (in_quota and not over and theirs > mine) or (not in_quota and (not over or theirs > mine)):
                later.append((theirs, start))
    withdrawn = [start for _, start in sorted(later, key=lambda each: each[0])]
    if not withdrawn or not _has_room_without(cluster, queue, pool, withdrawn, not over):
        return None
    for start in list(withdrawn):
        fewer = [each for each in withdrawn if each is not start]
        if fewer and _has_room_without(cluster, queue, pool, fewer, not over):
            withdrawn = fewer
    return withdrawn


def _may_wait(cluster: Cluster, start: Allocation) -> bool:
    return not start.workload.non_preemptible and cluster.evictable(start) is start


def _has_room_without(
    cluster: Cluster, queue: Queue, pool: PoolState, starts: Iterable[Allocation], in_quota: bool
) -> bool:
    with _Withdrawn(cluster, starts):
        return bool(_room(cluster, queue, pool, in_quota))


class _Withdrawn:
    """The cluster without some starts of this plan, within a block."""

    def __init__(self, cluster: Cluster, starts: Iterable[Allocation]) -> None:
        self.cluster, self.starts = cluster, list(starts)

    def __enter__(self) -> None:
        for start in self.starts:
            self.cluster.withdraw(start)

    def __exit__(self, *_: object) -> None:
        for start in self.starts:
            self.cluster.start_again(start)


def _move(builder: PlanBuilder, queue: Queue, workload: Workload, parts: tuple[Part, ...]) -> None:
    """Record that a victim moves to these parts."""
    cluster, victim = builder.cluster, builder.evicted.pop(workload.id)
    cluster.nominate(workload, queue.need, parts)
    allocation = cluster.allocations[workload.id]
    preemptor = cluster.workloads[victim.preemptor]
    builder.move(preemptor, [Moving(allocation, parts)])
