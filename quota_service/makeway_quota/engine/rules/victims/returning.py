"""Predict whether a victim could return at once by evicting another workload (rule 5.4 a, invariant I11).

Called by the search for victims with the victims gone and before anything is written to the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from ...index.groups import cannot_start_at_all
from ...index.nodes import Allocation, PoolState, WorkerPlacement
from ...placement.fit import find_placement, within_limits
from ...snapshot import Workload
from .preemptor import Preemptor
from .rights import rights_of
from .sets import STOP, WITHDRAW, Victim, Victims

Finds = Callable[[Preemptor], bool]
"""Whether a preemptor finds a legal set of victims, cascades ignored; changes nothing."""
Return = Literal["none", "others", "in_quota", "back"]
"""How a victim could return at once: not, by evicting others over quota or in quota, or only what it made way for."""
REPEATS: frozenset[Return] = frozenset({"in_quota", "back"})
"""The ways to return by which work over quota would be replaced again and again (rules 5.4 a, 5.7 and 5.9)."""


def could_return(preemptor: Preemptor, victim: Victim, gone: Victims) -> bool:
    """Whether a victim might return at once by evicting; False is certain, True is not."""
    cluster, workload = preemptor.cluster, victim.allocation.workload
    if not victim.allocation.milli_gpus or not (victim.kind == STOP or replaced(preemptor, victim)):
        return False
    pools, priority, asks = cluster.pools_of(workload), cluster.priority(workload), preemptor.workload
    if (
        cluster.lowest_priority(workload.team, cluster.pools_with_candidates(cluster.account(workload), pools))
        < priority
    ):
        return True
    if cluster.settings.in_team_preemption and asks.team == workload.team and cluster.is_below(asks, priority):
        return True
    if cluster.settings.fair_share == "reclaim":
        return True
    return any(_in_quota(preemptor, workload, pool, gone) for pool in pools)


def replaced(preemptor: Preemptor, victim: Victim) -> bool:
    """Whether a victim is a start of this plan for which one of the preemptor was withdrawn."""
    return victim.kind == WITHDRAW and victim.allocation.workload.id in preemptor.replaced_by


def returns(preemptor: Preemptor, victims: Victims, parts: tuple[WorkerPlacement, ...], finds: Finds) -> Return:
    """Return how one of these evicted victims would return by evicting once the preemptor is placed; the worst of all.

    What starts by a nomination, as the preemptor will, cannot be evicted in this plan, but in the next one: then the
    starts of this plan are running work like any other. So are gangs that shrink because of an earlier plan. A start
    that replaced one of the preemptor would do so again.
    """
    returning = [victim.allocation for victim in victims if could_return(preemptor, victim, victims)]
    if not returning:
        return "none"
    cluster = preemptor.cluster
    start = cluster.nominate(preemptor.workload, preemptor.need, parts)
    starts = [allocation for allocation in cluster.fresh.values() if allocation.workload.nomination]
    nominations = [cluster.nominations[name] for name in cluster.nominees if name in cluster.nominations]
    starts += filter(cluster.is_shrinking, nominations)
    again = {victim.allocation.workload.id for victim in victims if replaced(preemptor, victim)}
    ways: set[Return] = set()
    for victim in returning:
        how = _evicts(preemptor, victim, victims, finds)
        how = how if how != "none" else _evicts_later(preemptor, victim, victims, finds, starts)
        back = how == "none" and _evicts_later(preemptor, victim, victims, finds, (start, *starts)) != "none"
        ways.add("back" if back or (how != "none" and victim.workload.id in again) else how)
    cluster.withdraw_nomination(preemptor.workload)
    return next((how for how in ("back", "in_quota", "others") if how in ways), "none")


def _evicts_later(
    preemptor: Preemptor, returning: Allocation, gone: Victims, finds: Finds, starts: Iterable[Allocation]
) -> Return:
    """Whether a victim would evict once these starts, and all that terminates now, are as any running work."""
    cluster = preemptor.cluster
    able = [start for start in starts if not start.workload.non_preemptible]
    if not able:
        return "none"
    with cluster.later(able):
        return _evicts(preemptor, returning, gone, finds)


def _evicts(preemptor: Preemptor, allocation: Allocation, gone: Victims, finds: Finds) -> Return:
    """Return how a victim would evict others; where it could in quota and over quota, in quota."""
    cluster, workload = preemptor.cluster, allocation.workload
    if cannot_start_at_all(cluster, workload) is not None:
        return "none"
    if max(0.0, cluster.now - workload.submitted_at) < cluster.profiles[workload.profile].reclaim_delay(workload.kind):
        return "none"
    account, need, pools = cluster.account(workload), allocation.need, cluster.pools_of(workload)
    for pool in pools:
        may_run = account.team.weight != "None" or _in_quota(preemptor, workload, pool, gone)
        if may_run and within_limits(cluster, account, pool, need.total, True) and find_placement(pool, need, True):
            return "none"  # it restarts without evicting
    quota = {pool.pool.name: _in_quota(preemptor, workload, pool, gone) for pool in pools}
    for pool in sorted(pools, key=lambda pool: not quota[pool.pool.name]):  # in quota first
        in_quota = quota[pool.pool.name]
        if not in_quota and account.team.weight == "None":
            continue
        for rights in rights_of(cluster, workload, account, pool, in_quota):
            if finds(Preemptor(cluster, workload, need, account, pool, rights)):
                return "in_quota" if in_quota else "others"
    return "none"


def _in_quota(preemptor: Preemptor, workload: Workload, pool: PoolState, gone: Victims) -> bool:
    """Whether a victim would be in quota in a pool, with all victims gone and the preemptor's request counted."""
    cluster = preemptor.cluster
    guarantees = cluster.account(workload).guarantees(pool.pool.name, workload.non_preemptible)
    for guarantee in guarantees:
        used = guarantee.used(False)
        for victim in gone:
            account = cluster.account(victim.allocation.workload)
            used -= sum(amount for where, amount in _released(preemptor, victim) if guarantee.counts(account, where))
        asks = preemptor.workload.id not in cluster.nominations
        if asks and guarantee.counts(preemptor.account, preemptor.pool.pool.name):
            used += preemptor.milli_gpus
        if used + cluster.need(workload).total > guarantee.reserved:
            return False
    return bool(guarantees)


def _released(preemptor: Preemptor, victim: Victim) -> tuple[tuple[str, int], ...]:
    """Return each pool and how much of a victim counts there no more: also what it gave up before in this plan."""
    allocation = victim.allocation
    if not allocation.is_shrunk_gang:
        return victim.counted
    given = preemptor.cluster.allocations[allocation.workload.id].milli_gpus - allocation.milli_gpus
    return (*victim.counted, (allocation.pool.pool.name, given))
