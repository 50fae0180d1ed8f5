"""When a waiting workload may start, as far as time limits and past durations say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .cluster import Cluster
from .limits import Line
from .openings import UNKNOWN, first_room
from .order import Queue
from .plan import Code
from .world import PoolState, Tenancy

Ending = tuple[float, str, int]
"""When somebody is gone, who, and the milli-GPUs that are free then."""


def ends_at(cluster: Cluster, tenancy: Tenancy) -> float | None:
    """Give when a running workload is over at the latest; None if nothing says so."""
    workload = tenancy.workload
    if workload.state == "checkpointing":
        return workload.deadline
    if tenancy.leaving:
        return cluster.now + cluster.grace(workload)
    limit = cluster.time_limit(workload)
    if limit is None:
        return None
    started = cluster.now if tenancy.fresh or workload.started_at is None else workload.started_at
    return max(cluster.now, started + limit)


def likely_end(cluster: Cluster, tenancy: Tenancy) -> float | None:
    """Give when a running workload is over if it takes as long as such work took before; else its latest end."""
    latest, workload = ends_at(cluster, tenancy), tenancy.workload
    if tenancy.leaving or tenancy.fresh or workload.expected is None or workload.started_at is None:
        return latest
    likely = workload.started_at + workload.expected
    if likely <= cluster.now:
        return latest
    return likely if latest is None else min(likely, latest)


def not_before(cluster: Cluster, queue: Queue, pool: PoolState, code: Code) -> float | None:
    """Give the time before which it does not start, nobody else coming; None where it cannot be known."""
    if code == "limit":
        if ("endings",) not in cluster.answers:
            cluster.answers["endings",] = _endings_by_line(cluster)
        return limit_falls(cluster, queue, pool, cluster.answers["endings",])
    if code in ("no_free_gpus", "fragmented", "outranked", "held"):
        asked = ("room", pool.pool.name, queue.need)
        if asked not in cluster.answers:
            cluster.answers[asked] = _room_appears(cluster, queue, pool)
        found: float | None = cluster.answers[asked]
        return found
    return None


def _endings(cluster: Cluster, tenancies: Iterable[Tenancy]) -> list[Ending]:
    known = [(likely_end(cluster, t), t.workload.id, t.amount) for t in tenancies]
    return sorted((end, name, amount) for end, name, amount in known if end is not None)


def _endings_by_line(cluster: Cluster) -> dict[Line, list[Ending]]:
    """Put everybody who runs under each limit that counts them."""
    covered: dict[Line, list[Tenancy]] = {}
    for tenancy in cluster.tenancies.values():
        for level in cluster.account(tenancy.workload).chain:
            for line in level.covering(tenancy.pool.pool.name):
                if line.quota.limit is not None:
                    covered.setdefault(line, []).append(tenancy)
    return {line: _endings(cluster, tenancies) for line, tenancies in covered.items()}


def limit_falls(
    cluster: Cluster, queue: Queue, pool: PoolState, known: Mapping[Line, list[Ending]] | None = None
) -> float | None:
    """Give when the limit in its way has room for it; None where nobody knows. `known`: who ends when, by limit."""
    line = cluster.ledger.over_limit(queue.account, pool.pool.name, queue.need.total)
    if line is None or line.quota.limit is None:
        return None
    if known is None:
        known = _endings_by_line(cluster)
    used = max(line.now, line.future)
    for end, _, amount in known.get(line, ()):
        used -= amount
        if used + queue.need.total <= line.quota.limit:
            return end
    return None


def _room_appears(cluster: Cluster, queue: Queue, pool: PoolState) -> float | None:
    found = first_room(pool, queue.need, cluster.now, lambda tenancy: likely_end(cluster, tenancy))
    when = found[0][0] if found else UNKNOWN
    return when if cluster.now < when < UNKNOWN else None
