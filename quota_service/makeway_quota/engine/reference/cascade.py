"""Foresee whether a victim would return at once by evicting another workload (engine rule 5.4 a, invariant I11)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..state import Workload
from .cluster import Cluster
from .placement import count_workers
from .queues import closed, is_patient, may_borrow
from .quota import Request, allowed, in_quota, within_fair_share
from .victims import Preemptor, Right

Exists = Callable[[Preemptor], bool]
"""Whether a preemptor has any legal victim set."""


def returns(cluster: Cluster, victim: Workload, exists: Exists) -> bool:
    """Whether a victim could start again only by evicting another workload, in a cluster that it has left."""
    if closed(cluster, victim) is not None or is_patient(cluster, victim):
        return False
    need, levels = cluster.need(victim), cluster.levels(victim.policy)
    right_in = {pool: list(_rights(cluster, victim, pool)) for pool in cluster.pools_of(victim)}
    for pool in right_in:
        able = in_quota(cluster, levels, pool, need.total, victim.non_preemptible) or may_borrow(cluster, victim)
        room = count_workers(cluster, pool, need, True) >= need.least
        if able and room and allowed(cluster, levels, pool, need.total, True):
            return False
    return any(
        exists(Preemptor(cluster, victim, need, levels, pool, right))
        for pool, rights in right_in.items()
        for right in rights
    )


def _rights(cluster: Cluster, workload: Workload, pool: str) -> Iterator[Right]:
    need, levels = cluster.need(workload), cluster.levels(workload.policy)
    quota = in_quota(cluster, levels, pool, need.total, workload.non_preemptible)
    if not need.total or not (quota or may_borrow(cluster, workload)):
        return
    if quota:
        yield "reservation"
    if workload.kind == "job" and cluster.settings.in_team_preemption:
        yield "own_team"
    if not quota and cluster.settings.fair_share == "reclaim":
        request = Request(levels, need.total)
        if within_fair_share(cluster, request, pool):
            yield "fair_share"


def may_cascade(cluster: Cluster, victim: Workload) -> bool:
    """Whether a victim could possibly return by evicting another workload, going by the team and settings alone."""
    if cluster.settings.fair_share == "reclaim":
        return True
    need, levels = cluster.need(victim), cluster.levels(victim.policy)
    for pool in cluster.pools_of(victim):
        lower = [
            a
            for a in cluster.preemptible(pool)
            if a.workload.policy == victim.policy and cluster.priority(a.workload) < cluster.priority(victim)
        ]
        if (lower and cluster.settings.in_team_preemption) or in_quota(cluster, levels, pool, need.total, False):
            return True
    return False
