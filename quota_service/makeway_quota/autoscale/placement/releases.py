"""Find the room that is certain to be free soon: of jobs that reach their time limit before a new machine were ready.

A workload waits for it no longer than a machine would take that was launched when it was submitted, so that work which
others overtake gets its machine. What terminating victims leave is no demand in the first place. Used by `sizing`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping

from ..demand import MachineDemand, PendingWork, PlacedWork
from ..deployment import MachineType
from ..machine import Machine
from .rooms import UNLIMITED, Devices, MachineRoom


def room_without(room: MachineRoom, placed: Iterable[PlacedWork]) -> MachineRoom:
    """Return the room of a machine after what some workers hold of it was taken."""
    for one in placed:
        for device in one.devices:
            if device < len(room.free):
                room.free[device] = max(0, room.free[device] - one.milli_gpus)
        room.cpu -= one.cpu if room.cpu < UNLIMITED else 0
        room.memory -= one.memory if room.memory < UNLIMITED else 0
    return room


class _Releasing:
    """A machine on which some work ends: the room it has after so many ends, without what was taken of it."""

    __slots__ = ("_kind", "_misfits", "_placed", "_rooms", "_taken", "ends", "machine")

    def __init__(
        self, machine: Machine, machine_type: MachineType, placed: Iterable[PlacedWork], ends: Iterable[float]
    ) -> None:
        """Keep what is placed on it. `ends`: when some of that ends; the rest stays."""
        self.machine, self._kind, self._placed, self.ends = machine, machine_type, tuple(placed), sorted(ends)
        self._taken: list[tuple[PendingWork, Devices]] = []
        self._rooms: dict[int, MachineRoom] = {}
        self._misfits: dict[Hashable, int] = {}
        """The ends after which no worker of a shape could be promised room, as long as nothing else is taken"""

    def take(self, work: PendingWork, most: int, limit: float) -> int:
        """Take room for so many workers at most that is free by then, and is not there now; return how many got it."""
        ended = bisect_right(self.ends, limit)
        if self._misfits.get(work.shape, -1) >= ended:
            return 0
        if (devices := self._room(0).take(work)) is not None:
            self._room(0).give_back(work, devices)  # what does not start where there is room waits for something else
            self._misfits[work.shape] = len(self.ends)
            return 0
        number = 0
        while number < most and (devices := self._room(ended).take(work)) is not None:
            self._taken.append((work, devices))
            self._changed()
            number += 1
        if not number:
            self._misfits[work.shape] = ended
        return number

    def give_back(self, number: int) -> None:
        """Undo the last takes."""
        del self._taken[len(self._taken) - number :]
        self._changed()

    def _changed(self) -> None:
        self._rooms.clear()
        self._misfits.clear()

    def _room(self, ended: int) -> MachineRoom:
        if ended not in self._rooms:
            over = frozenset(self.ends[:ended])
            stays = [one for one in self._placed if one.ends_at not in over]
            room = room_without(MachineRoom.of(self._kind, self.machine), stays)
            self._rooms[ended] = room_without(room, [_as_placed(*one) for one in self._taken])
        return self._rooms[ended]


class Releases:
    """The machines on which some room will certainly be free within the time that a boot takes."""

    def __init__(
        self,
        machines: Iterable[tuple[Machine, MachineType]],
        demand: MachineDemand,
        boot_seconds: Mapping[str, float],
        now: float,
    ) -> None:
        self._boots, self._submitted, self._now = boot_seconds, demand.submitted, now
        self._machines: list[_Releasing] = []
        self._ends: list[float] = []
        self._missed: dict[Hashable, int] = {}
        """The ends up to which so many workers of a shape found no room, as long as no other work takes some"""
        latest = now + max(boot_seconds.values(), default=0.0)
        ends: dict[str, list[float]] = {}
        for one in demand.placed:  # what is overdue proves nothing any more
            if one.ends_at is not None and now < one.ends_at <= latest and one.machine not in demand.nominated:
                ends.setdefault(one.machine, []).append(one.ends_at)
        if not ends or not demand.pending:
            return
        for row, machine_type in machines:
            if row.id in ends and row.accepts_work and row.id in demand.nodes:
                self._machines.append(_Releasing(row, machine_type, demand.placed_on(row.id), ends[row.id]))
        self._ends = sorted(end for one in self._machines for end in one.ends)

    def take(self, work: PendingWork, workers: int, kind: str) -> float | None:
        """Take the room of so many workers that is free before a machine of a type would be; return when it is.

        None where there is none, and nothing is taken then.
        """
        boot, submitted = self._boots.get(kind), self._submitted.get(work.workload)
        if not self._machines or boot is None or submitted is None:
            return None
        limit = min(submitted, self._now) + boot
        key, ended = (work.shape, workers), bisect_right(self._ends, limit)
        if self._missed.get(key, 0) >= ended:
            return None
        taken: list[tuple[_Releasing, int]] = []
        remaining = workers
        for one in self._machines:
            if one.machine.pool in work.pools and (number := one.take(work, remaining, limit)):
                taken.append((one, number))
                remaining -= number
                if not remaining:
                    self._missed.clear()
                    return max(one.ends[bisect_right(one.ends, limit) - 1] for one, _ in taken)
        for one, number in taken:
            one.give_back(number)
        self._missed[key] = ended
        return None


def _as_placed(work: PendingWork, devices: Devices) -> PlacedWork:
    milli_gpus = devices[0][1] if devices else 0
    return PlacedWork("", "", tuple(device for device, _ in devices), milli_gpus, work.cpu, work.memory)
