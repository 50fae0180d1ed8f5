"""Find the room that is certain to be free soon: of jobs that reach their time limit before a new machine were ready.

A workload waits for it no longer than a machine would take that was launched when it was submitted, so that work which
others overtake gets its machine. What terminating victims leave is no demand in the first place. Used by `sizing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..demand import MachineDemand, PendingWork, PlacedWork
from ..deployment import MachineType
from ..machine import Machine
from .rooms import UNLIMITED, Devices, MachineRoom


def room_without(room: MachineRoom, placed: Iterable[PlacedWork]) -> MachineRoom:
    """Return the room of a machine after what some workers hold of it was taken."""
    for one in placed:
        for device in one.devices:
            if device < len(room.free):
                room.free[device] = max(0, room.free[device] - one.milli)
        room.cpu -= one.cpu if room.cpu < UNLIMITED else 0
        room.memory -= one.memory if room.memory < UNLIMITED else 0
    return room


class Releases:
    """The machines on which some room will certainly be free within the time that a boot takes."""

    def __init__(
        self,
        machines: Iterable[Machine],
        types: Mapping[str, MachineType],
        demand: MachineDemand,
        boots: Mapping[str, float],
        now: float,
    ) -> None:
        self._types, self._boots, self._submitted = types, boots, demand.submitted
        self._now = now
        self._machines: dict[str, tuple[Machine, list[PlacedWork]]] = {}
        self._taken: dict[str, list[tuple[PendingWork, Devices]]] = {}
        latest = now + max(boots.values(), default=0.0)
        releasing = {one.machine for one in demand.placed if self._ends(one, latest)}
        releasing -= demand.nominated
        if not releasing or not demand.pending:
            return
        for row in machines:
            if row.id in releasing and row.accepts_work and row.id in demand.nodes and row.type in types:
                self._machines[row.id] = row, []
        for one in demand.placed:
            if one.machine in self._machines:
                self._machines[one.machine][1].append(one)

    def take(self, work: PendingWork, workers: int, kind: str) -> float | None:
        """Take the room of so many workers that is free before a machine of a type would be; return when it is.

        None where there is none, and nothing is taken then.
        """
        boot, submitted = self._boots.get(kind), self._submitted.get(work.workload)
        if not self._machines or boot is None or submitted is None:
            return None
        limit = min(submitted, self._now) + boot
        if limit <= self._now:
            return None
        taken: list[str] = []
        for name, (machine, _) in self._machines.items():
            if machine.pool not in work.pools or self._room(name, self._now).take(work) is not None:
                continue  # what does not start where there is room waits for something else
            while len(taken) < workers and (devices := self._room(name, limit).take(work)) is not None:
                self._taken.setdefault(name, []).append((work, devices))
                taken.append(name)
            if len(taken) == workers:
                return max(self._until(one, limit) for one in taken)
        for name in taken:
            self._taken[name].pop()
        return None

    def _room(self, name: str, limit: float) -> MachineRoom:
        """Return the room that a machine has at a time, without what was taken of it."""
        machine, placed = self._machines[name]
        stays = [one for one in placed if not self._ends(one, limit)]
        room = room_without(MachineRoom.of(self._types[machine.type], machine), stays)
        return room_without(room, [_as_placed(*one) for one in self._taken.get(name, ())])

    def _ends(self, one: PlacedWork, limit: float) -> bool:
        """Whether the room of a worker is free by then; one that is overdue proves nothing any more."""
        return one.ends_at is not None and self._now < one.ends_at <= limit

    def _until(self, name: str, limit: float) -> float:
        return max(one.ends_at or limit for one in self._machines[name][1] if self._ends(one, limit))


def _as_placed(work: PendingWork, devices: Devices) -> PlacedWork:
    milli = devices[0][1] if devices else 0
    return PlacedWork("", "", tuple(device for device, _ in devices), milli, work.cpu, work.memory)
