"""Admit one workload: on free GPUs, on nominated ones, by moves, or by evictions."""

from __future__ import annotations

from collections.abc import Iterable

from ..index.cluster import Cluster
from ..index.nodes import Allocation, PoolState, WorkerPlacement
from ..index.queues import Queue
from ..placement.fit import allowed, enough, find
from ..plan_builder import PlanBuilder
from ..rules.consolidation import Moving, Rearrangement, consolidate
from ..rules.reclaim import Choice, evict_all, reclaim, restore_all
from ..rules.victims.preemptor import Preemptor, Rights
from ..rules.victims.rights import rights_of
from ..rules.victims.sets import WITHDRAW
from ..snapshot import Workload

MAX_WITHDRAWN = 1000
"""Starts of one plan that may be withdrawn for other workloads; then nothing is evicted until the next plan. Far more
than any plan needs: it stops two workloads that would replace each other for ever."""


def try_start(
    builder: PlanBuilder,
    queue: Queue,
    workload: Workload,
    pool: PoolState,
    nominated: tuple[WorkerPlacement, ...],
    in_quota: bool,
) -> bool:
    """Start a workload in a pool if it fits there now, on its nominated GPUs where these are in that pool."""
    cluster = builder.cluster
    need = queue.need
    mine = nominated if nominated and nominated[0].node.pool is pool and is_still_free(nominated, queue) else ()
    if not mine and not enough(pool, need):
        return False
    if len(mine) > need.min_workers and not allowed(cluster, queue.account, pool, need.gpus * len(mine)):
        mine = mine[: need.min_workers]
    if len(mine) <= need.min_workers and not allowed(cluster, queue.account, pool, need.total):
        return False
    parts = mine or find(pool, need)
    if not parts:
        return False
    _start(builder, queue, workload, parts, in_quota)
    return True


def _start(
    builder: PlanBuilder, queue: Queue, workload: Workload, parts: tuple[WorkerPlacement, ...], in_quota: bool
) -> None:
    builder.start(workload, builder.cluster.start(workload, queue.need, parts), in_quota)
    builder.came_from[workload.id] = queue


def start_beside_hold(
    builder: PlanBuilder,
    queue: Queue,
    workload: Workload,
    pool: PoolState,
    nominated: tuple[WorkerPlacement, ...],
    over_quota: bool,
) -> bool:
    """Start a workload if it fits now; over quota, it must not delay the workload that GPUs are held for."""
    hold = builder.holds.get(pool.pool.name)
    if hold is None or hold.workload is workload:
        return try_start(builder, queue, workload, pool, nominated, not over_quota)
    if not over_quota or hold.ends_in_time(workload):
        with hold.in_state(enforced=False):
            return try_start(builder, queue, workload, pool, nominated, not over_quota)
    with hold.in_state(enforced=True):
        if hold.line_in_the_way(queue) or hold.over_capacity(queue):
            return False
        done = try_start(builder, queue, workload, pool, nominated, False)
    if done:
        hold.count(builder.cluster.allocations[workload.id])
    return done


def is_still_free(parts: tuple[WorkerPlacement, ...], queue: Queue) -> bool:
    """Whether the placement of a nomination is free by now, on nodes that are up."""
    if not parts or False in [part.node.usable for part in parts]:
        return False
    hosted: dict[str, int] = {}
    asked: dict[tuple[str, int], int] = {}
    for part in parts:
        node = part.node
        hosted[node.node.name] = hosted.get(node.node.name, 0) + 1
        for at in part.devices:
            key = (node.node.name, at)
            asked[key] = asked.get(key, 0) + part.milli
            if node.free[at] < asked[key]:
                return False
    for part in parts:
        node, many = part.node, hosted[part.node.node.name]
        cpu, memory = many * queue.need.cpu, many * queue.need.memory
        if cpu and min(node.cpu_open, node.cpu_future) < cpu:
            return False
        if memory and min(node.memory_open, node.memory_future) < memory:
            return False
        if min(node.pods_open, node.pods_future) < many:
            return False
    return True


def try_nominate(
    builder: PlanBuilder,
    queue: Queue,
    workload: Workload,
    pools: Iterable[PoolState],
    nominated: tuple[WorkerPlacement, ...],
    over_quota: bool,
) -> bool:
    """Nominate GPUs that are about to be free: those of the old nomination, or for work in quota any."""
    if over_quota and not nominated and not queue.nominated:
        return False
    cluster = builder.cluster
    account, amount = queue.account, queue.need.total
    for pool in sorted(pools, key=lambda p: not nominated or nominated[0].node.pool is not p):
        if not allowed(cluster, account, pool, amount, True):
            continue
        mine = nominated if nominated and nominated[0].node.pool is pool else ()
        parts = mine or (find(pool, queue.need, True) if not over_quota or queue.nominated else ())
        if parts:
            cluster.nominate(workload, queue.need, parts)
            builder.nominate(workload, queue, pool)
            return True
    return False


def try_reclaim(
    builder: PlanBuilder,
    queue: Queue,
    workload: Workload,
    pools: Iterable[PoolState],
    over_quota: bool,
) -> bool:
    """Make room by moves if that is enough, else by evictions, by the rights of the workload."""
    cluster = builder.cluster
    for pool in () if over_quota else pools:
        if pool.free >= queue.total:
            preemptor = Preemptor(cluster, workload, queue.need, queue.account, pool, ("reservation",))
            change = consolidate(preemptor)
            if change is not None:
                _rearrange(builder, queue, preemptor, change)
                return True
    ways = [(pool, rights) for pool in pools for rights in _rights(cluster, queue, workload, pool, over_quota)]
    if _try_evict(builder, queue, workload, ways, over_quota):
        return True
    own: Rights = ("reservation", "own_team_any_priority")
    return (
        queue.non_preemptible
        and not over_quota
        and _try_evict(builder, queue, workload, [(p, own) for p in pools], over_quota)
    )


def _rights(cluster: Cluster, queue: Queue, workload: Workload, pool: PoolState, over_quota: bool) -> list[Rights]:
    """Return the rights in a pool; none over quota where enough GPUs terminate, though not nominated for it."""
    if over_quota and allowed(cluster, queue.account, pool, queue.need.total, True) and find(pool, queue.need, True):
        return []
    return rights_of(cluster, workload, queue.account, pool, not over_quota)


def _try_evict(
    builder: PlanBuilder, queue: Queue, workload: Workload, ways: Iterable[tuple[PoolState, Rights]], over_quota: bool
) -> bool:
    """Evict the first choice without a victim that could return at once, else the first of all; False if none."""
    if builder.progress.withdrawn_starts >= MAX_WITHDRAWN:
        return False
    cluster = builder.cluster
    fallback: tuple[Preemptor, Choice] | None = None
    replaced_by = builder.replaced_by(workload)
    for pool, rights in ways:
        line = cluster.ledger.over_limit(queue.account, pool.pool.name, queue.total, True)
        preemptor = Preemptor(cluster, workload, queue.need, queue.account, pool, rights, line, replaced_by)
        choice = reclaim(preemptor)
        if choice is None:
            continue
        if not choice.victim_returns:
            _carry_out(builder, queue, preemptor, choice, over_quota)
            return True
        restore_all(preemptor, choice.victims)
        fallback = fallback or (preemptor, choice)
    if fallback is None:
        return False
    evict_all(fallback[0], fallback[1].victims)
    _carry_out(builder, queue, *fallback, over_quota)
    return True


def _rearrange(builder: PlanBuilder, queue: Queue, preemptor: Preemptor, change: Rearrangement) -> None:
    """Record the moves and nominate the GPUs that they free; starts of this very plan start elsewhere at once."""
    cluster, workload = builder.cluster, preemptor.workload
    for moving in change.moves:
        if moving.allocation.fresh:
            _start_elsewhere(builder, moving)
    moves = [moving for moving in change.moves if not moving.allocation.fresh]
    if not moves and try_start(builder, queue, workload, preemptor.pool, change.parts, True):
        return
    cluster.nominate(workload, queue.need, change.parts)
    if moves:
        builder.move(workload, moves)
    builder.nominate(workload, queue, preemptor.pool)


def _start_elsewhere(builder: PlanBuilder, moving: Moving) -> None:
    cluster, allocation = builder.cluster, moving.allocation
    cluster.withdraw_nomination(allocation.workload)
    cluster.restore(allocation)
    cluster.withdraw(allocation)
    in_quota = builder.started[allocation.workload.id].in_quota
    builder.withdraw(allocation.workload)
    builder.start(allocation.workload, cluster.start(allocation.workload, allocation.need, moving.to), in_quota)


def _carry_out(builder: PlanBuilder, queue: Queue, preemptor: Preemptor, choice: Choice, over_quota: bool) -> None:
    """Record the victims, and start the preemptor or nominate their GPUs; starts of this very plan are withdrawn.

    It starts in the pool for which it evicted, if it can, and one that evicted in quota starts in quota only: elsewhere
    it could be evicted in turn by the workload whose start it replaced.
    """
    cluster, workload, parts = builder.cluster, preemptor.workload, choice.parts
    victims = [victim for victim in choice.victims if victim.kind != WITHDRAW]
    fresh = [victim.allocation for victim in choice.victims if victim.kind == WITHDRAW]
    for allocation in fresh:
        cluster.restore(allocation)
        put_back(builder, allocation)
        builder.replaced.setdefault(allocation.workload.id, set()).add(workload.id)
    if fresh:
        parts = find(preemptor.pool, queue.need, True)  # prefer GPUs that are free now to those that will be
    if victims:
        builder.evict(preemptor, victims)
    for pool in (preemptor.pool, *[other for other in queue.pools if other is not preemptor.pool]):
        in_quota = not over_quota and cluster.ledger.in_quota(
            queue.account, pool.pool.name, preemptor.amount, queue.non_preemptible
        )
        if (in_quota or over_quota) and start_beside_hold(builder, queue, workload, pool, parts, not in_quota):
            return
    cluster.nominate(workload, queue.need, parts)
    builder.nominate(workload, queue, preemptor.pool)


def put_back(builder: PlanBuilder, start: Allocation) -> None:
    """Withdraw a start of this plan; its workload waits again."""
    builder.progress.withdrawn_starts += 1
    builder.cluster.withdraw(start)
    builder.withdraw(start.workload)
    queue = builder.came_from.pop(start.workload.id)
    queue.put_back(start.workload)
    builder.returned.append((queue, start.workload.owner))
