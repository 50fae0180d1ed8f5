"""Move victims to what their own plan leaves free: those that get room are moved, not stopped (rule 5.6).

Called once no victim can be spared. A start of the plan that comes after a victim in the order of rule 3 is withdrawn
where the victim can have its room: the victim would take it in the next plan, or evict the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..index.cluster import Cluster
from ..index.groups import PendingWorkloads, WorkloadGroup, cannot_start_at_all
from ..index.ledger import LineState
from ..index.nodes import Allocation, PoolState, WorkerPlacement
from ..index.nominations import fits_later
from ..placement.fit import find_placement, within_limits
from ..plan_builder import PlanBuilder
from ..rules.consolidation import Moving
from ..rules.order import sort_key
from ..rules.victims.preemptor import Preemptor
from ..rules.victims.rights import rights_of
from ..rules.victims.sets import stays
from ..snapshot import Workload
from .admission import MAX_WITHDRAWN, put_back


def relocate(builder: PlanBuilder, groups: PendingWorkloads) -> bool:
    """Move the victims that get room, in the order of rule 3; return whether any does."""
    cluster = builder.cluster
    if not builder.started and not any(max(pool.free, pool.free_later) > 0 for pool in cluster.pools.values()):
        return False
    victims = [(groups.group_of(w), w) for w in map(cluster.workloads.__getitem__, builder.evicted)]
    victims = [(group, workload) for group, workload in victims if group.total]
    victims = [(group, workload) for group, workload in victims if builder.started or _has_space(group)]
    waiting = [(group, workload) for group, workload in victims if cannot_start_at_all(cluster, workload) is None]
    waiting.sort(key=lambda item: _place_in_order(cluster, *item))
    preemptors = {eviction.preemptor for eviction in builder.evicted.values()}
    preemptors |= {move.preemptor for move in builder.moved.values()}
    relocated = [workload for group, workload in waiting if _relocated(builder, group, workload, preemptors)]
    return bool(relocated)


def _has_space(group: WorkloadGroup) -> bool:
    """Whether a pool of the group has as many free GPUs as one of it requests; False is certain, True is not."""
    return any(max(pool.free, pool.free_later) >= group.total for pool in group.pools)


def _place_in_order(cluster: Cluster, group: WorkloadGroup, workload: Workload) -> tuple[bool, tuple[object, ...]]:
    over_quota = not any(_in_quota(group, pool) for pool in group.pools)
    return over_quota, sort_key(cluster, group, group.pools[0], workload, over_quota)


def _in_quota(group: WorkloadGroup, pool: PoolState) -> bool:
    """Whether a victim is in quota in a pool once all that terminates is gone."""
    guarantor = group.account.guarantor(pool.pool.name)
    lines = guarantor.reserving(pool.pool.name) if guarantor else ()
    return bool(lines) and all(line.future_usage + group.total <= line.quota.reserved for line in lines)


def _relocated(builder: PlanBuilder, group: WorkloadGroup, workload: Workload, preemptors: set[str]) -> bool:
    """Move a victim if it gets room; none of the `preemptors` makes way for it."""
    cluster = builder.cluster
    pools = [
        pool
        for pool in group.pools
        if _in_quota(group, pool) or (group.may_borrow and pool.pool.name not in builder.holds)
    ]
    for pool in pools:
        if parts := _room(cluster, group, workload, pool):
            _move(builder, group, workload, parts)
            return True
    tries = [(pool, leaving) for leaving in (False, True) for pool in pools]
    for pool, leaving in tries if builder.progress.withdrawn_starts < MAX_WITHDRAWN else ():
        later = _later_starts(builder, group, workload, pool, preemptors, leaving)
        if later is not None:
            for start in later.starts:
                put_back(builder, start)
            _move(builder, group, workload, later.parts)
            return True
    return False


def _room(
    cluster: Cluster, group: WorkloadGroup, workload: Workload, pool: PoolState, in_future: bool | None = None
) -> tuple[WorkerPlacement, ...]:
    """Return where a victim could start now, its old devices not counted, or go on beside workers that stay.

    Empty if it could do neither. With `in_future`, also where it could start once all that terminates is gone; None:
    if it is in quota, for the next plan would nominate it there.
    """
    if not within_limits(cluster, group.account, pool, group.total, True):
        return ()
    if parts := find_placement(pool, group.need) or _beside_workers_that_stay(cluster, workload, pool):
        return parts
    in_future = _in_quota(group, pool) if in_future is None else in_future
    return find_placement(pool, group.need, True) if in_future else ()


def _beside_workers_that_stay(cluster: Cluster, workload: Workload, pool: PoolState) -> tuple[WorkerPlacement, ...]:
    """Return where a gang could go on with workers whose devices nothing else gets, and others on free devices.

    At least one worker moves, else it would not have to leave; empty if there is no room for those that move.
    """
    gang = cluster.allocations[workload.id]
    need = gang.need
    kept: list[WorkerPlacement] = []
    for part in (
        sorted(gang.parts, key=lambda item: item.worker) if gang.pool is pool and not gang.all_or_nothing else ()
    ):
        if len(kept) < need.min_workers - 1 and stays(gang, part) and fits_later([*kept, part], need):
            kept.append(part)
    if not kept:
        return ()
    missing = need.min_workers - len(kept)
    cluster.nominate(workload, need, tuple(kept))
    new = find_placement(pool, replace(need, min_workers=missing, workers=missing))
    cluster.withdraw_nomination(workload)
    numbers = sorted(part.worker for part in gang.parts if part not in kept)
    moved = [part._replace(worker=number) for part, number in zip(new, numbers, strict=False)]
    return tuple(sorted([*kept, *moved], key=lambda part: part.worker)) if moved else ()


class _LaterStarts(NamedTuple):
    """Starts of this plan that come after a victim in the order, and where it has room without them."""

    starts: list[Allocation]
    parts: tuple[WorkerPlacement, ...]


def _later_starts(
    builder: PlanBuilder, group: WorkloadGroup, workload: Workload, pool: PoolState, preemptors: set[str], leaving: bool
) -> _LaterStarts | None:
    """Return starts of this plan, later in the order, without which a victim has room in a pool; None if none do.

    They are in the pool, or in another one with nodes on the same machines. No workload for which others are evicted
    (`preemptors`) is among them, none that could evict the victim again from there, and none without which other
    victims had been no candidates. `leaving`: a victim over quota has room in what other victims leave, too, beside
    starts that it would evict there.
    """
    cluster = builder.cluster
    started = [cluster.allocations[name] for name in sorted(builder.started) if name not in preemptors]
    requests_cpu_or_memory = group.need.cpu or group.need.memory  # then what requests no GPUs may be in the way, too
    starts_nearby = [a for a in started if a.pool is pool or a.pool.pool.name in pool.peer_pools]
    withdrawable = [a for a in starts_nearby if (a.milli_gpus or requests_cpu_or_memory) and _may_withdraw(cluster, a)]
    if not withdrawable:
        return None
    with _Withdrawn(cluster, withdrawable):
        over_quota = not _in_quota(group, pool)
        victim_key = sort_key(cluster, group, pool, workload, over_quota)
        later = []
        for start in withdrawable:
            start_key = sort_key(
                cluster, builder.group_of_started[start.workload.id], start.pool, start.workload, over_quota
            )
            in_quota = builder.started[start.workload.id].in_quota
            if (in_quota and not over_quota and start_key > victim_key) or (
                not in_quota and (not over_quota or start_key > victim_key)
            ):
                later.append((start_key, start))

    def room_without(starts: Iterable[Allocation]) -> tuple[WorkerPlacement, ...]:
        with _Withdrawn(cluster, starts):
            return _room(cluster, group, workload, pool, leaving or not over_quota)

    candidates = [start for _, start in sorted(later, key=lambda item: item[0])]
    if leaving:
        victim = cluster.allocations[workload.id]
        candidates = [start for start in candidates if over_quota and _could_evict(cluster, victim, start, pool)]
    while candidates and room_without(candidates):
        withdrawn = list(candidates)
        for start in candidates:
            fewer = [other for other in withdrawn if other is not start]
            if fewer and room_without(fewer):
                withdrawn = fewer
        parts = room_without(withdrawn)
        with _Withdrawn(cluster, withdrawn):
            victim = cluster.nominate(workload, group.need, parts)
            staying = [start for start in withdrawn if _could_evict_from(builder, start, victim)]
            staying += _made_candidates(builder, withdrawn, workload)
            cluster.withdraw_nomination(workload)
        if not staying:
            return _LaterStarts(withdrawn, parts)
        candidates = [start for start in candidates if start not in staying]
    return None


class _Freed(NamedTuple):
    """What a victim gives up in this plan, in milli-GPUs, and the preemptor, of another team."""

    victim: Allocation
    amount: int
    preemptor: Workload


def _freed(builder: PlanBuilder, moving: Workload) -> list[_Freed]:
    """Return what the victims in other teams than their preemptors' give up, that of `moving` left out, which moves."""
    workloads, allocations = builder.cluster.workloads, builder.cluster.allocations
    freed = [
        _Freed(allocations[name], allocations[name].milli_gpus, workloads[eviction.preemptor])
        for name, eviction in builder.evicted.items()
        if name != moving.id
    ]
    for move in builder.moved.values():
        if move.rule == "shrink":
            gang = allocations[move.id]
            freed.append(_Freed(gang, gang.milli_gpus - gang.need.gpus * len(move.to), workloads[move.preemptor]))
    return [item for item in freed if item.amount and item.victim.workload.team != item.preemptor.team]


def _made_candidates(builder: PlanBuilder, withdrawn: Sequence[Allocation], moving: Workload) -> list[Allocation]:
    """Return the withdrawn starts without which a team used no more than it reserved when the last of its victims left.

    Otherwise work within a reservation would leave for another team (I3).
    """
    cluster, freed = builder.cluster, _freed(builder, moving)
    last: dict[LineState, int] = {}
    for item in freed:
        for line in (line for level in cluster.account(item.victim.workload).chain for line in level.lines):
            counted = item.victim.counts_on(line.quota) * item.amount // item.victim.milli_gpus
            last[line] = min(last.get(line, 0), -counted)
    result: list[Allocation] = []
    for victim, _, preemptor in freed:
        place = cluster.nominations.get(preemptor.id) or cluster.allocations.get(preemptor.id)
        own = place.pool if place is not None else victim.pool
        pool = (own if victim.is_in(own) else victim.pool).pool.name
        account = cluster.account(victim.workload)
        if not cluster.ledger.above(account, pool, cluster.account(preemptor), own.pool.name, 0, last):
            lines = [line for level in account.chain for line in level.reserving(pool)]
            for start in withdrawn:
                chain = cluster.account(start.workload).chain
                if any(line.account in chain and start.counts_on(line.quota) for line in lines):
                    result.append(start)
    return result


def _could_evict_from(builder: PlanBuilder, start: Allocation, victim: Allocation) -> bool:
    """Whether a start that waits again could evict a victim that moved, in the pool of either."""
    pools = [pool for pool in builder.group_of_started[start.workload.id].pools if pool in (start.pool, victim.pool)]
    return any(_could_evict(builder.cluster, start, victim, pool) for pool in pools)


def _could_evict(cluster: Cluster, allocation: Allocation, victim: Allocation, pool: PoolState) -> bool:
    """Whether a workload that waits again would have a right to evict another one for a place in a pool."""
    workload, account = allocation.workload, cluster.account(allocation.workload)
    in_quota = cluster.ledger.in_quota(account, pool.pool.name, allocation.need.total, workload.non_preemptible)
    if not allocation.milli_gpus or (workload.kind == "job" and cluster.is_protected(victim.workload)):
        return False
    return any(
        Preemptor(cluster, workload, allocation.need, account, pool, rights).may_evict_now(victim)
        for rights in rights_of(cluster, workload, account, pool, in_quota)
    )


def _may_withdraw(cluster: Cluster, start: Allocation) -> bool:
    return not start.workload.non_preemptible and cluster.evictable(start) is start


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


def _move(builder: PlanBuilder, group: WorkloadGroup, workload: Workload, parts: tuple[WorkerPlacement, ...]) -> None:
    """Record that a victim moves to these parts."""
    cluster, victim = builder.cluster, builder.evicted.pop(workload.id)
    cluster.nominate(workload, group.need, parts)
    allocation = cluster.allocations[workload.id]
    preemptor = cluster.workloads[victim.preemptor]
    builder.move(preemptor, [Moving(allocation, parts)])
