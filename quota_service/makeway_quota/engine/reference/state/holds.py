"""Hold GPUs for a workload that waited too long; only what ends in time may use them meanwhile (engine rule 3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ...index.devices import UNLIMITED
from ...request import Need
from ...snapshot import GPU, Workload
from .cluster import Allocation, Blocked, Cluster, FreeResources
from .groups import WorkloadGroup, age, full_rank, waits_too_long
from .quota import (
    TeamQuotaLine,
    counts,
    in_quota,
    limiting,
    over_capacity,
    over_limit,
    static_quota,
    within_fair_share,
)

When = tuple[float, int, int]
"""A time, then (where that is unknown) the milli-GPUs of sessions and of jobs that have to end first."""


class Opening(NamedTuple):
    """From `when` on, a node hosts so many workers; `whole`, `cpu` and `memory` are what is left on it then."""

    when: When
    node: str
    workers: int
    whole: int
    cpu: int
    memory: int


@dataclass(slots=True)
class Hold:
    """What is held for one workload in one pool. `until` is when it can start; None where that is unknown."""

    workload: Workload
    group: WorkloadGroup
    pool: str
    until: float | None
    openings: list[Opening]
    blocked: tuple[Blocked, ...] = field(default=())
    in_force: bool = False

    @contextmanager
    def in_state(self, cluster: Cluster, enforced: bool) -> Iterator[None]:
        """Enforce the hold, or suspend it, within a block."""
        before = self.in_force
        self.switch(cluster, enforced)
        yield
        self.switch(cluster, before)

    def switch(self, cluster: Cluster, enforced: bool) -> None:
        """Enforce the hold, or suspend it, unless it is so already."""
        if enforced and not self.in_force:
            self.enforce(cluster)
        elif self.in_force and not enforced:
            self.suspend(cluster)

    def enforce(self, cluster: Cluster) -> None:
        """Enforce the hold: the held GPUs are not free."""
        self.blocked = tuple(
            b for opening in self.openings if (b := _held(cluster, opening, self.group.need)) is not None
        )
        cluster.blocked = (*cluster.blocked, *self.blocked)
        self.in_force = True

    def suspend(self, cluster: Cluster) -> None:
        """Suspend the hold: the held GPUs are free."""
        mine = {id(block) for block in self.blocked}
        cluster.blocked = tuple(block for block in cluster.blocked if id(block) not in mine)
        self.blocked = ()
        self.in_force = False

    def count(self, cluster: Cluster, allocation: Allocation) -> None:
        """Take what was started beside the hold off what can be spared."""
        for part in allocation.parts:
            for at, opening in enumerate(self.openings):
                if opening.node == part.node:
                    opened = cluster.unused(part.node).devices
                    whole = sum(part.milli_per_device + opened[device] == GPU for device in part.devices)
                    cpu, memory = opening.cpu - allocation.need.cpu, opening.memory - allocation.need.memory
                    self.openings[at] = opening._replace(whole=opening.whole - whole, cpu=cpu, memory=memory)

    def ends_in_time(self, cluster: Cluster, workload: Workload) -> bool:
        """Whether a workload that starts now is over, by its time limit, before it could be in the way."""
        limit = cluster.time_limit(workload)
        return limit is not None and self.until is not None and cluster.now + limit <= self.until

    def in_the_way(self, cluster: Cluster, group: WorkloadGroup) -> TeamQuotaLine | None:
        """Return a limit on which both count, and which has no room for both."""
        if not group.need.total:
            return None
        both = self.group.need.total + group.need.total
        shared = [level for level in group.chain if level in self.group.chain]
        for line in limiting(cluster, shared, self.pool):
            counted = counts(cluster, line)
            if max(counted.usage, counted.future_usage) + both > (line.quota.limit or 0):
                return line
        return None

    def over_capacity(self, cluster: Cluster, group: WorkloadGroup) -> bool:
        """Whether the pool's capacity has no room for both."""
        both = self.group.need.total + group.need.total
        return bool(group.need.total) and over_capacity(cluster, self.pool, both)


def _held(cluster: Cluster, opening: Opening, need: Need) -> Blocked | None:
    """Return what of a node must stay free, so that there is room when it opens."""
    free = cluster.free(opening.node)
    spare = max(0, opening.whole - opening.workers * need.whole_devices)
    many = max(0, free.whole - spare) if need.whole_devices else 0
    whole = [at for at, milli in enumerate(free.devices) if milli == GPU][:many]
    devices = dict.fromkeys(whole, GPU)
    if need.whole_devices and not spare:
        devices |= {at: milli for at, milli in enumerate(free.devices) if 0 < milli < GPU}
    cpu = _part(need.cpu, free.cpu, opening.cpu - opening.workers * need.cpu)
    memory = _part(need.memory, free.memory, opening.memory - opening.workers * need.memory)
    return Blocked(opening.node, devices, cpu, memory) if devices or cpu or memory else None


def _part(need: int, free: int, spare: int) -> int:
    return max(0, free - max(0, spare)) if need and free < UNLIMITED // 2 else 0


def starving(cluster: Cluster, waiting: Iterable[WorkloadGroup]) -> list[tuple[WorkloadGroup, Workload]]:
    """Return the workloads that waited too long, the oldest first; of those that are alike, one for each owner.

    `Lowest` takes what is left, however late. A workload that lost its nomination in this plan still has a group of its
    own, and counts with those that it will share a group with in the next plan.
    """
    eligible = [
        (group, head)
        for group in waiting
        if group.need.total and not group.is_protected_session and cluster.team(group.team).weight != "Lowest"
        for head in group.heads()
        if waits_too_long(cluster, head) and head.id not in cluster.nominations
    ]
    oldest: dict[tuple[object, ...], tuple[WorkloadGroup, Workload]] = {}
    for group, head in sorted(eligible, key=lambda item: age(item[1])):
        alike = group.team, group.profile.name, group.need, group.non_preemptible, group.kind, group.priority
        oldest.setdefault((*alike, group.reclaim_deferred, cluster.time_limit(head), head.owner), (group, head))
    return list(oldest.values())


def would_be_preempted_in_team(
    cluster: Cluster, group: WorkloadGroup, pool: str, team: Iterable[WorkloadGroup]
) -> bool:
    """Whether a job of the same team waits that would preempt this one as soon as it ran (engine rule 5.7)."""
    may_be_preempted = cluster.settings.in_team_preemption and not group.non_preemptible
    return may_be_preempted and any(
        other.priority > group.priority
        and other.need.total
        and not other.non_preemptible
        and pool in other.pools
        and full_rank(cluster, other, pool) <= full_rank(cluster, group, pool)
        and other.kind == "job"
        and any(head.id not in cluster.nominations for head in other.heads())
        and _helps(cluster, other, pool)
        and _ever(cluster, other.need, pool)
        for other in team
    )


def _ever(cluster: Cluster, need: Need, pool: str) -> bool:
    """Whether a pool has room for a need once everything that runs there is gone, with nominations counted."""
    trial = cluster.copy()
    trial.running, trial.blocked = {}, ()
    nodes = [name for name in cluster.nodes_of(pool) if cluster.suits(name, need)]
    return sum(min(need.min_workers, trial.free_later(name).workers(need)) for name in nodes) >= need.min_workers


def _helps(cluster: Cluster, group: WorkloadGroup, pool: str) -> bool:
    """Whether a workload of the group might start in a pool if only GPUs were held for it."""
    amount = group.need.total
    quota_admits = in_quota(cluster, group.chain, pool, amount, group.non_preemptible)
    if not quota_admits and not group.may_borrow:
        return False
    if amount and static_quota(cluster, group.chain, pool, amount, True) is not None:
        return False
    caps = [cluster.pools[pool].capacity, *[line.quota.limit for line in limiting(cluster, group.chain, pool)]]
    if any(cap is not None and cap < amount for cap in caps):
        return False
    # beyond its fair share it would be evicted at once
    return quota_admits or cluster.settings.fair_share != "reclaim" or within_fair_share(cluster, group.request, pool)


def hold(cluster: Cluster, group: WorkloadGroup, workload: Workload, pool: str) -> Hold | None:
    """Return what to hold for a workload in a pool; None where a hold would not help it."""
    if not _helps(cluster, group, pool):
        return None
    room = first_room(cluster, group.need, pool)
    if room is None:
        return None
    until, openings = room
    amount = group.need.total
    if over_limit(cluster, group.chain, pool, amount, False) or over_capacity(cluster, pool, amount):
        until, openings = max(until, limit_falls(cluster, group, pool)), []
    return Hold(workload, group, pool, None if until == inf else until, openings)


# When room appears


def ends_at(cluster: Cluster, allocation: Allocation) -> float | None:
    """Return when a running workload is over at the latest; None if nothing says so."""
    workload = allocation.workload
    if workload.state == "checkpointing":
        return None if cluster.is_stuck(workload) else workload.deadline
    if allocation.id in cluster.terminating:
        return cluster.now + cluster.grace(workload)
    limit = cluster.time_limit(workload)
    if limit is None:
        return None
    started = cluster.now if allocation.fresh or workload.started_at is None else workload.started_at
    return max(cluster.now, started + limit)


def likely_end(cluster: Cluster, allocation: Allocation) -> float | None:
    """Return when a running workload is over if it takes as long as such work took before; else its latest end."""
    latest, workload = ends_at(cluster, allocation), allocation.workload
    known = workload.expected is not None and workload.started_at is not None
    evicted = allocation.id in cluster.terminating or workload.state == "checkpointing"
    if evicted or allocation.fresh or not known:
        return latest
    likely = (workload.started_at or 0.0) + (workload.expected or 0.0)
    if likely <= cluster.now:
        return latest
    return likely if latest is None else min(likely, latest)


def limit_falls(cluster: Cluster, group: WorkloadGroup, pool: str) -> float:
    """Return when the limit in its way has room for a workload; infinite where that is unknown."""
    line = over_limit(cluster, group.chain, pool, group.need.total, False)
    if line is None:
        return inf
    usage = counts(cluster, line)
    missing = max(usage.usage, usage.future_usage) + group.need.total - (line.quota.limit or 0)
    pools = line.quota.pools or tuple(cluster.pools)
    team = [a for a in cluster.running.values() if line.team in a.chain]
    counted = [a for a in team if any(pool in pools for pool in a.pools)]
    endings = [(end, a.id, a.amount_in(pools)) for a in counted if (end := likely_end(cluster, a)) is not None]
    for end, _, amount in sorted(endings):
        missing -= amount
        if missing <= 0:
            return max(end, cluster.now)
    return inf


def first_room(cluster: Cluster, need: Need, pool: str) -> tuple[float, list[Opening]] | None:
    """Return when a pool first has room for all workers, and on which nodes; None if it never will."""
    every: list[tuple[When, int, int, int, Opening]] = []
    for at, node in enumerate(cluster.nodes_of(pool)):
        for opening in _openings(cluster, node, need) if cluster.suits(node, need) else ():
            moment = (-1.0, 0, 0) if opening.when[0] <= cluster.now else opening.when
            every.append(
                (moment, -opening.workers if opening.workers >= need.min_workers else 0, at, opening.workers, opening)
            )
    chosen: dict[str, Opening] = {}
    for (when, _, _), _, _, workers, opening in sorted(every, key=lambda item: item[:4]):
        if workers >= need.min_workers:
            return max(when, cluster.now), [opening]
        chosen[opening.node] = opening
        if sum(opening.workers for opening in chosen.values()) >= need.min_workers:
            return max(when, cluster.now), _without_spare(cluster, list(chosen.values()), need.min_workers)
    return None


def _without_spare(cluster: Cluster, chosen: list[Opening], min_workers: int) -> list[Opening]:
    names = list(cluster.nodes)
    spare = sum(opening.workers for opening in chosen) - min_workers
    for opening in sorted(chosen, key=lambda o: (o.workers, -names.index(o.node))):
        if opening.workers <= spare:
            spare -= opening.workers
            chosen.remove(opening)
    return chosen


def _openings(cluster: Cluster, node: str, need: Need) -> Iterator[Opening]:
    """Iterate over the moments at which a node can host more workers, up to the least that is needed."""
    free = cluster.free_later(node)
    here = [(a, ends_at(cluster, a)) for a in cluster.running.values() if a.on(node)]
    many = free.workers(need)
    if many:
        when = cluster.now
        if cluster.free(node).workers(need) < many:
            ends = [end or inf for a, end in here if a.id in cluster.terminating]
            when = max([*ends, *(pod.deadline for pod in cluster.nodes[node].terminating)], default=cluster.now)
        yield Opening((when, 0, 0), node, min(many, need.min_workers), free.whole, free.cpu, free.memory)
    staying = [(a, end) for a, end in here if a.id not in cluster.terminating]
    for moment, allocation in _leaving_order(cluster, staying):
        if many >= need.min_workers:
            return
        free = _plus(free, allocation, node)
        more = free.workers(need)
        if more > many:
            many = more
            yield Opening(moment, node, min(many, need.min_workers), free.whole, free.cpu, free.memory)


def _plus(free: FreeResources, allocation: Allocation, node: str) -> FreeResources:
    devices, cpu, memory, pods = list(free.devices), free.cpu, free.memory, free.pods
    for part in allocation.on(node):
        cpu, memory, pods = cpu + allocation.need.cpu, memory + allocation.need.memory, pods + 1
        for at in part.devices:
            devices[at] += part.milli_per_device
    return FreeResources(devices, cpu, memory, pods)


def _leaving_order(
    cluster: Cluster, here: Sequence[tuple[Allocation, float | None]]
) -> Iterator[tuple[When, Allocation]]:
    """Iterate over workloads as they end; where that is unknown, jobs before sessions, small ones first."""
    for end, _, allocation in sorted(((end, a.id, a) for a, end in here if end is not None), key=lambda item: item[:2]):
        yield (max(cluster.now, end), 0, 0), allocation
    sessions = jobs = 0
    unknown = [a for a, end in here if end is None]
    for allocation in sorted(unknown, key=lambda a: (a.workload.non_preemptible, a.amount, a.id)):
        if allocation.workload.non_preemptible:
            sessions += allocation.amount
        else:
            jobs += allocation.amount
        yield (inf, sessions, jobs), allocation
