"""When a waiting workload may start, as far as time limits say."""

from __future__ import annotations

from collections.abc import Iterable

from .cluster import Cluster
from .order import Queue
from .plan import Code
from .state import GPU
from .world import PoolState, Tenancy, hosts


def ends_at(cluster: Cluster, tenancy: Tenancy) -> float | None:
    """Give when a running workload is over at the latest; None if nothing says so."""
    workload = tenancy.workload
    if workload.state == "checkpointing":
        return workload.deadline
    limit = workload.time_limit
    if limit is None:
        profile = cluster.profiles.get(workload.profile)
        limit = profile.time_limit if profile else None
    if limit is None:
        return None
    return max(cluster.now, (workload.started_at if workload.started_at is not None else cluster.now) + limit)


def not_before(cluster: Cluster, queue: Queue, pool: PoolState, code: Code) -> float | None:
    """Give the time by which time limits alone let it start, nobody else coming; None where it cannot be known."""
    if code == "limit":
        return _limit_falls(cluster, queue, pool)
    if code in ("no_free_gpus", "fragmented", "outranked", "held"):
        asked = ("room", pool.pool.name, queue.need)
        if asked not in cluster.answers:
            cluster.answers[asked] = _room_appears(cluster, queue, pool)
        found: float | None = cluster.answers[asked]
        return found
    return None


def _ending(cluster: Cluster, tenancies: Iterable[Tenancy]) -> list[tuple[float, str, Tenancy]]:
    known = [(ends_at(cluster, t), t.workload.id, t) for t in tenancies]
    return sorted(((end, name, t) for end, name, t in known if end is not None), key=lambda each: each[:2])


def _limit_falls(cluster: Cluster, queue: Queue, pool: PoolState) -> float | None:
    line = cluster.ledger.over_limit(queue.account, pool.pool.name, queue.need.total)
    if line is None or line.quota.limit is None:
        return None
    used = max(line.now, line.future)
    covered = (
        t
        for t in cluster.tenancies.values()
        if line.account in cluster.account(t.workload).chain and line.quota.covers(t.pool.pool.name)
    )
    for end, _, tenancy in _ending(cluster, covered):
        used -= tenancy.amount
        if used + queue.need.total <= line.quota.limit:
            return end
    return None


def _room_appears(cluster: Cluster, queue: Queue, pool: PoolState) -> float | None:
    if queue.need.least > 1:
        return None
    best: float | None = None
    for node in pool.nodes:
        if not node.usable:
            continue
        left, cpu, memory = list(node.free), node.cpu_open, node.memory_open
        here = [t for t in node.guests.values() if not t.leaving]
        for end, _, tenancy in _ending(cluster, here):
            if best is not None and end >= best:
                break
            for part in tenancy.parts:
                if part.node is node:
                    cpu += tenancy.need.cpu
                    memory += tenancy.need.memory
                    for at in part.devices:
                        left[at] += part.milli
            if hosts(queue.need, left, left.count(GPU), cpu, memory):
                best = end
                break
    return best
