"""Admit one workload: on free GPUs, on nominated ones, by moves, or by evictions."""

from __future__ import annotations

from collections.abc import Iterable

from ..index.cluster import Cluster
from ..index.groups import WorkloadGroup
from ..index.nodes import Allocation, PoolState, WorkerPlacement
from ..placement.fit import find_placement, may_have_enough_gpus, within_limits
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
    group: WorkloadGroup,
    workload: Workload,
    pool: PoolState,
    nominated: tuple[WorkerPlacement, ...],
    in_quota: bool,
) -> bool:
    """Start a workload in a pool if it fits there now, on its nominated GPUs where these are in that pool."""
    cluster = builder.cluster
    need = group.need
    mine = nominated if nominated and nominated[0].node.pool is pool and is_still_free(nominated, group) else ()
    if not mine and not may_have_enough_gpus(pool, need):
        return False
    if len(mine) > need.min_workers and not within_limits(cluster, group.account, pool, need.gpus * len(mine)):
        mine = mine[: need.min_workers]
    if len(mine) <= need.min_workers and not within_limits(cluster, group.account, pool, need.total):
        return False
    parts = mine or find_placement(pool, need)
    if not parts:
        return False
    _start(builder, group, workload, parts, in_quota)
    return True


def _start(
    builder: PlanBuilder, group: WorkloadGroup, workload: Workload, parts: tuple[WorkerPlacement, ...], in_quota: bool
) -> None:
    builder.start(workload, builder.cluster.start(workload, group.need, parts), in_quota)
    builder.group_of_started[workload.id] = group


def start_beside_hold(
    builder: PlanBuilder,
    group: WorkloadGroup,
    workload: Workload,
    pool: PoolState,
    nominated: tuple[WorkerPlacement, ...],
    over_quota: bool,
) -> bool:
    """Start a workload if it fits now; over quota, it must not delay the workload that GPUs are held for."""
    hold = builder.holds.get(pool.pool.name)
    if hold is None or hold.workload is workload:
        return try_start(builder, group, workload, pool, nominated, not over_quota)
    if not over_quota or hold.ends_in_time(workload):
        with hold.in_state(enforced=False):
            return try_start(builder, group, workload, pool, nominated, not over_quota)
    with hold.in_state(enforced=True):
        if hold.line_in_the_way(group) or hold.over_capacity(group):
            return False
        done = try_start(builder, group, workload, pool, nominated, False)
    if done:
        hold.count(builder.cluster.allocations[workload.id])
    return done


def is_still_free(parts: tuple[WorkerPlacement, ...], group: WorkloadGroup) -> bool:
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
            asked[key] = asked.get(key, 0) + part.milli_per_device
            if node.free[at] < asked[key]:
                return False
    for part in parts:
        node, many = part.node, hosted[part.node.node.name]
        cpu, memory = many * group.need.cpu, many * group.need.memory
        if cpu and min(node.cpu_unused, node.cpu_free_later) < cpu:
            return False
        if memory and min(node.memory_unused, node.memory_free_later) < memory:
            return False
        if min(node.pods_unused, node.pods_free_later) < many:
            return False
    return True


def try_nominate(
    builder: PlanBuilder,
    group: WorkloadGroup,
    workload: Workload,
    pools: Iterable[PoolState],
    nominated: tuple[WorkerPlacement, ...],
    over_quota: bool,
) -> bool:
    """Nominate GPUs that are about to be free: those of the old nomination, or for work in quota any."""
    if over_quota and not nominated and not group.nominated:
        return False
    cluster = builder.cluster
    account, amount = group.account, group.need.total
    for pool in sorted(pools, key=lambda p: not nominated or nominated[0].node.pool is not p):
        if not within_limits(cluster, account, pool, amount, True):
            continue
        mine = nominated if nominated and nominated[0].node.pool is pool else ()
        parts = mine or (find_placement(pool, group.need, True) if not over_quota or group.nominated else ())
        if parts:
            cluster.nominate(workload, group.need, parts)
            builder.nominate(workload, group, pool)
            return True
    return False


def try_reclaim(
    builder: PlanBuilder,
    group: WorkloadGroup,
    workload: Workload,
    pools: Iterable[PoolState],
    over_quota: bool,
) -> bool:
    """Make room by moves if that is enough, else by evictions, by the rights of the workload."""
    cluster = builder.cluster
    for pool in () if over_quota else pools:
        if pool.free >= group.total:
            preemptor = Preemptor(cluster, workload, group.need, group.account, pool, ("reservation",))
            change = consolidate(preemptor)
            if change is not None:
                _rearrange(builder, group, preemptor, change)
                return True
    ways = [(pool, rights) for pool in pools for rights in _rights(cluster, group, workload, pool, over_quota)]
    if _try_evict(builder, group, workload, ways, over_quota):
        return True
    own: Rights = ("reservation", "own_team_any_priority")
    return (
        group.non_preemptible
        and not over_quota
        and _try_evict(builder, group, workload, [(p, own) for p in pools], over_quota)
    )


def _rights(
    cluster: Cluster, group: WorkloadGroup, workload: Workload, pool: PoolState, over_quota: bool
) -> list[Rights]:
    """Return the rights in a pool; none over quota where enough GPUs terminate, though not nominated for it."""
    if (
        over_quota
        and within_limits(cluster, group.account, pool, group.need.total, True)
        and find_placement(pool, group.need, True)
    ):
        return []
    return rights_of(cluster, workload, group.account, pool, not over_quota)


def _try_evict(
    builder: PlanBuilder,
    group: WorkloadGroup,
    workload: Workload,
    ways: Iterable[tuple[PoolState, Rights]],
    over_quota: bool,
) -> bool:
    """Evict the first choice without a victim that could return at once, else the first of all; False if none."""
    if builder.progress.withdrawn_starts >= MAX_WITHDRAWN:
        return False
    cluster = builder.cluster
    fallback: tuple[Preemptor, Choice] | None = None
    replaced_by = builder.replaced_by(workload)
    for pool, rights in ways:
        line = cluster.ledger.over_limit(group.account, pool.pool.name, group.total, True)
        preemptor = Preemptor(cluster, workload, group.need, group.account, pool, rights, line, replaced_by)
        choice = reclaim(preemptor)
        if choice is None:
            continue
        if not choice.victim_returns:
            _carry_out(builder, group, preemptor, choice, over_quota)
            return True
        restore_all(preemptor, choice.victims)
        fallback = fallback or (preemptor, choice)
    if fallback is None:
        return False
    evict_all(fallback[0], fallback[1].victims)
    _carry_out(builder, group, *fallback, over_quota)
    return True


def _rearrange(builder: PlanBuilder, group: WorkloadGroup, preemptor: Preemptor, change: Rearrangement) -> None:
    """Record the moves and nominate the GPUs that they free; starts of this very plan start elsewhere at once."""
    cluster, workload = builder.cluster, preemptor.workload
    for moving in change.moves:
        if moving.allocation.started_in_plan:
            _start_elsewhere(builder, moving)
    moves = [moving for moving in change.moves if not moving.allocation.started_in_plan]
    if not moves and try_start(builder, group, workload, preemptor.pool, change.parts, True):
        return
    cluster.nominate(workload, group.need, change.parts)
    if moves:
        builder.move(workload, moves)
    builder.nominate(workload, group, preemptor.pool)


def _start_elsewhere(builder: PlanBuilder, moving: Moving) -> None:
    cluster, allocation = builder.cluster, moving.allocation
    cluster.withdraw_nomination(allocation.workload)
    cluster.restore(allocation)
    cluster.withdraw(allocation)
    in_quota = builder.started[allocation.workload.id].in_quota
    builder.withdraw(allocation.workload)
    builder.start(allocation.workload, cluster.start(allocation.workload, allocation.need, moving.to), in_quota)


def _carry_out(
    builder: PlanBuilder, group: WorkloadGroup, preemptor: Preemptor, choice: Choice, over_quota: bool
) -> None:
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
        builder.preemptors_of_withdrawn.setdefault(allocation.workload.id, set()).add(workload.id)
    if fresh:
        parts = find_placement(preemptor.pool, group.need, True)  # prefer GPUs that are free now to those that will be
    if victims:
        builder.evict(preemptor, victims)
    for pool in (preemptor.pool, *[other for other in group.pools if other is not preemptor.pool]):
        in_quota = not over_quota and cluster.ledger.in_quota(
            group.account, pool.pool.name, preemptor.milli_gpus, group.non_preemptible
        )
        if (in_quota or over_quota) and start_beside_hold(builder, group, workload, pool, parts, not in_quota):
            return
    cluster.nominate(workload, group.need, parts)
    builder.nominate(workload, group, preemptor.pool)


def put_back(builder: PlanBuilder, start: Allocation) -> None:
    """Withdraw a start of this plan; its workload waits again."""
    builder.progress.withdrawn_starts += 1
    builder.cluster.withdraw(start)
    builder.withdraw(start.workload)
    group = builder.group_of_started.pop(start.workload.id)
    group.put_back(start.workload)
    builder.withdrawn_starts.append((group, start.workload.owner))
