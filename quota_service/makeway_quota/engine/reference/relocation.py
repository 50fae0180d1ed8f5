"""Move victims to what their own plan leaves free: who gets room is moved, not stopped (engine rule 5.6)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..snapshot import Workload
from .decisions import Decisions
from .state.cluster import Allocation, Cluster, WorkerPlacement
from .state.groups import Key, WorkloadGroup, closed, group_of, sort_key
from .state.placement import find
from .state.quota import Request, allowed, counts, counts_on, guarantor, in_quota, is_above_reservation, reserving
from .victims.victims import Preemptor, has_right, is_protected, rights_of

MAX_WITHDRAWN = 1000
"""After so many withdrawn starts in a plan no more are withdrawn for a victim."""


def relocate_victims(decisions: Decisions) -> bool:
    """Move the victims that get room in the order of rule 3; return whether any does.

    A start of this plan that comes after a victim in that order is withdrawn where the victim can have its room.
    """
    cluster = decisions.cluster
    stopped = [cluster.live[name] for name, eviction in decisions.evicted.items() if not eviction.to]
    waiting = [(group_of(cluster, w), w) for w in stopped if closed(cluster, w) is None and cluster.need(w).total]
    waiting.sort(key=lambda item: _place_in_order(cluster, *item))
    relocated = [w for group, w in waiting if _relocate(decisions, group, w)]
    return bool(relocated)


def _place_in_order(cluster: Cluster, group: WorkloadGroup, workload: Workload) -> Key:
    over_quota = not any(_in_quota(cluster, group, pool) for pool in group.pools)
    return over_quota, sort_key(cluster, group, group.pools[0], workload, over_quota)


def _in_quota(cluster: Cluster, group: WorkloadGroup, pool: str) -> bool:
    """Whether a victim is in quota in a pool once all that terminates is gone."""
    level = guarantor(cluster, group.chain, pool)
    lines = reserving(cluster, level, pool) if level else []
    return bool(lines) and all(counts(cluster, ln).future_usage + group.need.total <= ln.quota.reserved for ln in lines)


def _may_run(decisions: Decisions, group: WorkloadGroup, pool: str) -> bool:
    if _in_quota(decisions.cluster, group, pool):
        return True
    return group.may_borrow and pool not in decisions.holds


def _relocate(decisions: Decisions, group: WorkloadGroup, workload: Workload) -> bool:
    able = [pool for pool in group.pools if _may_run(decisions, group, pool)]
    for pool in able:
        if parts := _room(decisions.cluster, group, workload, pool):
            decisions.relocate(workload, parts)
            return True
    tries = [(pool, leaving) for leaving in (False, True) for pool in able]
    for pool, leaving in tries if decisions.withdrawn_starts < MAX_WITHDRAWN else ():
        later = _later_starts(decisions, group, workload, pool, leaving)
        if later is not None:
            for start in later.starts:
                decisions.put_back(start)
            decisions.relocate(workload, later.parts)
            return True
    return False


def _room(
    cluster: Cluster, group: WorkloadGroup, workload: Workload, pool: str, in_future: bool | None = None
) -> tuple[WorkerPlacement, ...]:
    """Return where a victim could start now, its old devices not counted, or go on beside workers that stay.

    Empty if it could do neither. With `in_future`, also where it could start once all that terminates is gone; None:
    if it is in quota, for the next plan would nominate it there.
    """
    if not allowed(cluster, group.chain, pool, group.need.total, True):
        return ()
    if parts := find(cluster, pool, group.need) or _beside_workers_that_stay(cluster, workload, pool):
        return parts
    in_future = _in_quota(cluster, group, pool) if in_future is None else in_future
    return find(cluster, pool, group.need, True) if in_future else ()


def _beside_workers_that_stay(cluster: Cluster, workload: Workload, pool: str) -> tuple[WorkerPlacement, ...]:
    """Return where a gang could go on with workers whose devices nothing else gets, and others on free devices.

    At least one worker moves, else it would not have to leave; empty if there is no room for those that move.
    """
    gang = cluster.running[workload.id]
    need, gpus = gang.need, gang.need.gpus
    kept: list[WorkerPlacement] = []
    for part in sorted(gang.parts, key=lambda item: item.worker) if gang.pool == pool and not gang.fixed else ():
        exact = cluster.usable(part.node) and len(part.devices) * part.milli_per_device == gpus
        if exact and len(kept) < need.min_workers - 1 and cluster.holds_parts(need, [*kept, part], cluster.free_later):
            kept.append(part)
    if not kept:
        return ()
    trial = cluster.copy()
    trial.nominate(workload, kept)
    new = find(trial, pool, replace(need, min_workers=need.min_workers - len(kept)))
    numbers = sorted(part.worker for part in gang.parts if part not in kept)
    moved = [part._replace(worker=number) for part, number in zip(new, numbers, strict=False)]
    return tuple(sorted([*kept, *moved], key=lambda part: part.worker)) if moved else ()


class Later(NamedTuple):
    """Starts of this plan that come after a victim in the order, and where it has room without them."""

    starts: list[Allocation]
    parts: tuple[WorkerPlacement, ...]


def _later_starts(
    decisions: Decisions, group: WorkloadGroup, workload: Workload, pool: str, leaving: bool
) -> Later | None:
    """Return starts of this plan, later in the order, without which a victim has room in a pool; None if none do.

    They are in the pool, or in another one with nodes on the same machines. No workload for which others are evicted is
    among them, none that could evict the victim again from there, and none without which other victims had been no
    candidates. `leaving`: a victim over quota has room in what other victims leave, too, beside starts that it would
    evict there.
    """
    cluster = decisions.cluster
    preemptors = {eviction.preemptor for eviction in decisions.evicted.values()}
    light = group.need.cpu or group.need.memory  # then what requests no GPUs may be in the way, too
    near = (pool, *cluster.pools_beside(pool))
    fresh = [a for a in cluster.preemptible() if a.fresh and a.pool in near and (a.amount or light)]
    fresh = [a for a in fresh if a.id not in preemptors]
    trial = _without(cluster, fresh)
    over_quota = not _in_quota(trial, group, pool)
    mine = sort_key(trial, group, pool, workload, over_quota)
    later = []
    for start in fresh:
        theirs = sort_key(trial, decisions.came_from[start.id], start.pool, start.workload, over_quota)
        in_quota = decisions.started[start.id]
        if (in_quota and not over_quota and theirs > mine) or (not in_quota and (not over_quota or theirs > mine)):
            later.append((theirs, start))
    later.sort(key=lambda item: item[0])
    able = [start for _, start in later]
    if leaving:
        able = [
            start for start in able if over_quota and _could_evict(cluster, cluster.running[workload.id], start, pool)
        ]
    ends = leaving or not over_quota
    while able and _room(_without(cluster, able), group, workload, pool, ends):
        withdrawn = list(able)
        for start in able:
            fewer = [other for other in withdrawn if other is not start]
            if fewer and _room(_without(cluster, fewer), group, workload, pool, ends):
                withdrawn = fewer
        trial = _without(cluster, withdrawn)
        parts = _room(trial, group, workload, pool, ends)
        trial.nominate(workload, parts)
        victim = trial.nominations[workload.id]
        staying = [start for start in withdrawn if _could_evict_from(trial, start, victim)]
        staying += _made_candidates(decisions, trial, withdrawn, workload)
        if not staying:
            return Later(withdrawn, parts)
        able = [start for start in able if start not in staying]
    return None


def _made_candidates(
    decisions: Decisions, trial: Cluster, withdrawn: list[Allocation], moving: Workload
) -> list[Allocation]:
    """Return the withdrawn starts without which a team used no more than it reserved when the last of its victims left.

    Otherwise work within a reservation would leave for another team (I3). `moving` does not leave, it moves.
    """
    freed: list[tuple[Allocation, int]] = []
    preemptors: list[Workload] = []
    for name, eviction in decisions.evicted.items():
        victim, preemptor = trial.running[name], trial.live[eviction.preemptor]
        amount = victim.amount - victim.need.gpus * len(eviction.to)
        leaves = eviction.right is not None and name != moving.id and amount
        if leaves and victim.workload.team != preemptor.team:
            freed.append((victim, amount))
            preemptors.append(preemptor)
    result: list[Allocation] = []
    for (victim, _), preemptor in zip(freed, preemptors, strict=True):
        place = trial.nominations.get(preemptor.id) or trial.running.get(preemptor.id)
        own, chain = place.pool if place else victim.pool, trial.chain(preemptor.team)
        if not is_above_reservation(trial, victim, own, Request(chain), (), freed):
            at = victim.nearest(own)
            lines = [line for level in victim.chain for line in reserving(trial, level, at)]
            result += [start for start in withdrawn if any(counts_on(trial, line, start) for line in lines)]
    return result


def _could_evict_from(cluster: Cluster, start: Allocation, victim: Allocation) -> bool:
    """Whether a start that waits again could evict a victim that moved, in the pool of either."""
    pools = [pool for pool in cluster.pools_of(start.workload) if pool in (start.pool, victim.pool)]
    return any(_could_evict(cluster, start, victim, pool) for pool in pools)


def _could_evict(cluster: Cluster, asking: Allocation, victim: Allocation, pool: str) -> bool:
    """Whether a workload that waits again would have a right to evict another one for a place in a pool."""
    workload = asking.workload
    quota = in_quota(cluster, asking.chain, pool, asking.need.total, workload.non_preemptible)
    if not asking.amount or (workload.kind == "job" and is_protected(cluster, victim.workload)):
        return False
    return any(
        has_right(Preemptor(cluster, workload, asking.need, asking.chain, pool, rights), victim, ())
        for rights in rights_of(cluster, workload, asking.need, pool, quota)
    )


def _without(cluster: Cluster, starts: list[Allocation]) -> Cluster:
    trial = cluster.copy()
    for start in starts:
        del trial.running[start.id]
    return trial
