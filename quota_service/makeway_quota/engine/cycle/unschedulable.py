"""Find queues with neither room over quota nor candidates to evict, once for all equivalent queues."""

from __future__ import annotations

from collections.abc import Sequence

from ..index.cluster import Cluster
from ..index.nodes import PoolState
from ..index.queues import Queue
from ..placement.fit import enough
from ..plan_builder import PlanBuilder


class Unschedulable:
    """Which queues have neither room nor candidates; valid while the holds stay the same."""

    def __init__(self, cluster: Cluster, builder: PlanBuilder) -> None:
        self.cluster, self.builder, self.seen = cluster, builder, builder.progress.decisions
        self.kept = {hold.queue.number for hold in builder.holds.values()}
        """The numbers of the queues that GPUs are held for."""
        self.room: dict[int, bool] = {}
        self.may_evict: dict[tuple[int, int, int], bool] = {}

    def __call__(self, queue: Queue) -> bool:
        """Whether no workload of a queue can start or evict now."""
        builder = self.builder
        if self.seen != builder.progress.decisions:
            self.room, self.may_evict = {}, {}
            self.seen = builder.progress.decisions
        room = self.room.get(queue.request_class)
        if room is None:
            room = self.room[queue.request_class] = self._room(queue)
        if room or queue.nominated or queue.number in self.kept:
            return False
        return queue.patient or not self._may_evict(queue)

    def _room(self, queue: Queue) -> bool:
        if not queue.total or self.cluster.settings.fair_share == "reclaim":
            return True
        return any(self._looks_past(pool) or enough(pool, queue.need) for pool in queue.pools)

    def _looks_past(self, pool: PoolState) -> bool:
        """Whether work that ends in time may use the held GPUs of a pool."""
        hold = self.builder.holds.get(pool.pool.name)
        return hold is not None and not (hold.in_force and hold.until is None)

    def _open(self, queue: Queue) -> Sequence[PoolState]:
        """Return the pools where a queue may evict: those without a hold."""
        holds = self.builder.holds
        return [pool for pool in queue.pools if pool.pool.name not in holds] if holds else queue.pools

    def _may_evict(self, queue: Queue) -> bool:
        """Whether the queue's policy runs lower-priority work whose eviction would be enough."""
        pools = self._open(queue)
        known = pools is queue.pools and not self.cluster.hosts
        reached = queue.reach if known else self.cluster.reach(queue.account, pools)
        if not pools or self.cluster.lowest(queue.account.policy.name, reached) >= queue.priority:
            return False
        known_as = (queue.rights_class, queue.request_class, queue.priority)
        if known_as not in self.may_evict:
            self.may_evict[known_as] = any(self._enough(queue, pool) for pool in pools)
        return self.may_evict[known_as]

    def _enough(self, queue: Queue, pool: PoolState) -> bool:
        """Whether there could be room in a pool without the lower-priority work of its policy (whole GPUs only)."""
        whole = queue.need.whole_devices
        if not whole:
            return True
        gone: dict[int, int] = {}
        for allocation in self.cluster.less_than(pool, queue.account.policy.name, queue.priority):
            for part in allocation.parts_in(pool):
                at = part.node.position
                gone[at] = gone.get(at, 0) + len(part.devices)
        workers = sum(len(bucket) * (size // whole) for size, bucket in enumerate(pool.by_future))
        for at, devices in gone.items():
            free = pool.nodes[at].whole_future
            workers += (free + devices) // whole - free // whole
        return workers >= queue.need.min_workers
