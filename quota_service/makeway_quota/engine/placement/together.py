"""Find places for several workloads together, by a search through all combinations within a bound.

`find` places one workload after the other, each on its best node, which can leave no room for the last one although all
of them fit. Called by both engines where a victim stays if the workloads nominated around it fit elsewhere
(cycle/sparing.py, reference/withdrawal.py). Plain numbers only: what is left on each node, and what each workload asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, product
from typing import NamedTuple

from ..index.devices import hosts, pick
from ..request import Need
from ..snapshot import GPU

MAX_NODES = 128
"""In pools with more nodes than this together, nothing is searched."""
MAX_CHOICES = 64
"""So many ways to distribute the workloads over their pools are tried."""
MAX_WORKERS = 256
"""More workers than this together are not searched for."""
MAX_STEPS = 10_000
"""So many times a node is looked at or a worker placed on it for one victim, over all of those ways."""
MAX_STEPS_IN_ALL = 50_000
"""The same for all victims of a plan that are looked at, one after the other."""


@dataclass(slots=True)
class Room:
    """What is left on one node in the future: milli-GPUs of each device, milli-cores, MiB, pods.

    `idle`: what is left of each device now; those with less come first, so that nominations wait for terminating GPUs.
    """

    name: str
    host: str
    devices: list[int]
    cpu: int
    memory: int
    pods: int
    idle: Sequence[int]
    beside: list[Room] = field(default_factory=list)
    """The other nodes of its host that are searched, which lose the same CPU, memory and pods."""
    _remaining: tuple[int, ...] = ()

    @property
    def remaining(self) -> tuple[int, ...]:
        """Return what is left, whatever the order of the devices; kept until it changes."""
        self._remaining = self._remaining or (self.cpu, self.memory, self.pods, *sorted(self.devices))
        return self._remaining

    def workers(self, need: Need) -> int:
        """Return how many workers fit."""
        return hosts(need, self.devices, self.devices.count(GPU), self.cpu, self.memory, self.pods)

    def choices(self, need: Need) -> Iterator[list[int]]:
        """Iterate over the devices after one more worker took its own: a share of each that is filled differently."""
        if 0 < need.gpus < GPU:
            for milli in sorted({milli for milli in self.devices if milli >= need.gpus}):
                after = list(self.devices)
                after[self.devices.index(milli)] -= need.gpus
                yield after
        else:
            after = list(self.devices)
            pick(need, after, self.idle)
            yield after

    def take(self, need: Need, devices: list[int], sign: int = 1) -> None:
        """Take the CPU, memory and pod of one worker from the host (-1: return them), and have these devices left."""
        self.devices = devices
        for room in (self, *self.beside):
            room.cpu -= sign * need.cpu
            room.memory -= sign * need.memory
            room.pods -= sign
            room._remaining = ()


class Ask(NamedTuple):
    """The request of one workload, and the nodes of one pool where it may run, in order."""

    need: Need
    pool: str
    rooms: Sequence[Room]


class WorkerOnNode(NamedTuple):
    """One worker's node and devices, by position."""

    node: str
    devices: tuple[int, ...]
    milli_per_device: int


def linked(rooms: Iterable[Room]) -> list[Room]:
    """Return rooms, those on one host linked with each other."""
    result, hosts_of = list(rooms), dict[str, list[Room]]()
    for room in result:
        if room.host:
            hosts_of.setdefault(room.host, []).append(room)
    for room in result:
        room.beside = [other for other in hosts_of.get(room.host, ()) if other is not room]
    return result


class Search:
    """The searches of one plan for places of the workloads around its victims, one victim after the other.

    The search for one victim stops after `MAX_STEPS`, all of them after `MAX_STEPS_IN_ALL`. Where too few workers fit
    by counting, no step is taken: an engine may count before, too, and still stop where the other one does.
    """

    def __init__(self) -> None:
        self.steps = MAX_STEPS_IN_ALL
        """How many steps are left for all victims."""
        self._end = 0
        """How many steps are left when the search for this victim stops."""

    def combinations(self, orders: Sequence[Sequence[Ask]]) -> Iterator[list[list[WorkerOnNode]]]:
        """Iterate over places for all workloads around one victim, each in one of the pools where it asks, in order."""
        self._end = max(0, self.steps - MAX_STEPS)
        if sum(asks[0].need.min_workers for asks in orders) > MAX_WORKERS or _too_few(orders):
            return
        rooms = {(ask.pool, room.name): room for ask in chain.from_iterable(orders) for room in ask.rooms}
        free: dict[str, int] = {}
        for (pool, _), room in rooms.items():
            free[pool] = free.get(pool, 0) + sum(milli for milli in room.devices if milli > 0)
        for asks in islice(product(*orders), MAX_CHOICES):
            if self.steps <= self._end:
                return
            asked: dict[str, int] = {}
            for ask in asks:
                asked[ask.pool] = asked.get(ask.pool, 0) + ask.need.total
            if any(amount > free.get(pool, 0) for pool, amount in asked.items()):
                continue
            if (result := self.places(asks)) is not None:
                yield result

    def places(self, asks: Sequence[Ask]) -> list[list[WorkerOnNode]] | None:
        """Return the places of the least workers of each workload, in their order; None if none were found.

        The largest workers are placed first. Of nodes with the same left, the first one is tried only.
        """
        order = sorted(range(len(asks)), key=lambda at: (-asks[at].need.gpus, -asks[at].need.cpu, at))
        suited: dict[str, list[int]] = {}
        for at, ask in enumerate(asks):
            for room in ask.rooms:
                suited.setdefault(room.name, []).append(at)
        kinds = {name: tuple(able) for name, able in suited.items()}
        result: list[list[WorkerOnNode]] = [[] for _ in asks]
        return result if self._place([asks[at] for at in order], [result[at] for at in order], kinds, 0, 0) else None

    def _place(
        self,
        asks: Sequence[Ask],
        result: list[list[WorkerOnNode]],
        kinds: dict[str, tuple[int, ...]],
        at: int,
        first: int,
    ) -> bool:
        """Place the next worker of a workload on one of its nodes from the `first` on, then all others.

        What is left on the nodes is afterwards as before.
        """
        if at < len(asks) and len(result[at]) == asks[at].need.min_workers:
            at, first = at + 1, 0
        if at == len(asks):
            return True
        need, rooms = asks[at].need, asks[at].rooms
        if not first and not result[at] and not all(map(self._has_room, asks[at:])):
            return False
        seen: set[tuple[object, ...]] = set()
        for number in range(first, len(rooms)):
            room = rooms[number]
            if not self._step():
                return False
            state = (room.host or kinds[room.name], room.remaining)
            if state in seen or not room.workers(need):
                continue
            seen.add(state)
            before = room.devices
            for after in room.choices(need):
                if not self._step():
                    return False
                room.take(need, after)
                devices = tuple([at for at, milli in enumerate(before) if milli != after[at]])
                result[at].append(WorkerOnNode(room.name, devices, min(need.gpus, GPU) or GPU))
                placed = self._place(asks, result, kinds, at, number)
                room.take(need, before, -1)
                if placed:
                    return True
                result[at].pop()
        return False

    def _step(self) -> bool:
        """Take one step; return whether it may be taken."""
        self.steps -= self.steps > self._end
        return self.steps > self._end

    def _has_room(self, ask: Ask) -> bool:
        """Whether all workers of a workload fit, were it alone."""
        missing = ask.need.min_workers
        for room in ask.rooms:
            if not self._step():
                return False
            missing -= room.workers(ask.need)
            if missing <= 0:
                return True
        return False


def _too_few(orders: Sequence[Sequence[Ask]]) -> bool:
    """Whether too few workers fit in all pools together, where all workloads request the same."""
    needs = {ask.need for asks in orders for ask in asks}
    if len(needs) > 1:
        return False
    rooms = {(ask.pool, room.name): room for asks in orders for ask in asks for room in ask.rooms}
    return any(sum(room.workers(need) for room in rooms.values()) < need.min_workers * len(orders) for need in needs)
