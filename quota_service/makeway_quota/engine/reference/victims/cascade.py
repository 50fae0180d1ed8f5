"""Foresee whether a victim would return at once by evicting another workload (engine rule 5.4 a, invariant I11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from ...snapshot import Workload
from ..state.cluster import Allocation, Cluster
from ..state.groups import closed, is_patient, may_borrow
from ..state.placement import count_workers
from ..state.quota import allowed, in_quota, limiting
from .victims import Preemptor, Rights, Victims, rights_of, without

Exists = Callable[[Preemptor], bool]
"""Whether a preemptor has any legal victim set."""
Return = Literal["none", "others", "in_quota", "back"]
"""How a victim could return at once: not, by evicting others over quota or in quota, or only what it made way for."""
REPEATS: frozenset[Return] = frozenset({"in_quota", "back"})
"""The ways to return by which work over quota would be replaced again and again (rules 5.4 a, 5.7 and 5.9)."""


def returns(cluster: Cluster, preemptor: Workload, victim: Workload, exists: Exists) -> Return:
    """Return how a victim could start again only by evicting, in a cluster that it has left.

    What starts by a nomination, as the preemptor will, cannot be evicted in this plan, but in the next one: then the
    starts of this plan are running work like any other. So are gangs that shrink because of an earlier plan.
    """
    if (how := _evicts(cluster, victim, exists)) != "none":
        return how
    later = cluster.copy()
    for name, started in later.running.items():
        if started.fresh and started.workload.nomination:
            later.running[name] = replace(started, fresh=False)
    later.shrunk |= {name for name in later.nominations if _is_shrinking(cluster.live[name])}
    if (how := _evicts(later, victim, exists)) != "none":
        return how
    if (start := later.nominations.pop(preemptor.id, None)) is not None:
        later.running[preemptor.id] = start
    return "back" if _evicts(later, victim, exists) != "none" else "none"


def _is_shrinking(workload: Workload) -> bool:
    """Whether a gang gives up workers because of an earlier plan, and goes on with the others."""
    return workload.state == "checkpointing" and set(workload.nomination) <= set(workload.placement)


def _evicts(cluster: Cluster, victim: Workload, exists: Exists) -> Return:
    """Return how a victim would evict others; where it could in quota and over quota, in quota."""
    if closed(cluster, victim) is not None or is_patient(cluster, victim):
        return "none"
    need, chain = cluster.need(victim), cluster.chain(victim.team)
    right_in = {pool: _rights(cluster, victim, pool) for pool in cluster.pools_of(victim)}
    for pool in right_in:
        able = in_quota(cluster, chain, pool, need.total, victim.non_preemptible) or may_borrow(cluster, victim)
        room = count_workers(cluster, pool, need, True) >= need.min_workers
        if able and room and allowed(cluster, chain, pool, need.total, True):
            return "none"
    ways = {
        "in_quota" if "reservation" in rights else "others"
        for pool, all_rights in right_in.items()
        for rights in all_rights
        if exists(Preemptor(cluster, victim, need, chain, pool, rights))
    }
    return "in_quota" if "in_quota" in ways else "others" if ways else "none"


def _rights(cluster: Cluster, workload: Workload, pool: str) -> list[Rights]:
    need, chain = cluster.need(workload), cluster.chain(workload.team)
    quota = in_quota(cluster, chain, pool, need.total, workload.non_preemptible)
    if not need.total or not (quota or may_borrow(cluster, workload)):
        return []
    return rights_of(cluster, workload, need, pool, quota)


def may_cascade(p: Preemptor, evicted: Victims, victim: Allocation) -> bool:
    """Whether a victim could possibly return by evicting another workload, going by teams, priorities and quotas."""
    cluster, workload, settings = p.cluster, victim.workload, p.cluster.settings
    if not victim.need.total or settings.fair_share == "reclaim":
        return bool(victim.need.total)
    own = cluster.pools_of(workload)
    limited = any(limiting(cluster, victim.chain, pool) for pool in own)  # candidates may run in other pools then
    pools = own if limited else tuple(other for pool in own for other in (pool, *cluster.pools_beside(pool)))
    mine = [a for a in cluster.running.values() if a.chain[0] == victim.chain[0] and a.amount]
    team = [a for a in mine if limited or a.amount_in(pools)]
    lower = [
        a for a in team if not a.workload.non_preemptible and cluster.priority(a.workload) < cluster.priority(workload)
    ]
    below = p.workload.team == workload.team and cluster.priority(p.workload) < cluster.priority(workload)
    if (lower or below) and settings.in_team_preemption:
        return True
    trial = without(cluster, evicted, released=True)
    trial.nominations[p.workload.id] = Allocation(p.workload, p.need, p.pool, (), p.need.total, p.chain)
    return any(in_quota(trial, victim.chain, pool, victim.need.total, False) for pool in own)
