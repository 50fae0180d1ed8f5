"""Forecast the earliest start of a pending workload from time limits and past durations."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from ..index.cluster import Cluster
from ..index.groups import WorkloadGroup
from ..index.ledger import LineState
from ..index.nodes import Allocation, PoolState
from ..index.openings import KNOWN, UNKNOWN
from ..plan import Code

Ending = tuple[float, str, int]
"""An allocation's end, its workload's id, and the milli-GPUs that it frees."""


@dataclass(frozen=True, slots=True)
class Endings:
    """The ends of the allocations that count on one limit, computed at `asked` and valid `until` the next end."""

    endings: list[Ending]
    freed: list[int]
    """The milli-GPUs that are free after each end (cumulative)."""
    changes: int
    asked: float
    until: float


def ends_at(cluster: Cluster, allocation: Allocation) -> float | None:
    """Return the latest end of a running workload; None if nothing limits it."""
    workload = allocation.workload
    if workload.state == "checkpointing":
        return None if allocation.stuck else workload.deadline
    if allocation.terminating:
        return cluster.now + cluster.grace(workload)
    limit = cluster.time_limit(workload)
    if limit is None:
        return None
    started = cluster.now if allocation.started_in_plan or workload.started_at is None else workload.started_at
    return max(cluster.now, started + limit)


def likely_end(cluster: Cluster, allocation: Allocation) -> float | None:
    """Return the expected end of a running workload from past durations; without them, its latest end."""
    latest, workload = ends_at(cluster, allocation), allocation.workload
    if allocation.terminating or allocation.stuck or allocation.started_in_plan:
        return latest
    if workload.expected is None or workload.started_at is None:
        return latest
    likely = workload.started_at + workload.expected
    if likely <= cluster.now:
        return latest
    return likely if latest is None else min(likely, latest)


def not_before(cluster: Cluster, group: WorkloadGroup, pool: PoolState, code: Code) -> float | None:
    """Return the time before which a group's next workload does not start; None where it is unknown."""
    if code == "limit":
        return limit_falls(cluster, group, pool)
    if code in ("no_free_gpus", "fragmented", "outranked", "held", "static_quota", "nominated"):
        forecast = cluster.capacities.forecast(pool, group.need, KNOWN)
        return forecast.when(cluster.now, lambda allocation: likely_end(cluster, allocation))
    return None


def limit_falls(cluster: Cluster, group: WorkloadGroup, pool: PoolState) -> float | None:
    """Return when the limit in the way has room for a workload; None where it is unknown."""
    line = cluster.ledger.over_limit(group.account, pool.pool.name, group.need.total)
    if line is None or line.quota.limit is None:
        return None
    known = _endings(cluster, line)
    at = bisect_left(known.freed, max(line.usage, line.future_usage) + group.need.total - line.quota.limit)
    return max(known.endings[at][0], cluster.now) if at < len(known.endings) else None


def _endings(cluster: Cluster, line: LineState) -> Endings:
    """Return the ends of the allocations that count on a limit, cached."""
    known: Endings | None = cluster.endings.get(line)
    if known is None or known.changes != line.changes or not known.asked <= cluster.now < known.until:
        ends = [(likely_end(cluster, t), t.workload.id, t.counts_on(line.quota)) for t in line.allocations.values()]
        known_ends = sorted((end, name, amount) for end, name, amount in ends if end is not None)
        freed = list(accumulate(amount for _, _, amount in known_ends))
        until = next((end for end, _, _ in known_ends if end > cluster.now), UNKNOWN)
        known = cluster.endings[line] = Endings(known_ends, freed, line.changes, cluster.now, until)
    return known
