"""Keep what was worked out about the room in a pool for a need, bounded and in step with the nodes.

The engine rules ask the same few questions at every decision. What is kept here follows every change of a node;
what has not been asked for `_KEEP` decisions is dropped, and so is the oldest where the nodes times needs are many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from ..request import Need
from ..state import GPU
from .nodes import UNLIMITED, NodeState, Part, PoolState, hosts
from .openings import Foreseen, When
from .pack_index import emptied

T = TypeVar("T")

_KEEP = 100
"""Decisions after which a forecast that is not asked for is dropped."""
_MOST_ROWS = 400_000
"""Nodes times needs that forecasts are kept for: about 600 bytes each."""
_LEAST_KEPT = 16
"""Forecasts that are kept however many nodes there are."""
_MOST_COUNTS = 4_096
"""Needs whose empty pools are counted; a count takes a few bytes (and, for `Emptied`, eight a node)."""


@dataclass(slots=True)
class Capacity:
    """Workers of one need that the nodes of a pool would host, were they empty: of `every` node, of those `up`."""

    every: int = 0
    up: int = 0


@dataclass(slots=True)
class Emptied:
    """Workers of one need, at most its least number, that each usable node would host with only foreign pods on it.

    `vague` counts the nodes where foreign pods hold GPUs on unknown devices: with any, `total` says nothing.
    """

    workers: dict[str, int] = field(default_factory=dict)
    total: int = 0
    vague: int = 0


@dataclass(slots=True)
class Rooms:
    """Forecasts and counts of the room in each pool, by pool and need."""

    decisions: int = 0
    _foreseen: dict[tuple[str, Need, When], tuple[int, Foreseen]] = field(default_factory=dict)
    """The decision in which it was last asked for, and the forecast; the longest ago first."""
    _capacities: dict[tuple[str, Need], Capacity] = field(default_factory=dict)
    _emptied: dict[tuple[str, Need], Emptied] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin a decision: drop the forecasts that the last ones did not ask for."""
        self.decisions += 1
        while self._foreseen:
            asked = next(iter(self._foreseen))
            if self._foreseen[asked][0] > self.decisions - _KEEP:
                break
            del self._foreseen[asked]

    def foreseen(self, pool: PoolState, need: Need, latest: When) -> Foreseen:
        """Return the forecast for a need in a pool, up to `latest`."""
        asked = (pool.pool.name, need, latest)
        known = self._foreseen.pop(asked, None)
        found = known[1] if known is not None else Foreseen(pool, need, latest)
        self._foreseen[asked] = self.decisions, found
        if known is None and len(self._foreseen) > max(_LEAST_KEPT, _MOST_ROWS // (len(pool.nodes) + 1)):
            del self._foreseen[next(iter(self._foreseen))]
        return found

    def capacity(self, pool: PoolState, need: Need) -> Capacity:
        """Return how many workers a pool would host, were it empty."""
        asked = (pool.pool.name, need)
        found = self._capacities.get(asked)
        if found is None:
            if len(self._capacities) >= _MOST_COUNTS:
                self._capacities.clear()
            found = self._capacities[asked] = Capacity()
            for node in pool.nodes:
                _count_capacity(found, node, need, 1)
        return found

    def emptied(self, pool: PoolState, need: Need) -> Emptied:
        """Return how many workers each node of a pool would host once all its work is gone."""
        asked = (pool.pool.name, need)
        found = self._emptied.get(asked)
        if found is None:
            if len(self._emptied) * (len(pool.nodes) + 1) >= _MOST_ROWS:
                self._emptied.clear()
            found = self._emptied[asked] = Emptied()
            for node in pool.nodes:
                _count_emptied(found, node, need, 1)
        return found

    def come(self, node: NodeState) -> None:
        """Count a node that came into its pool, or that is back after a change."""
        self._count(node, 1)

    def go(self, node: NodeState) -> None:
        """Count a node no longer: it leaves its pool, or is about to change."""
        self._count(node, -1)

    def forget(self, node: NodeState) -> None:
        """Drop a node from the forecasts: it has left its pool for good."""
        for (name, _, _), (_, found) in self._foreseen.items():
            if name == node.pool.pool.name:
                found.forget(node.node.name)

    def _count(self, node: NodeState, sign: int) -> None:
        for need, known in _of(self._capacities, node):
            _count_capacity(known, node, need, sign)
        for need, empty in _of(self._emptied, node):
            _count_emptied(empty, node, need, sign)


def capacity(node: NodeState, need: Need) -> int:
    """Return the workers that a node would host, were it empty, whether it is usable or not."""
    if need.models and node.node.model not in need.models:
        return 0
    devices = len(node.open) - len(node.node.foreign_devices)
    cpu, memory = node.node.cpu or UNLIMITED, node.node.memory or UNLIMITED
    return hosts(need, [GPU] * devices, devices, cpu, memory)


def hosts_emptied(node: NodeState, need: Need, nominated: Iterable[tuple[Part, Need]]) -> int:
    """Return the workers (at most the least number) that a node would host with only what is `nominated` on it."""
    if not node.suits(need):
        return 0
    room = emptied(node)
    left, cpu, memory = list(room.left), room.cpu, room.memory
    for part, other in nominated:
        for at in part.devices:
            left[at] -= part.milli
        cpu, memory = cpu - other.cpu, memory - other.memory
    return min(need.least, hosts(need, left, left.count(GPU), cpu, memory))


def _of(kept: dict[tuple[str, Need], T], node: NodeState) -> Iterator[tuple[Need, T]]:
    pool = node.pool.pool.name
    return ((need, each) for (name, need), each in kept.items() if name == pool)


def _count_capacity(found: Capacity, node: NodeState, need: Need, sign: int) -> None:
    workers = sign * min(capacity(node, need), need.least)
    found.every += workers
    found.up += workers if node.usable else 0


def _count_emptied(found: Emptied, node: NodeState, need: Need, sign: int) -> None:
    name = node.node.name
    workers = hosts_emptied(node, need, ())
    found.total += sign * workers
    found.vague += sign * bool(node.node.foreign_gpus)
    if sign > 0:
        found.workers[name] = workers
    else:
        del found.workers[name]
