"""Move victims to what their own plan leaves free: who gets room is moved, not stopped (engine rule 5.6)."""

from __future__ import annotations

from ..snapshot import Workload
from .decisions import Decisions
from .state.cluster import Allocation, Cluster, Part
from .state.placement import find
from .state.queues import Key, Queue, closed, key, queue_of
from .state.quota import allowed, counts, guarantor, reserving

MOST_WITHDRAWN = 1000
"""After so many withdrawn starts in a plan no more are withdrawn for a victim."""


def relocate_victims(decisions: Decisions) -> bool:
    """Move the victims that get room in the order of rule 3; return whether any does.

    A start of this plan that comes after a victim in that order is withdrawn where the victim can have its room.
    """
    cluster = decisions.cluster
    stopped = [cluster.live[name] for name, each in decisions.evicted.items() if not each.to]
    waiting = [(queue_of(cluster, w), w) for w in stopped if closed(cluster, w) is None and cluster.need(w).total]
    waiting.sort(key=lambda each: _place_in_order(cluster, *each))
    found = [w for queue, w in waiting if _relocate(decisions, queue, w)]
    return bool(found)


def _place_in_order(cluster: Cluster, queue: Queue, workload: Workload) -> Key:
    over = not any(_in_quota(cluster, queue, pool) for pool in queue.pools)
    return over, key(cluster, queue, queue.pools[0], workload, over)


def _in_quota(cluster: Cluster, queue: Queue, pool: str) -> bool:
    """Whether a victim is in quota in a pool once all that terminates is gone."""
    level = guarantor(cluster, queue.levels, pool)
    lines = reserving(cluster, level, pool) if level else []
    return bool(lines) and all(counts(cluster, ln).future + queue.need.total <= ln.quota.reserved for ln in lines)


def _may_run(decisions: Decisions, queue: Queue, pool: str) -> bool:
    if _in_quota(decisions.cluster, queue, pool):
        return True
    return queue.may_borrow and pool not in decisions.holds


def _relocate(decisions: Decisions, queue: Queue, workload: Workload) -> bool:
    able = [pool for pool in queue.pools if _may_run(decisions, queue, pool)]
    for pool in able:
        if parts := _room(decisions.cluster, queue, pool, _in_quota(decisions.cluster, queue, pool)):
            decisions.relocate(workload, parts)
            return True
    for pool in able if decisions.withdrawn_starts < MOST_WITHDRAWN else ():
        later = _later_starts(decisions, queue, workload, pool)
        if later is not None:
            for start in later:
                decisions.put_back(start)
            in_quota = _in_quota(decisions.cluster, queue, pool)
            decisions.relocate(workload, _room(decisions.cluster, queue, pool, in_quota))
            return True
    return False


def _room(cluster: Cluster, queue: Queue, pool: str, in_quota: bool) -> tuple[Part, ...]:
    """Return where a victim could start now, its old devices not counted; empty if it could not.

    In quota, also where it could once all that terminates is gone: the next plan would nominate it there.
    """
    may = allowed(cluster, queue.levels, pool, queue.need.total, True)
    return (
        (find(cluster, pool, queue.need) or (find(cluster, pool, queue.need, True) if in_quota else ())) if may else ()
    )


def _later_starts(decisions: Decisions, queue: Queue, workload: Workload, pool: str) -> list[Allocation] | None:
    """Return starts of this plan in a pool, later in the order, without which a victim has room; None if none do.

    No workload for which others are evicted is among them.
    """
    cluster = decisions.cluster
    preemptors = {each.preemptor for each in decisions.evicted.values()}
    light = queue.need.cpu or queue.need.memory  # then what requests no GPUs may be in the way, too
    fresh = [a for a in cluster.preemptible() if a.fresh and a.pool == pool and (a.amount or light)]
    fresh = [a for a in fresh if a.id not in preemptors]
    trial = _without(cluster, fresh)
    over = not _in_quota(trial, queue, pool)
    mine = key(trial, queue, pool, workload, over)
    later = []
    for start in fresh:
        theirs = key(trial, decisions.came_from[start.id], pool, start.workload, over)
        in_quota = decisions.started[start.id]
        if (in_quota and not over and theirs > mine) or (not in_quota and (not over or theirs > mine)):
            later.append((theirs, start))
    later.sort(key=lambda each: each[0])
    withdrawn = [start for _, start in later]
    if not withdrawn or not _room(_without(cluster, withdrawn), queue, pool, not over):
        return None
    for start in list(withdrawn):
        fewer = [each for each in withdrawn if each is not start]
        if fewer and _room(_without(cluster, fewer), queue, pool, not over):
            withdrawn = fewer
    return withdrawn


def _without(cluster: Cluster, starts: list[Allocation]) -> Cluster:
    trial = cluster.copy()
    for start in starts:
        del trial.running[start.id]
    return trial
