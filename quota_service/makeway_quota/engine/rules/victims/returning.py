"""Predict whether a victim could return at once by evicting another workload (rule 5.4 a, invariant I11).

Called by the search for victims with the victims gone and before anything is written to the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...index.nodes import Allocation, Part, PoolState
from ...index.queues import cannot_start_at_all
from ...placement.fit import allowed, find
from ...snapshot import Workload
from ..fair_share import within_fair_share
from .preemptor import Preemptor, Right
from .sets import STOP, Victim, Victims

Finds = Callable[[Preemptor], bool]
"""Whether a preemptor finds a legal set of victims, cascades ignored; changes nothing."""


def could_return(preemptor: Preemptor, victim: Victim, gone: Victims) -> bool:
    """Whether a victim might return at once by evicting; False is certain, True is not."""
    cluster, workload = preemptor.cluster, victim.allocation.workload
    if victim.kind != STOP or not victim.allocation.amount:
        return False
    pools = cluster.pools_of(workload)
    if cluster.lowest(workload.policy, pools) < cluster.priority(workload):
        return True
    if cluster.settings.fair_share == "reclaim":
        return True
    return any(_in_quota(preemptor, workload, pool, gone) for pool in pools)


def any_returns(preemptor: Preemptor, victims: Victims, parts: tuple[Part, ...], finds: Finds) -> bool:
    """Whether one of these evicted victims would evict another workload once the preemptor is placed."""
    returning = [victim for victim in victims if could_return(preemptor, victim, victims)]
    if not returning:
        return False
    cluster = preemptor.cluster
    cluster.nominate(preemptor.workload, preemptor.need, parts)
    found = any(_returns(preemptor, victim.allocation, victims, finds) for victim in returning)
    cluster.withdraw_nomination(preemptor.workload)
    return found


def _returns(preemptor: Preemptor, allocation: Allocation, gone: Victims, finds: Finds) -> bool:
    cluster, workload = preemptor.cluster, allocation.workload
    if cannot_start_at_all(cluster, workload) is not None:
        return False
    if cluster.now - workload.submitted_at < cluster.profiles[workload.profile].reclaim_after:
        return False
    account, need, pools = cluster.account(workload), allocation.need, cluster.pools_of(workload)
    for pool in pools:
        may_run = account.policy.weight != "None" or _in_quota(preemptor, workload, pool, gone)
        if may_run and allowed(cluster, account, pool, need.total, True) and find(pool, need, True):
            return False  # it restarts without evicting
    for pool in pools:
        for right in _rights(preemptor, workload, pool, gone):
            if finds(Preemptor(cluster, workload, need, account, pool, right)):
                return True
    return False


def _rights(preemptor: Preemptor, workload: Workload, pool: PoolState, gone: Victims) -> Iterator[Right]:
    """Iterate over the rights of a victim in a pool once it is pending."""
    cluster, settings = preemptor.cluster, preemptor.cluster.settings
    account, amount = cluster.account(workload), cluster.need(workload).total
    in_quota = _in_quota(preemptor, workload, pool, gone)
    if not in_quota and account.policy.weight == "None":
        return
    if in_quota:
        yield "reservation"
    if workload.kind == "job" and settings.in_team_preemption:
        yield "own_team"
    if in_quota or settings.fair_share != "reclaim":
        return
    limited = cluster.ledger.over_limit(account, pool.pool.name, amount, True) is not None
    if not limited and within_fair_share(cluster.ledger, account, pool, amount):
        yield "fair_share"


def _in_quota(preemptor: Preemptor, workload: Workload, pool: PoolState, gone: Victims) -> bool:
    """Whether a victim would be in quota in a pool, with all victims gone and the preemptor's request counted."""
    cluster, name = preemptor.cluster, pool.pool.name
    guarantor = cluster.account(workload).guarantor(name)
    if guarantor is None:
        return False
    for line in guarantor.reserving(name):
        used = line.taken
        used -= sum(v.counts_on(line.quota) for v in gone if guarantor in cluster.account(v.allocation.workload).chain)
        asks = guarantor in preemptor.account.chain and preemptor.workload.id not in cluster.nominations
        if asks and line.quota.covers(preemptor.pool.pool.name):
            used += preemptor.amount
        if used + cluster.need(workload).total > line.quota.reserved:
            return False
    return True
