"""Cache the room in a pool for a request, bounded in size and in step with the nodes.

The engine's rules need the same few values at every decision. What is cached here follows every change of a node;
what was not read for `_KEEP` decisions is dropped, and so is the oldest where nodes times requests are many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from ..request import Need, may_run
from ..snapshot import GPU, Node
from .devices import UNLIMITED, devices_of, hosts
from .nodes import NodeState, PoolState, WorkerPlacement
from .openings import OpeningForecast, When

T = TypeVar("T")

_KEEP = 100
"""Decisions after which a forecast that was not read is dropped."""
_MAX_ROWS = 400_000
"""Nodes times needs that forecasts are kept for: about 600 bytes each."""
_MIN_KEPT = 16
"""Forecasts that are kept however many nodes there are."""
_MAX_COUNTS = 4_096
"""Needs whose empty pools are counted; a count takes a few bytes (and, for `EmptiedPool`, eight a node)."""


@dataclass(slots=True)
class PoolCapacity:
    """Workers of one need that the empty nodes of a pool would host: on `every` node, and on the usable ones (`up`)."""

    every: int = 0
    up: int = 0


@dataclass(slots=True)
class EmptiedPool:
    """Workers of one need that each usable node would host with only foreign pods on it, at most `need.min_workers`.

    `vague` counts the nodes where foreign pods hold GPUs on unknown devices: with any, `total` says nothing.
    """

    workers: dict[str, int] = field(default_factory=dict)
    total: int = 0
    vague: int = 0


@dataclass(slots=True)
class CapacityCache:
    """The cached room of each pool, by pool and request."""

    decisions: int = 0
    _forecasts: dict[tuple[str, Need, When], tuple[int, OpeningForecast]] = field(default_factory=dict)
    """The decision that last read the forecast, and the forecast; the longest ago first."""
    _capacities: dict[tuple[str, Need], PoolCapacity] = field(default_factory=dict)
    _emptied: dict[tuple[str, Need], EmptiedPool] = field(default_factory=dict)

    def begin(self) -> None:
        """Start a decision: drop forecasts that the last ones did not read."""
        self.decisions += 1
        while self._forecasts:
            asked = next(iter(self._forecasts))
            if self._forecasts[asked][0] > self.decisions - _KEEP:
                break
            del self._forecasts[asked]

    def forecast(self, pool: PoolState, need: Need, latest: When) -> OpeningForecast:
        """Return the forecast for a need in a pool, up to `latest`."""
        asked = (pool.pool.name, need, latest)
        known = self._forecasts.pop(asked, None)
        forecast = known[1] if known is not None else OpeningForecast(pool, need, latest)
        self._forecasts[asked] = self.decisions, forecast
        if known is None and len(self._forecasts) > max(_MIN_KEPT, _MAX_ROWS // (len(pool.nodes) + 1)):
            del self._forecasts[next(iter(self._forecasts))]
        return forecast

    def capacity(self, pool: PoolState, need: Need) -> PoolCapacity:
        """Return how many workers a pool would host, were it empty."""
        asked = (pool.pool.name, need)
        pool_capacity = self._capacities.get(asked)
        if pool_capacity is None:
            if len(self._capacities) >= _MAX_COUNTS:
                self._capacities.clear()
            pool_capacity = self._capacities[asked] = PoolCapacity()
            for node in pool.nodes:
                _count_capacity(pool_capacity, node, need, 1)
        return pool_capacity

    def emptied(self, pool: PoolState, need: Need) -> EmptiedPool:
        """Return how many workers each node of a pool would host once all its work is gone."""
        asked = (pool.pool.name, need)
        emptied_pool = self._emptied.get(asked)
        if emptied_pool is None:
            if len(self._emptied) * (len(pool.nodes) + 1) >= _MAX_ROWS:
                self._emptied.clear()
            emptied_pool = self._emptied[asked] = EmptiedPool()
            for node in pool.nodes:
                _count_emptied(emptied_pool, node, need, 1)
        return emptied_pool

    def add(self, node: NodeState) -> None:
        """Add a node that joined its pool, or whose change is complete."""
        self._count(node, 1)

    def subtract(self, node: NodeState) -> None:
        """Remove a node that leaves its pool, or is about to change."""
        self._count(node, -1)

    def forget(self, node: NodeState) -> None:
        """Drop a node from the forecasts: it has left its pool for good."""
        for (name, _, _), (_, forecast) in self._forecasts.items():
            if name == node.pool.pool.name:
                forecast.forget(node.node.name)

    def _count(self, node: NodeState, sign: int) -> None:
        for need, known in _of(self._capacities, node):
            _count_capacity(known, node, need, sign)
        for need, empty in _of(self._emptied, node):
            _count_emptied(empty, node, need, sign)


class NodeCapacity(NamedTuple):
    """What is left on a node: of each device, of CPU and of memory. CPU < 0: the node takes nothing."""

    devices: Sequence[int]
    cpu: int
    memory: int
    model: str = ""


def emptied(node: NodeState) -> NodeCapacity:
    """Return the room on a node without any managed workload; on a node that is down, room that takes nothing."""
    devices = [0 if d in node.node.foreign_devices else GPU for d in devices_of(node.node)]
    cpu = node.node.cpu - node.node.foreign_cpu if node.node.cpu else UNLIMITED
    memory = node.node.memory - node.node.foreign_memory if node.node.memory else UNLIMITED
    takes = node.usable and free_pods(node.node) > 0
    return NodeCapacity(devices, max(0, cpu) if takes else -1, max(0, memory), node.node.model)


def free_pods(node: Node) -> int:
    """Return how many workers a node takes beside foreign pods, by the pods that it may run."""
    return node.pods - node.foreign_pods if node.pods else UNLIMITED


def capacity(node: NodeState, need: Need) -> int:
    """Return the workers that a node would host, were it empty, whether it is usable or not; none while it boots."""
    if node.boots or not may_run(need, node.node):
        return 0
    devices = len(node.unused) - len(node.node.foreign_devices)
    cpu, memory = node.node.cpu or UNLIMITED, node.node.memory or UNLIMITED
    return hosts(need, [GPU] * devices, devices, cpu, memory, node.node.pods or UNLIMITED)


def hosts_emptied(node: NodeState, need: Need, nominated: Iterable[tuple[WorkerPlacement, Need]]) -> int:
    """Return the workers, at most `need.min_workers`, that a node would host with only what is `nominated` on it."""
    if not node.suits(need):
        return 0
    room = emptied(node)
    devices, cpu, memory, pods = list(room.devices), room.cpu, room.memory, free_pods(node.node)
    for part, other in nominated:
        for at in part.devices:
            devices[at] -= part.milli_per_device
        cpu, memory, pods = cpu - other.cpu, memory - other.memory, pods - 1
    return min(need.min_workers, hosts(need, devices, devices.count(GPU), cpu, memory, pods))


def _of(kept: dict[tuple[str, Need], T], node: NodeState) -> Iterator[tuple[Need, T]]:
    pool = node.pool.pool.name
    return ((need, counted) for (name, need), counted in kept.items() if name == pool)


def _count_capacity(pool_capacity: PoolCapacity, node: NodeState, need: Need, sign: int) -> None:
    workers = sign * min(capacity(node, need), need.min_workers)
    pool_capacity.every += workers
    pool_capacity.up += workers if node.usable else 0


def _count_emptied(emptied_pool: EmptiedPool, node: NodeState, need: Need, sign: int) -> None:
    name = node.node.name
    workers = hosts_emptied(node, need, ())
    emptied_pool.total += sign * workers
    emptied_pool.vague += sign * bool(node.node.foreign_gpus)
    if sign > 0:
        emptied_pool.workers[name] = workers
    else:
        del emptied_pool.workers[name]
