"""Find places for several workloads together, by a search through all combinations within a bound.

`find` places one workload after the other, each on its best node, which can leave no room for the last one although all
of them fit. Called by both engines where a victim stays if the workloads nominated around it fit elsewhere
(cycle/sparing.py, reference/withdrawal.py). Plain numbers only: what is left on each node, and what each workload asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..index.devices import hosts, pick
from ..request import Need
from ..snapshot import GPU

MAX_NODES = 128
"""In pools with more nodes than this together, nothing is searched."""
MAX_CHOICES = 64
"""So many ways to distribute the workloads over their pools are tried."""
MAX_STEPS = 2_000
"""So many workers are placed in one search, over all of those ways."""


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

    def take(self, need: Need, sign: int = 1) -> None:
        """Take the CPU, memory and pod of one worker from the host (-1: return them)."""
        for room in (self, *self.beside):
            room.cpu -= sign * need.cpu
            room.memory -= sign * need.memory
            room.pods -= sign


class Ask(NamedTuple):
    """The request of one workload, and the nodes where it may run, in order."""

    need: Need
    rooms: Sequence[Room]


class WorkerOnNode(NamedTuple):
    """One worker's node and devices, by position."""

    node: str
    devices: tuple[int, ...]
    milli: int


def linked(rooms: Iterable[Room]) -> list[Room]:
    """Return rooms, those on one host linked with each other."""
    result = list(rooms)
    for room in result:
        room.beside = [other for other in result if room.host and other.host == room.host and other is not room]
    return result


class Search:
    """The search for places of some workloads; it stops for good after `MAX_STEPS`."""

    def __init__(self) -> None:
        self.steps = 0

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
        """Place the next worker of a workload on one of its nodes from the `first` on, then all others."""
        if at < len(asks) and len(result[at]) == asks[at].need.min_workers:
            at, first = at + 1, 0
        if at == len(asks):
            return True
        need, rooms = asks[at]
        if not first and not result[at] and not all(map(_has_room, asks[at:])):
            return False
        seen: set[tuple[object, ...]] = set()
        for number in range(first, len(rooms)):
            room = rooms[number]
            state = (room.host or kinds[room.name], room.cpu, room.memory, room.pods, *sorted(room.devices))
            if state in seen or not room.workers(need):
                continue
            seen.add(state)
            before = room.devices
            for after in room.choices(need):
                self.steps += 1
                if self.steps > MAX_STEPS:
                    return False
                room.devices = after
                room.take(need)
                devices = tuple([at for at, milli in enumerate(before) if milli != after[at]])
                result[at].append(WorkerOnNode(room.name, devices, min(need.gpus, GPU) or GPU))
                if self._place(asks, result, kinds, at, number):
                    return True
                result[at].pop()
                room.take(need, -1)
                room.devices = before
        return False


def _has_room(ask: Ask) -> bool:
    """Whether all workers of a workload fit, were it alone."""
    missing = ask.need.min_workers
    for room in ask.rooms:
        missing -= room.workers(ask.need)
        if missing <= 0:
            return True
    return False
