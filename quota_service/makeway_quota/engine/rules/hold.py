"""Hold GPUs for a workload that waited too long (rule 3): other work over quota may use them only if it ends in time.

One workload per pool at a time, the one that waits longest. The hold is on the nodes that will have room for it
first, on its limits, and on the pool's capacity. Work in quota is not affected.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..index.capacity import hosts_emptied
from ..index.cluster import Cluster
from ..index.devices import UNLIMITED
from ..index.groups import WorkloadGroup, age
from ..index.ledger import LineState
from ..index.nodes import Allocation, PoolState, WorkerPlacement
from ..index.openings import EVER, UNKNOWN, Opening
from ..placement.fit import static_quota
from ..request import Need
from ..snapshot import GPU, Workload
from .fair_share import within_fair_share
from .forecast import ends_at, limit_falls
from .order import rank

_GPUS_ALONE = Need(0, 1, 1, 0, 0)
"""The request of a part that takes no CPU and no memory."""


@dataclass(slots=True)
class Hold:
    """What is held for one workload in one pool. `until` is when it can start; None where that is unknown."""

    cluster: Cluster
    workload: Workload
    group: WorkloadGroup
    pool: PoolState
    until: float | None
    openings: list[Opening]
    in_force: bool = False
    """Whether the hold is in force."""
    parts: list[tuple[WorkerPlacement, Need]] = field(default_factory=list)
    """The parts that it takes while it is in force."""

    @property
    def nodes(self) -> list[str]:
        """Return the names of the held nodes."""
        return sorted(opening.node.node.name for opening in self.openings)

    def enforce(self) -> None:
        """Enforce the hold: the held GPUs are not free."""
        self.in_force = True
        for opening in self.openings:
            for part, need in _held(opening, self.group.need):
                _shift(part, need, -1)
                self.parts.append((part, need))
        self.pool.held = self.parts

    def suspend(self) -> None:
        """Suspend the hold: the held GPUs are free."""
        self.in_force = False
        for part, need in self.parts:
            _shift(part, need, 1)
        self.parts = self.pool.held = []

    @contextmanager
    def in_state(self, enforced: bool) -> Iterator[None]:
        """Enforce the hold, or suspend it, within a block."""
        before = self.in_force
        if before and not enforced:
            self.suspend()
        if enforced and not before:
            self.enforce()
        try:
            yield
        finally:
            if before and not self.in_force:
                self.enforce()
            if self.in_force and not before:
                self.suspend()

    def count(self, allocation: Allocation) -> None:
        """Subtract a start beside the hold from the room that its nodes can spare."""
        for part in allocation.parts:
            for at, opening in enumerate(self.openings):
                if opening.node is part.node:
                    whole = sum(part.milli_per_device + part.node.unused[device] == GPU for device in part.devices)
                    cpu, memory = opening.cpu - allocation.need.cpu, opening.memory - allocation.need.memory
                    self.openings[at] = opening._replace(whole=opening.whole - whole, cpu=cpu, memory=memory)

    def ends_in_time(self, workload: Workload) -> bool:
        """Whether work that starts now is over, by its time limit, before it could be in the way."""
        limit = self.cluster.time_limit(workload)
        return limit is not None and self.until is not None and self.cluster.now + limit <= self.until

    def line_in_the_way(self, group: WorkloadGroup) -> LineState | None:
        """Return a limit on which both workloads count and that has no room for both; None if there is none."""
        if not group.total:
            return None
        both = self.group.total + group.total
        for level in group.account.chain:
            for line in level.covering(self.pool.pool.name) if level in self.group.account.chain else ():
                if line.quota.limit is not None and max(line.usage, line.future_usage) + both > line.quota.limit:
                    return line
        return None

    def over_capacity(self, group: WorkloadGroup) -> bool:
        """Whether the pool's capacity has no room for both workloads."""
        return bool(group.total) and self.cluster.over_capacity(self.pool, group.total + self.group.total)


def _shift(part: WorkerPlacement, need: Need, sign: int) -> None:
    """Take what is held (-1), or return it (1); untouched devices as one part."""
    node, free_later, free = part.node, part.node.free_later, GPU if sign > 0 else 0
    simple = part.milli_per_device == GPU and need is _GPUS_ALONE
    for at in part.devices if simple else ():
        if free_later[at] != GPU - free or node.unused[at] != GPU:
            simple = False  # a nomination has taken some of it meanwhile
    if not simple:
        node.shift(part, need, 0, sign, for_a_while=True)
        return
    pool, many = node.pool, sign * len(part.devices)
    pool.touch(node)
    for at in part.devices:
        node.free[at] = free_later[at] = free
    pool.free += many * GPU
    pool.free_later += many * GPU
    pool.reindex(node, node.whole_free + many, node.whole_free_later + many)
    node.whole_free += many
    node.whole_free_later += many


def _held(opening: Opening, need: Need) -> Iterator[tuple[WorkerPlacement, Need]]:
    """Return the parts of a node that must stay free, so that there is room at its opening."""
    node = opening.node
    if not (any(node.free) or need.cpu or need.memory):
        return
    spare = max(0, opening.whole - opening.workers * need.whole_devices)
    many = max(0, node.whole_free - spare) if need.whole_devices else 0
    devices = [at for at, milli in enumerate(node.free) if milli == GPU][:many] if many else []
    cpu = _part(need.cpu, min(node.cpu_unused, node.cpu_free_later), opening.cpu - opening.workers * need.cpu)
    memory = _part(
        need.memory, min(node.memory_unused, node.memory_free_later), opening.memory - opening.workers * need.memory
    )
    if devices or cpu or memory:
        yield (
            WorkerPlacement(0, node, tuple(devices), GPU),
            Need(0, 1, 1, cpu, memory) if cpu or memory else _GPUS_ALONE,
        )
    if need.whole_devices and not spare:
        for at, milli in enumerate(node.free):
            if 0 < milli < GPU:
                yield WorkerPlacement(0, node, (at,), milli), _GPUS_ALONE


def _part(need: int, free: int, spare: int) -> int:
    return max(0, free - max(0, spare)) if need and free < UNLIMITED // 2 else 0


def starving(cluster: Cluster, groups: Iterable[WorkloadGroup]) -> list[tuple[WorkloadGroup, Workload]]:
    """Return the workloads that waited too long, the oldest first; of those that are alike, one for each owner.

    Work of the weight `Lowest` never holds GPUs, however long it waits. A workload that lost its nomination in this
    plan still has a group of its own, and counts with those that it will share a group with in the next plan.
    """
    oldest: dict[Hashable, tuple[WorkloadGroup, Workload]] = {}
    for group in groups:
        if not group.total or group.is_protected_session or group.account.team.weight == "Lowest":
            continue
        for head in group.heads():
            if not cluster.waits_too_long(head) or head.id in cluster.nominations:
                continue
            limit = cluster.time_limit(head)
            alike = group.reason_class, group.profile.name, group.priority, limit, head.owner
            if alike not in oldest or age(head) < age(oldest[alike][1]):
                oldest[alike] = group, head
    return sorted(oldest.values(), key=lambda item: age(item[1]))


def would_be_preempted_in_team(
    cluster: Cluster, group: WorkloadGroup, pool: PoolState, team: Iterable[WorkloadGroup]
) -> bool:
    """Whether a job of the same team waits that would preempt this one as soon as it ran (engine rule 5.7)."""
    if not cluster.settings.in_team_preemption or group.non_preemptible:
        return False
    return any(
        other.priority > group.priority
        and other.total
        and not other.non_preemptible
        and pool in other.pools
        and rank(other, pool) <= rank(group, pool)
        and other.kind == "job"
        and any(workload.id not in cluster.nominations for workload in other.heads())
        and _helps(cluster, other, pool)
        and _ever(cluster, other.need, pool)
        for other in team
    )


def _ever(cluster: Cluster, need: Need, pool: PoolState) -> bool:
    """Whether a pool would have room for a request beside its nominations, were all its running work gone."""
    empty = cluster.capacities.emptied(pool, need)
    if empty.vague:
        forecast = cluster.capacities.forecast(pool, need, EVER)
        return forecast.ever(cluster.now, lambda allocation: ends_at(cluster, allocation))
    nominated: dict[int, list[tuple[WorkerPlacement, Need]]] = {}
    for nomination in cluster.nominations.values():
        for part in nomination.parts:
            if part.node.pool is pool:
                nominated.setdefault(part.node.position, []).append((part, nomination.need))
    total = empty.total
    for at, parts in nominated.items():
        node = pool.nodes[at]
        total += hosts_emptied(node, need, parts) - empty.workers[node.node.name]
    return total >= need.min_workers


def _helps(cluster: Cluster, group: WorkloadGroup, pool: PoolState) -> bool:
    """Whether a hold could let a workload of the group start in a pool."""
    name, amount = pool.pool.name, group.need.total
    in_quota = cluster.ledger.in_quota(group.account, name, amount, group.non_preemptible)
    if not in_quota and (group.non_preemptible or group.account.team.weight == "None"):
        return False
    if static_quota(cluster, group.account, pool, amount, True) is not None or _never(group, pool):
        return False
    # over its fair share it would be evicted at once
    return (
        in_quota
        or cluster.settings.fair_share != "reclaim"
        or within_fair_share(cluster.ledger, group.account, pool, amount)
    )


def hold(cluster: Cluster, group: WorkloadGroup, workload: Workload, pool: PoolState) -> Hold | None:
    """Return the hold for a workload in a pool; None where no hold would help it."""
    if not _helps(cluster, group, pool):
        return None
    name, amount = pool.pool.name, group.need.total
    forecast = cluster.capacities.forecast(pool, group.need, EVER)
    room = forecast.room(cluster.now, lambda allocation: ends_at(cluster, allocation))
    if room is None:
        return None
    (until, _, _), openings = room
    if cluster.ledger.over_limit(group.account, name, amount) is not None or cluster.over_capacity(pool, amount):
        until, openings = max(until, limit_falls(cluster, group, pool) or UNKNOWN), []
    return Hold(cluster, workload, group, pool, None if until == UNKNOWN else until, openings)


def _never(group: WorkloadGroup, pool: PoolState) -> bool:
    """Whether a limit or the pool's capacity is below the request of the queue's workloads."""
    caps = [pool.pool.capacity, *[line.quota.limit for line in group.account.limiting(pool.pool.name)]]
    return any(cap is not None and cap < group.need.total for cap in caps)
