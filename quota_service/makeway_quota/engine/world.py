"""The cluster as it is now and as it will be once everybody who was told to go has gone.

Every device has two numbers: `open`, what nobody holds now, and `future`, what nobody will hold once leaving
work has left and claims are honoured. A start needs both, a claim only the second; so a claim keeps others
off GPUs that are free already, and never counts what is still in use.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .packing import Packing, Room, Shape
from .state import GPU, Node, Placed, Placement, Pool, Profile, Workload

UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class Need:
    """What one workload asks for: `workers` times (`gpus`, `cpu`, `memory`), at least `least` workers."""

    gpus: int
    workers: int
    least: int
    cpu: int
    memory: int
    models: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Give the milli-GPUs that it must have to start."""
        return self.gpus * self.least

    @property
    def whole(self) -> int:
        """Give the number of whole devices per worker (0 for a share of one, or none)."""
        return self.gpus // GPU


def need_of(workload: Workload, profile: Profile | None) -> Need:
    """Put the workload's own wishes over those of its profile."""
    gpus = workload.gpus if workload.gpus is not None else profile.gpus if profile else 0
    workers = workload.workers if workload.workers is not None else profile.workers if profile else 1
    least = workload.min_workers
    if least is None:
        least = profile.min_workers if profile and workload.workers is None else None
    cpu = workload.cpu if workload.cpu is not None else profile.cpu if profile else 0
    memory = workload.memory if workload.memory is not None else profile.memory if profile else 0
    return Need(
        gpus, workers, min(workers, least) if least else workers, cpu, memory, profile.models if profile else ()
    )


class NodeState:
    """One node while a plan is made: devices by position, CPU and memory, and who is on it."""

    __slots__ = (
        "cpu_future",
        "cpu_open",
        "free",
        "future",
        "guests",
        "memory_future",
        "memory_open",
        "node",
        "open",
        "pool",
        "position",
        "size",
        "usable",
        "whole_free",
        "whole_future",
    )

    def __init__(self, node: Node, pool: PoolState, position: int) -> None:
        self.node, self.pool, self.position = node, pool, position
        self.usable = node.ready and not node.cordoned
        self.open = [0 if d in node.foreign_devices else GPU for d in devices_of(node)]
        self.size = max(0, sum(self.open) - node.foreign_gpus)
        self.cpu_open = node.cpu - node.foreign_cpu if node.cpu else UNLIMITED
        self.memory_open = node.memory - node.foreign_memory if node.memory else UNLIMITED
        self.cpu_future, self.memory_future = self.cpu_open, self.memory_open
        self.future = list(self.open)
        self.free = list(self.open)
        self.whole_free = self.whole_future = self.open.count(GPU)
        self.guests: dict[str, Tenancy] = {}

    def shift(self, part: Part, need: Need, now: int, later: int) -> None:
        """Add `now` times the part to what is open and `later` times to the future (each -1, 0 or 1)."""
        milli, opened, future, free = part.milli, self.open, self.future, self.free
        whole_free, whole_future = self.whole_free, self.whole_future
        freed = 0
        for at in part.devices:
            if later:
                whole_future -= future[at] == GPU
                future[at] += later * milli
                whole_future += future[at] == GPU
            opened[at] += now * milli
            free_now = min(opened[at], future[at])
            whole_free += (free_now == GPU) - (free[at] == GPU)
            freed += free_now - free[at]
            free[at] = free_now
        self.cpu_open += now * need.cpu
        self.cpu_future += later * need.cpu
        self.memory_open += now * need.memory
        self.memory_future += later * need.memory
        self.pool.touched.append(self.position)
        if self.usable:
            self.pool.free += freed
            self.pool.future += later * milli * len(part.devices)
            self.pool.reindex(self, whole_free, whole_future)
        self.whole_free, self.whole_future = whole_free, whole_future

    def suits(self, need: Need) -> bool:
        """Say whether work of this need may run here at all."""
        return self.usable and (not need.models or self.node.model in need.models)

    def workers(self, need: Need, later: bool) -> int:
        """Count how many workers of this need the node could host, now or later."""
        if later:
            return hosts(need, self.future, self.whole_future, self.cpu_future, self.memory_future)
        cpu, memory = min(self.cpu_open, self.cpu_future), min(self.memory_open, self.memory_future)
        return hosts(need, self.free, self.whole_free, cpu, memory)


def hosts(need: Need, devices: Sequence[int], whole: int, cpu: int, memory: int) -> int:
    """Count the workers that fit on devices with so much left each (`whole` of them untouched)."""
    if need.gpus >= GPU:
        count = whole // need.whole
    elif need.gpus:
        count = sum(left // need.gpus for left in devices if left > 0)
    else:
        count = UNLIMITED
    if need.cpu:
        count = min(count, cpu // need.cpu)
    if need.memory:
        count = min(count, memory // need.memory)
    return max(count, 0)


@dataclass(frozen=True, slots=True)
class Part:
    """One worker on one node, by device positions."""

    worker: int
    node: NodeState
    devices: tuple[int, ...]
    milli: int


@dataclass(slots=True)
class Tenancy:
    """A workload that holds GPUs: what, where and since when. `leaving`: it has been told to go."""

    workload: Workload
    need: Need
    pool: PoolState
    parts: tuple[Part, ...]
    amount: int
    leaving: bool = False
    fresh: bool = False
    """Started by this very plan: it is not evicted but its start withdrawn, and it is not moved."""
    moving: int = 0
    """Of a claim: how much of it the workload holds elsewhere until it moves, and so counts once."""


class PoolState:
    """One pool while a plan is made: its nodes, indexed by how many untouched devices they have."""

    __slots__ = (
        "at_first",
        "by_free",
        "by_future",
        "free",
        "future",
        "mix",
        "nodes",
        "packing",
        "pool",
        "rank",
        "total",
        "touched",
    )

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.nodes: list[NodeState] = []
        self.rank = {name: at for at, name in reversed(list(enumerate(pool.profiles)))}
        self.by_free: list[list[int]] = []
        self.by_future: list[list[int]] = []
        self.free = self.future = self.total = 0
        self.at_first: list[list[int]] = []
        self.touched: list[int] = []
        self.mix: dict[Shape, int] = {}
        """How much work of each shape it serves; the packing keeps the nodes useful for this mix."""
        self.packing: Shelf | None = None

    def index(self) -> None:
        """Build the index once all that runs has been put on the nodes."""
        size = max((len(n.open) for n in self.nodes), default=0) + 1
        self.by_free = [[] for _ in range(size)]
        self.by_future = [[] for _ in range(size)]
        for node in self.nodes:
            if node.usable:
                self.by_free[node.whole_free].append(node.position)
                self.by_future[node.whole_future].append(node.position)
        self.at_first = [list(n.free) for n in self.nodes]
        self.free = sum(sum(n.free) for n in self.nodes if n.usable)
        self.future = sum(sum(n.future) for n in self.nodes if n.usable)
        self.total = sum(n.size for n in self.nodes if n.usable)

    def reindex(self, node: NodeState, whole_free: int, whole_future: int) -> None:
        """Move a node between the buckets of the index."""
        if not self.by_free:
            return
        for buckets, old, new in (
            (self.by_free, node.whole_free, whole_free),
            (self.by_future, node.whole_future, whole_future),
        ):
            if old != new:
                bucket = buckets[old]
                del bucket[bisect_left(bucket, node.position)]
                insort(buckets[new], node.position)


class Shelf:
    """A pool's nodes as the packing sees them, caught up with whenever it is asked."""

    def __init__(self, pool: PoolState) -> None:
        self.pool = pool
        self.packing = Packing([_empty(node) for node in pool.nodes], pool.mix)
        for node in pool.nodes:
            self.packing.see(node.position, _left(node))
        self.seen = len(pool.touched)

    def best(self, need: Need) -> tuple[NodeState, int] | None:
        """Give the node for one worker that starts now, and the device for a share of one."""
        self.catch_up()
        found = self.packing.best(Shape(need.gpus, need.cpu, need.memory, need.models))
        return None if found is None else (self.pool.nodes[found[0]], found[1])

    def catch_up(self) -> None:
        """See the nodes that were touched since the last time."""
        for position in set(self.pool.touched[self.seen :]):
            self.packing.see(position, _left(self.pool.nodes[position]))
        self.seen = len(self.pool.touched)


def _empty(node: NodeState) -> Room:
    devices = [0 if d in node.node.foreign_devices else GPU for d in devices_of(node.node)]
    cpu = node.node.cpu - node.node.foreign_cpu if node.node.cpu else UNLIMITED
    memory = node.node.memory - node.node.foreign_memory if node.node.memory else UNLIMITED
    return Room(devices, cpu if node.usable else -1, memory, node.node.model)


def _left(node: NodeState) -> Room:
    cpu, memory = min(node.cpu_open, node.cpu_future), min(node.memory_open, node.memory_future)
    return Room(node.free, cpu if node.usable else -1, memory, node.node.model)


def devices_of(node: Node) -> Sequence[int]:
    """Name the device indices of a node."""
    return node.devices or range(node.gpus)


def placement_of(parts: Iterable[Part]) -> Placement:
    """Write parts as the placement that a plan carries."""
    return tuple(
        Placed(p.worker, p.node.node.name, tuple(devices_of(p.node.node)[at] for at in p.devices), p.milli)
        for p in parts
    )


def pick(need: Need, left: list[int], avoid: Sequence[int] | None = None) -> tuple[tuple[int, ...], int]:
    """Choose devices for one worker from what is `left` on a node, and take them off it.

    A share goes to the device that it fills best. Whole devices: lowest position first, those with less in
    `avoid` (what is free already) before others, so that a claim waits for leaving GPUs, not on idle ones.
    """
    if not need.gpus:
        return (), GPU
    if need.gpus < GPU:
        best = min((at for at, free in enumerate(left) if free >= need.gpus), key=lambda at: (left[at], at))
        left[best] -= need.gpus
        return (best,), need.gpus
    able = [at for at, free in enumerate(left) if free == GPU]
    if avoid is not None:
        able.sort(key=lambda at: (avoid[at], at))
    chosen = tuple(sorted(able[: need.whole]))
    for at in chosen:
        left[at] = 0
    return chosen, GPU
