"""Nodes and pools, as they are now and as they will be once all terminating work is gone.

Every device has two numbers: `unused`, what is not held now, and `free_later`, what will not be held once terminating
work is gone and nominated work runs. A start needs both, a nomination only the second; so a nomination keeps
other work off GPUs that are free already, and never counts what is still in use.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..request import Need, Shape
from ..snapshot import GPU, Node, Placed, Placement, Pool, QuotaLine, Terminating, Workload
from .devices import UNLIMITED, devices_of, hosts
from .hosts import NOTHING_SHARED, give_back, subtract, take

_MAX_TOUCHED = 50_000
"""A longer list of touched nodes is cleared."""


class NodeState:
    """One node during a decision: devices by position, CPU, memory, and the allocations on it."""

    __slots__ = (
        "allocations",
        "boots",
        "cpu_free_later",
        "cpu_unused",
        "free",
        "free_later",
        "guessed",
        "host_peers",
        "indexed",
        "listed",
        "memory_free_later",
        "memory_unused",
        "node",
        "overfull",
        "own",
        "placed",
        "pods_free_later",
        "pods_unused",
        "pool",
        "position",
        "size",
        "unused",
        "usable",
        "whole_free",
        "whole_free_later",
    )

    def __init__(self, node: Node, pool: PoolState, position: int, stuck_before: float) -> None:
        self.pool, self.position, self.indexed, self.listed = pool, position, False, True
        self.allocations: dict[str, Allocation] = {}
        self.guessed = 0
        self.placed: dict[str, Allocation] = {}
        """Allocations whose placement names this node, also where no device is left for them."""
        self.host_peers: tuple[NodeState, ...] = ()
        """The other nodes of its host, which share CPU, memory and pods."""
        self.own = NOTHING_SHARED
        """What its allocations and what terminates on it take of these; only known where it has a host."""
        self.empty(node, stuck_before)

    def empty(self, node: Node, stuck_before: float) -> None:
        """Remove all allocations and apply the node's present record; only while it is `inadmissible`.

        What terminates on it with a deadline of `stuck_before` or earlier is not free later, either.
        """
        give_back(self)
        self.node = node
        self.overfull = False
        """Whether workloads hold more devices than the node shows, so that an eviction may free none of them."""
        self.usable = node.ready and not node.cordoned
        self.boots = node.boots
        """Whether it takes work at a known time, and none before."""
        self.unused = [0 if d in node.foreign_devices else GPU for d in devices_of(node)]
        self.size = max(0, sum(self.unused) - node.foreign_gpus)
        self.cpu_unused = node.cpu - node.foreign_cpu if node.cpu else UNLIMITED
        self.memory_unused = node.memory - node.foreign_memory if node.memory else UNLIMITED
        self.pods_unused = node.pods - node.foreign_pods if node.pods else UNLIMITED
        self.cpu_free_later, self.memory_free_later, self.pods_free_later = (
            self.cpu_unused,
            self.memory_unused,
            self.pods_unused,
        )
        self.pool.limits_pods |= bool(node.pods)
        self.pool.limits_sessions |= not node.sessions
        self.free_later = list(self.unused)
        for pod in node.terminating:
            self._hold(pod, pod.deadline <= stuck_before)
        self.free = list(self.unused)  # no nominations yet: no more is unused than is free later
        self.whole_free, self.whole_free_later = self.free.count(GPU), self.free_later.count(GPU)
        self.allocations.clear()
        for other in self.host_peers:
            subtract(self, other.own)

    def _hold(self, ended: Terminating, stuck: bool) -> None:
        """Take what an ended attempt still holds off what is unused; what is stuck, off what is free later as well."""
        at = {index: position for position, index in enumerate(devices_of(self.node))}
        for position in (at[device] for device in ended.devices if device in at):
            self.unused[position] -= ended.milli_per_device
            self.free_later[position] -= stuck * ended.milli_per_device
        self.cpu_unused -= ended.cpu
        self.memory_unused -= ended.memory
        self.cpu_free_later -= stuck * ended.cpu
        self.memory_free_later -= stuck * ended.memory
        self.pods_unused -= ended.pods
        self.pods_free_later -= stuck * ended.pods
        if self.node.host:
            take(self, ended.cpu, ended.memory, ended.pods, 1, stuck)

    @contextmanager
    def inadmissible(self) -> Iterator[None]:
        """Leave the pool's index and sums while the node is rearranged."""
        self.pool.drop(self)
        self.indexed = False
        try:
            yield
        finally:
            self.indexed = True
            self.pool.add(self)

    @property
    def host(self) -> tuple[NodeState, ...]:
        """Return the nodes that share its CPU, memory and pods, itself first."""
        return (self, *self.host_peers)

    @property
    def crowded(self) -> bool:
        """Whether the devices of each allocation depend on the others of the node, as some are unknown."""
        return bool(self.guessed or self.node.foreign_gpus)

    def free_later_sum(self) -> int:
        """Return the milli-GPUs that will be free; what an overfull node lacks is not taken off the other nodes'."""
        return sum([milli for milli in self.free_later if milli > 0]) if self.overfull else sum(self.free_later)

    def shift(self, part: WorkerPlacement, need: Need, now: int, later: int, for_a_while: bool = False) -> None:
        """Add `now` times the part to what is unused and `later` times to what is free later (each -1, 0 or 1).

        What is taken `for_a_while` is no worker, and is returned before any forecast reads the node.
        """
        milli, unused, free_later, free = part.milli_per_device, self.unused, self.free_later, self.free
        self.pool.touch(self)
        if later > 0 and self.boots:
            self.pool.booting_room.clear()
        if not for_a_while:
            self.pool.moved.append(self)
            self.pods_unused += now
            self.pods_free_later += later
        whole_free, whole_free_later = self.whole_free, self.whole_free_later
        freed, before = 0, self.free_later_sum() if self.overfull and later else 0
        for at in part.devices:
            if later:
                whole_free_later -= free_later[at] == GPU
                free_later[at] += later * milli
                whole_free_later += free_later[at] == GPU
            unused[at] += now * milli
            free_now = unused[at] if unused[at] < free_later[at] else free_later[at]
            if free_now < 0 and self.overfull:
                free_now = 0
            whole_free += (free_now == GPU) - (free[at] == GPU)
            freed += free_now - free[at]
            free[at] = free_now
        self.cpu_unused += now * need.cpu
        self.cpu_free_later += later * need.cpu
        self.memory_unused += now * need.memory
        self.memory_free_later += later * need.memory
        if self.node.host:
            take(self, need.cpu, need.memory, 0 if for_a_while else 1, -now, -later, for_a_while)
        if self.usable and self.indexed:
            self.pool.free += freed
            more = self.free_later_sum() - before if self.overfull and later else later * milli * len(part.devices)
            self.pool.free_later += more
            if whole_free != self.whole_free or whole_free_later != self.whole_free_later:
                self.pool.reindex(self, whole_free, whole_free_later)
        self.whole_free, self.whole_free_later = whole_free, whole_free_later

    def see_overfull(self) -> None:
        """Note whether more is held than the node shows; only while it is `inadmissible` and nothing is nominated."""
        self.overfull = bool(self.guessed) and min(self.unused, default=0) < 0
        if self.overfull:
            self.free = [max(0, milli) for milli in self.free]

    def suits(self, need: Need) -> bool:
        """Whether workers of this request may run on the node at all."""
        suited = self.usable and (not need.models or self.node.model in need.models)
        suited = suited and (self.node.sessions or not need.session)
        return suited and (not need.avoid or self.node.name not in need.avoid)

    def workers(self, need: Need, in_future: bool) -> int:
        """Return how many workers of this request the node could host, now or in the future."""
        if in_future:
            return hosts(
                need,
                self.free_later,
                self.whole_free_later,
                self.cpu_free_later,
                self.memory_free_later,
                self.pods_free_later,
            )
        cpu, memory = min(self.cpu_unused, self.cpu_free_later), min(self.memory_unused, self.memory_free_later)
        pods = self.pods_unused if self.pods_unused < self.pods_free_later else self.pods_free_later
        return hosts(need, self.free, self.whole_free, cpu, memory, pods)


class WorkerPlacement(NamedTuple):
    """One worker on one node, by device positions."""

    worker: int
    node: NodeState
    devices: tuple[int, ...]
    milli_per_device: int


@dataclass(slots=True)
class Allocation:
    """The devices that a workload holds.

    `terminating`: it was evicted and still holds them. `stuck`: it was, and should have ended long ago: nothing counts
    on its end any more, and nothing evicts it again.
    """

    workload: Workload
    need: Need
    pool: PoolState
    parts: tuple[WorkerPlacement, ...]
    milli_gpus: int
    terminating: bool = False
    stuck: bool = False
    started_in_plan: bool = False
    """Started by this very plan: its start is withdrawn instead of evicted or moved."""
    moving: tuple[tuple[str, int], ...] = ()
    """Of a nomination: the pools and milli-GPUs that the workload still holds until it moves. What a line covers of
    both places counts once."""
    shares: tuple[tuple[PoolState, int], ...] = ()
    """Each pool and the milli-GPUs that count there, where the nodes are in several pools; empty where all of them are
    in `pool`."""
    all_or_nothing: bool = False
    """Whether it can only be evicted as a whole, as it could not restart on its nodes: they are in several pools, or
    in one that does not serve its profile."""
    is_shrunk_gang: bool = False
    """What a gang keeps that gave up workers in this plan: a nomination that can be evicted like running work."""

    @property
    def pools(self) -> tuple[PoolState, ...]:
        """Return the pools in which it counts."""
        return tuple([pool for pool, _ in self.shares]) if self.shares else (self.pool,)

    def is_in(self, pool: PoolState) -> bool:
        """Whether it counts in a pool."""
        return pool is self.pool if not self.shares else pool in self.pools

    def parts_in(self, pool: PoolState) -> tuple[WorkerPlacement, ...]:
        """Return the parts on nodes of one pool, the only ones whose positions are positions of that pool."""
        return tuple([part for part in self.parts if part.node.pool is pool]) if self.shares else self.parts

    @property
    def milli_gpus_on_booting(self) -> int:
        """Return the milli-GPUs on nodes that boot: of a nomination."""
        return sum([self.need.gpus for part in self.parts if part.node.boots])

    def milli_gpus_in(self, pool: PoolState) -> int:
        """Return the milli-GPUs that count in a pool."""
        if not self.shares:
            return self.milli_gpus if pool is self.pool else 0
        return sum([amount for other, amount in self.shares if other is pool])

    def counts_on(self, quota: QuotaLine) -> int:
        """Return the milli-GPUs that count on a line of its team, or of a department above it."""
        if not self.shares:
            return self.milli_gpus if quota.covers(self.pool.pool.name) else 0
        return sum([amount for pool, amount in self.shares if quota.covers(pool.pool.name)])


def numbered(parts: Sequence[WorkerPlacement]) -> tuple[WorkerPlacement, ...]:
    """Return parts in the order of their workers, numbered from 0."""
    ordered = sorted(parts, key=lambda part: part.worker)
    return tuple([p if p.worker == at else p._replace(worker=at) for at, p in enumerate(ordered)])


def nodes_of(parts: Iterable[WorkerPlacement]) -> list[NodeState]:
    """Return the nodes of some parts, each once."""
    return list({part.node.node.name: part.node for part in parts}.values())


class PoolPacking(Protocol):
    """The packing of a pool (placement/pack_index.py), as the changes of nodes reach it."""

    seen: int

    def best(self, need: Need, among: Collection[int] | None = None) -> tuple[NodeState, int] | None:
        """Return the node for one worker (`among` these positions), and the device for a share of one."""

    def renew(self, node: NodeState) -> bool:
        """Apply a node's new size; False if the packing has to be rebuilt."""

    def insert(self, node: NodeState) -> bool:
        """Insert a node at its position; False if the packing has to be rebuilt."""

    def remove(self, position: int) -> None:
        """Remove the node at a position."""

    def catch_up(self) -> None:
        """Apply the nodes that were touched since the last query."""


class PoolState:
    """One pool during a decision: its nodes, indexed by the number of their untouched devices."""

    __slots__ = (
        "_booting_order",
        "booting",
        "booting_room",
        "bounds",
        "by_free",
        "by_free_later",
        "first",
        "free",
        "free_later",
        "guaranteed",
        "held",
        "limits_pods",
        "limits_sessions",
        "mix",
        "mixed",
        "moved",
        "nodes",
        "packing",
        "peer_pools",
        "pool",
        "rank",
        "rounds",
        "smallest",
        "total",
        "touched",
    )

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.nodes: list[NodeState] = []
        self.rank = {name: at for at, name in reversed(list(enumerate(pool.profiles)))}
        self.by_free: list[list[int]] = []
        self.by_free_later: list[list[int]] = []
        self.free = self.free_later = self.total = 0
        self.limits_pods = False
        """Whether a node of the pool runs so many pods at most."""
        self.limits_sessions = False
        """Whether there is, or was, a node in the pool on which no session runs."""
        self.first: dict[int, list[int]] = {}
        """Position of each node that this decision touched, to what was free there before."""
        self.touched: list[int] = []
        self.moved: list[NodeState] = []
        """The touched nodes, without those where GPUs are only taken for a while."""
        self.peer_pools: dict[str, int] = {}
        """Pool to the number of pairs of nodes, one in each, that are on one host."""
        self.rounds = 0
        """How many times these lists were cleared."""
        self.booting: dict[str, NodeState] = {}
        """The nodes that boot, by name."""
        self.booting_room: dict[int, list[NodeState]] = {}
        """The nodes that boot in their order, without those known to have fewer whole devices left than this."""
        self._booting_order: list[NodeState] | None = None
        self.mix: dict[Shape, int] = {}
        """Shape to the number of workers that the pool serves; the packing keeps nodes useful for this mix."""
        self.mixed = 0
        """How many times the mix has changed."""
        self.packing: PoolPacking | None = None
        self.bounds: dict[Need, Any] = {}
        """Request to what room for it costs at least on each node (rules/victims/bounds.py)."""
        self.guaranteed: Callable[[], int] = int
        """The milli-GPUs that reservations guarantee in the pool beyond what is used of them."""
        self.held: list[tuple[WorkerPlacement, Need]] = []
        """What a hold in force keeps free in the pool."""
        self.smallest: Callable[[str], Need | None] = lambda _: None
        """The request of the smallest profile with GPUs that runs on a model in the pool."""

    def index(self) -> None:
        """Build the index from the nodes."""
        size = max((len(n.unused) for n in self.nodes), default=0) + 1
        self.by_free, self.by_free_later = [[] for _ in range(size)], [[] for _ in range(size)]
        for node in self.nodes:
            node.indexed = True
            self.add(node)
        self.touched.clear()
        self.moved.clear()

    def for_request(self, need: Need) -> Sequence[NodeState]:
        """List the usable nodes, for a session those on which sessions run."""
        return [n for n in self.nodes if n.usable and (n.node.sessions or not need.session)]

    def widen(self, devices: int) -> None:
        """Extend the index to nodes with so many devices."""
        for buckets in (self.by_free, self.by_free_later):
            buckets.extend([] for _ in range(devices + 1 - len(buckets)))

    def begin(self) -> None:
        """Start a decision: forget which nodes the last one touched."""
        self.first.clear()
        if len(self.touched) > _MAX_TOUCHED:
            if self.packing is not None:
                self.packing.catch_up()
                self.packing.seen = 0
            for bounds in self.bounds.values():
                bounds.catch_up()
                bounds.restart()
            self.touched.clear()
            self.moved.clear()
            self.rounds += 1

    def touch(self, node: NodeState) -> None:
        """Record that a node is about to change."""
        if node.position not in self.first:
            self.first[node.position] = list(node.free)
        self.touched.append(node.position)

    def drop(self, node: NodeState) -> None:
        """Remove a node from the sums and the index."""
        self.touch(node)
        self.moved.append(node)
        if self.booting.pop(node.node.name, None) is not None:
            self._booting_order = None
            self.booting_room.clear()
        if node.usable:
            self.free -= sum(node.free)
            self.free_later -= node.free_later_sum()
            self.total -= node.size
            for buckets, at in ((self.by_free, node.whole_free), (self.by_free_later, node.whole_free_later)):
                del buckets[at][bisect_left(buckets[at], node.position)]

    def add(self, node: NodeState) -> None:
        """Add a node to the sums and the index."""
        if node.boots:
            self.booting[node.node.name] = node
            self._booting_order = None
            self.booting_room.clear()
        if node.usable:
            self.free += sum(node.free)
            self.free_later += node.free_later_sum()
            self.total += node.size
            insort(self.by_free[node.whole_free], node.position)
            insort(self.by_free_later[node.whole_free_later], node.position)

    def booting_order(self) -> list[NodeState]:
        """Return the nodes that boot, the one that is ready first before the others."""
        if self._booting_order is None:
            self._booting_order = sorted(self.booting.values(), key=lambda n: (n.node.ready_at or 0.0, n.node.name))
        return self._booting_order

    def booting_with(self, devices: int) -> list[NodeState]:
        """Return the nodes that boot and have so many whole devices left, the one that is ready first before others.

        Until room is given back on one, only those of the last answer are asked.
        """
        known = self.booting_room.get(devices)
        nodes = self.booting_order() if known is None else known
        if devices:
            nodes = self.booting_room[devices] = [node for node in nodes if node.whole_free_later >= devices]
        return nodes

    def reindex(self, node: NodeState, whole_free: int, whole_free_later: int) -> None:
        """Move a node between the buckets of the index."""
        if node.whole_free != whole_free:
            _move(self.by_free, node.position, node.whole_free, whole_free)
        if node.whole_free_later != whole_free_later:
            _move(self.by_free_later, node.position, node.whole_free_later, whole_free_later)


def _move(buckets: list[list[int]], position: int, old: int, new: int) -> None:
    bucket = buckets[old]
    del bucket[bisect_left(bucket, position)]
    insort(buckets[new], position)


def placement_of(parts: Iterable[WorkerPlacement]) -> Placement:
    """Return parts as the placement that a plan carries."""
    return tuple(
        Placed(p.worker, p.node.node.name, tuple(devices_of(p.node.node)[at] for at in p.devices), p.milli_per_device)
        for p in parts
    )
