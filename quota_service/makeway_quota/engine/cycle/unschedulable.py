"""Find groups with neither room over quota nor candidates to evict, once for all equivalent groups."""

from __future__ import annotations

from collections.abc import Sequence

from ..index.cluster import Cluster
from ..index.groups import WorkloadGroup
from ..index.nodes import PoolState
from ..placement.fit import may_have_enough_gpus
from ..plan_builder import PlanBuilder


class Unschedulable:
    """Which groups have neither room nor candidates; valid while the holds stay the same."""

    def __init__(self, cluster: Cluster, builder: PlanBuilder) -> None:
        self.cluster, self.builder, self.seen = cluster, builder, builder.progress.decisions
        self.holding_groups = {hold.group.number for hold in builder.holds.values()}
        """The numbers of the groups that GPUs are held for."""
        self.room: dict[int, bool] = {}
        self.may_evict: dict[tuple[int, int, int], bool] = {}

    def __call__(self, group: WorkloadGroup) -> bool:
        """Whether no workload of a group can start or evict now."""
        builder = self.builder
        if self.seen != builder.progress.decisions:
            self.room, self.may_evict = {}, {}
            self.seen = builder.progress.decisions
        room = self.room.get(group.request_class)
        if room is None:
            room = self.room[group.request_class] = self._room(group)
        if room or group.nominated or group.number in self.holding_groups:
            return False
        return group.reclaim_deferred or not self._may_evict(group)

    def _room(self, group: WorkloadGroup) -> bool:
        if not group.total or self.cluster.settings.fair_share == "reclaim":
            return True
        return any(self._looks_past(pool) or may_have_enough_gpus(pool, group.need) for pool in group.pools)

    def _looks_past(self, pool: PoolState) -> bool:
        """Whether work that ends in time may use the held GPUs of a pool."""
        hold = self.builder.holds.get(pool.pool.name)
        return hold is not None and not (hold.in_force and hold.until is None)

    def _open(self, group: WorkloadGroup) -> Sequence[PoolState]:
        """Return the pools where a group may evict: those without a hold."""
        holds = self.builder.holds
        return [pool for pool in group.pools if pool.pool.name not in holds] if holds else group.pools

    def _may_evict(self, group: WorkloadGroup) -> bool:
        """Whether the group's team runs lower-priority work whose eviction would be enough."""
        pools = self._open(group)
        known = pools is group.pools and not self.cluster.hosts
        reached = group.candidate_pools if known else self.cluster.pools_with_candidates(group.account, pools)
        if not pools or self.cluster.lowest_priority(group.account.team.name, reached) >= group.priority:
            return False
        key = (group.rights_class, group.request_class, group.priority)
        if key not in self.may_evict:
            self.may_evict[key] = any(self._enough(group, pool) for pool in pools)
        return self.may_evict[key]

    def _enough(self, group: WorkloadGroup, pool: PoolState) -> bool:
        """Whether there could be room in a pool without the lower-priority work of its team (whole GPUs only)."""
        whole = group.need.whole_devices
        if not whole:
            return True
        freed: dict[int, int] = {}
        for allocation in self.cluster.preemptible_below(pool, group.account.team.name, group.priority):
            for part in allocation.parts_in(pool):
                at = part.node.position
                freed[at] = freed.get(at, 0) + len(part.devices)
        workers = sum(len(bucket) * (size // whole) for size, bucket in enumerate(pool.by_free_later))
        for at, devices in freed.items():
            free = pool.nodes[at].whole_free_later
            workers += (free + devices) // whole - free // whole
        return workers >= group.need.min_workers
