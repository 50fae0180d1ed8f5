"""Elastic gangs start wider where GPUs are left that nobody in quota wants."""

from __future__ import annotations

from dataclasses import replace

from .book import Queue
from .cluster import Cluster
from .draft import Draft
from .place import allowed, find
from .world import Tenancy


def grow(cluster: Cluster, draft: Draft, waiting: list[Queue]) -> bool:
    """Give the gangs that this plan starts more workers, up to what they asked for, in the order of their starts.

    Say whether any got more.
    """
    elastic = [t for name in draft.started if (t := cluster.tenancies[name]).need.workers > t.need.least]
    if not elastic:
        return False
    wanted = {
        pool.pool.name
        for queue in waiting
        for pool in queue.pools
        if any(queue.lines.values())
        and cluster.ledger.in_quota(queue.account, pool.pool.name, queue.need.total, queue.firm)
    }
    grew = False
    for tenancy in elastic:
        if tenancy.pool.pool.name not in wanted:
            grew |= _widen(cluster, draft, tenancy)
    return grew


def _widen(cluster: Cluster, draft: Draft, tenancy: Tenancy) -> bool:
    need = replace(tenancy.need, least=1, workers=1)
    account, pool, firm = cluster.account(tenancy.workload), tenancy.pool, tenancy.workload.firm
    may_borrow = not firm and account.policy.weight != "None"
    while len(tenancy.parts) < tenancy.need.workers and allowed(cluster, account, pool, need.gpus):
        if not may_borrow and not cluster.ledger.in_quota(account, pool.pool.name, need.gpus, firm):
            break
        found = find(pool, need)
        if not found:
            break
        cluster.widen(tenancy, found[0]._replace(worker=len(tenancy.parts)))
    wider = len(tenancy.parts) > tenancy.need.least
    if wider:
        draft.widen(tenancy)
    return wider
