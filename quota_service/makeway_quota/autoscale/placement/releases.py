"""Find the room that is certain to be free soon: of jobs whose time limit ends before a new machine could be ready.

A workload waits for it no longer than a machine would have booted that was launched at the submission, so that work
which others overtake gets its machine. What terminating victims leave is no demand anyway. Used by `sizing`.
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
    """A machine on which some work ends soon: the room on it after so many ends, without what was taken of it."""

    __slots__ = ("_ends_without_room", "_machine_type", "_placed", "_rooms", "_taken", "ends", "machine")

    def __init__(
        self, machine: Machine, machine_type: MachineType, placed: Iterable[PlacedWork], ends: Iterable[float]
    ) -> None:
        """`placed`: the work on it. `ends`: the times at which some of it ends, in Unix seconds; the rest stays."""
        self.machine, self._machine_type, self._placed, self.ends = machine, machine_type, tuple(placed), sorted(ends)
        self._taken: list[tuple[PendingWork, Devices]] = []
        self._rooms: dict[int, MachineRoom] = {}
        self._ends_without_room: dict[Hashable, int] = {}
        """Shape to the number of ends after which there is no room for a worker, as long as nothing else is taken"""

    def take(self, work: PendingWork, max_workers: int, deadline: float) -> int:
        """Take room that is free by `deadline`, and not yet now, for workers; return for how many."""
        ended = bisect_right(self.ends, deadline)
        if self._ends_without_room.get(work.shape, -1) >= ended:
            return 0
        if (devices := self._room(0).take(work)) is not None:
            self._room(0).give_back(work, devices)  # what does not start where there is room waits for something else
            self._ends_without_room[work.shape] = len(self.ends)
            return 0
        number = 0
        while number < max_workers and (devices := self._room(ended).take(work)) is not None:
            self._taken.append((work, devices))
            self._changed()
            number += 1
        if not number:
            self._ends_without_room[work.shape] = ended
        return number

    def give_back(self, number: int) -> None:
        """Undo the last takes."""
        del self._taken[len(self._taken) - number :]
        self._changed()

    def _changed(self) -> None:
        self._rooms.clear()
        self._ends_without_room.clear()

    def _room(self, ended: int) -> MachineRoom:
        if ended not in self._rooms:
            past_ends = frozenset(self.ends[:ended])
            stays = [one for one in self._placed if one.ends_at not in past_ends]
            room = room_without(MachineRoom.of(self._machine_type, self.machine), stays)
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
        self._boot_seconds, self._submitted, self._now = boot_seconds, demand.submitted, now
        self._machines: list[_Releasing] = []
        self._ends: list[float] = []
        self._without_room: dict[Hashable, int] = {}
        """Shape and number of workers to the ends after which they find no room, as long as nothing else is taken"""
        latest = now + max(boot_seconds.values(), default=0.0)
        ends: dict[str, list[float]] = {}
        for one in demand.placed:  # what is overdue proves nothing any more
            if one.ends_at is not None and now < one.ends_at <= latest and one.machine not in demand.nominated:
                ends.setdefault(one.machine, []).append(one.ends_at)
        if not ends or not demand.pending:
            return
        for machine, machine_type in machines:
            if machine.id in ends and machine.accepts_work and machine.id in demand.nodes:
                placed = demand.placed_on(machine.id)
                self._machines.append(_Releasing(machine, machine_type, placed, ends[machine.id]))
        self._ends = sorted(end for one in self._machines for end in one.ends)

    def take(self, work: PendingWork, workers: int, machine_type: str) -> float | None:
        """Take the room of so many workers that is free before a new machine would be; return when it is.

        None where there is none, and nothing is taken then.
        """
        boot_seconds, submitted = self._boot_seconds.get(machine_type), self._submitted.get(work.workload)
        if not self._machines or boot_seconds is None or submitted is None:
            return None
        deadline = min(submitted, self._now) + boot_seconds
        key, ended = (work.shape, workers), bisect_right(self._ends, deadline)
        if self._without_room.get(key, 0) >= ended:
            return None
        taken: list[tuple[_Releasing, int]] = []
        remaining = workers
        for one in self._machines:
            if one.machine.pool in work.pools and (number := one.take(work, remaining, deadline)):
                taken.append((one, number))
                remaining -= number
                if not remaining:
                    self._without_room.clear()
                    return max(one.ends[bisect_right(one.ends, deadline) - 1] for one, _ in taken)
        for one, number in taken:
            one.give_back(number)
        self._without_room[key] = ended
        return None


def _as_placed(work: PendingWork, devices: Devices) -> PlacedWork:
    milli_gpus = devices[0][1] if devices else 0
    return PlacedWork("", "", tuple(device for device, _ in devices), milli_gpus, work.cpu, work.memory)
