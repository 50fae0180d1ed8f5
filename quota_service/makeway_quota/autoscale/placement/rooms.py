"""Keep the free room of machines, and find the first one that a worker fits on, among thousands.

Room only shrinks while a cycle hands it out, so that a need that found none is remembered, for each block of rooms and
each pool: a later one that is no smaller passes by. Rooms are tried in the order in which they were added. Used by
`sizing`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..demand import PendingWork
from ..deployment import MachineType
from ..machine import Machine

GPU = 1000
BLOCK = 32
"""Rooms in a block: about the root of a thousand of them"""
UNLIMITED = 1 << 62
Devices = list[tuple[int, int]]
"""Devices of a machine by their number, each with the milli-GPUs that are taken of it"""


@dataclass(slots=True)
class MachineRoom:
    """The room of one machine: free milli-GPUs of each device, and CPU and memory, UNLIMITED where not stated."""

    pool: str
    free: list[int]
    cpu: int
    memory: int
    machine: str | None = None
    type: str = ""
    used: bool = False
    model: str = ""
    elsewhere: bool = False
    """whether the machine is one of another deployment"""
    sessions: bool = True
    """whether notebooks start there"""

    @classmethod
    def of(cls, machine_type: MachineType, machine: Machine | None = None) -> MachineRoom:
        """Return the room of a machine of a type; without a machine, of one to launch."""
        gpus = 0 if machine_type.cpu_only else machine_type.gpus if machine is None else machine.gpus
        name = None if machine is None else machine.id
        cpu, memory = machine_type.cpu or UNLIMITED, machine_type.memory or UNLIMITED
        pool = machine_type.pool if machine is None else machine.pool  # the document may have been edited since
        return cls(pool, [GPU] * gpus, cpu, memory, name, machine_type.name, model=machine_type.model)

    def take(self, work: PendingWork) -> Devices | None:
        """Take the room of one worker; return its devices, None where it does not fit."""
        if work.cpu > self.cpu or work.memory > self.memory or not _suits(self.model, work):
            return None
        if work.session and not self.sessions:
            return None
        devices = self._devices(work.gpus)
        if devices is None:
            return None
        self._add(work, devices, -1)
        return devices

    def give_back(self, work: PendingWork, devices: Devices) -> None:
        """Undo `take`."""
        self._add(work, devices, 1)

    def _add(self, work: PendingWork, devices: Devices, sign: int) -> None:
        for device, amount in devices:
            self.free[device] += sign * amount
        if self.cpu < UNLIMITED:
            self.cpu += sign * work.cpu
        if self.memory < UNLIMITED:
            self.memory += sign * work.memory

    def _devices(self, milli_gpus: int) -> Devices | None:
        if not milli_gpus:
            return []
        if milli_gpus < GPU:
            fitting = [(free, at) for at, free in enumerate(self.free) if free >= milli_gpus]
            return [(min(fitting)[1], milli_gpus)] if fitting else None
        whole = [at for at, free in enumerate(self.free) if free == GPU][: milli_gpus // GPU]
        return [(at, GPU) for at in whole] if len(whole) == milli_gpus // GPU else None


def _suits(model: str, work: PendingWork) -> bool:
    """Whether GPUs of a model are of one that the work asks for; those of a type without a model may be of any."""
    return not work.models or not model or model in work.models


def fits_on(machine_type: MachineType, work: PendingWork) -> bool:
    """Whether a worker fits on an empty machine of a type."""
    if not _suits(machine_type.model, work):
        return False
    if work.cpu > (machine_type.cpu or UNLIMITED) or work.memory > (machine_type.memory or UNLIMITED):
        return False
    devices = work.gpus // GPU if work.gpus >= GPU else int(work.gpus > 0)
    return devices <= (0 if machine_type.cpu_only else machine_type.gpus)


Need = tuple[int, int, int]
"""What a worker needs: milli-GPUs, CPU, memory. One that needs no less of anything fits nowhere where this does not"""


class _Misses:
    """The smallest needs that found no room, as long as no room comes back."""

    __slots__ = ("needs",)

    def __init__(self) -> None:
        self.needs: tuple[Need, ...] = ()

    def covers(self, need: Need) -> bool:
        gpus, cpu, memory = need
        for less_gpus, less_cpu, less_memory in self.needs:  # no generator: thousands of needs are compared in a cycle
            if less_gpus <= gpus and less_cpu <= cpu and less_memory <= memory:
                return True
        return False

    def add(self, need: Need) -> None:
        gpus, cpu, memory = need
        kept = [one for one in self.needs if one[0] < gpus or one[1] < cpu or one[2] < memory]
        self.needs = (*kept, need)


@dataclass(slots=True)
class _Block:
    """Some rooms in a row, of one pool."""

    rooms: list[MachineRoom] = field(default_factory=list)
    misses: _Misses = field(default_factory=_Misses)


@dataclass(slots=True)
class TakenRoom:
    """The room that one worker took, and its block."""

    work: PendingWork
    room: MachineRoom
    devices: Devices
    block: _Block


class Rooms:
    """The rooms of all machines, by pool."""

    def __init__(self, rooms: Iterable[MachineRoom] = ()) -> None:
        self._blocks: dict[str, list[_Block]] = {}
        self._misses: dict[str, _Misses] = {}
        self.all: list[MachineRoom] = []
        self._by_machine: dict[str, tuple[MachineRoom, _Block]] = {}
        for room in rooms:
            self.add(room)

    def add(self, room: MachineRoom) -> _Block:
        """Add a room after all others; return its block."""
        blocks = self._blocks.setdefault(room.pool, [])
        if not blocks or len(blocks[-1].rooms) >= BLOCK:
            blocks.append(_Block())
        blocks[-1].rooms.append(room)
        blocks[-1].misses.needs = ()
        self._misses.setdefault(room.pool, _Misses()).needs = ()
        self.all.append(room)
        if room.machine is not None:
            self._by_machine[room.machine] = room, blocks[-1]
        return blocks[-1]

    def take(self, work: PendingWork) -> TakenRoom | None:
        """Take the first room of the first pool that a worker fits in."""
        need = work.gpus, work.cpu, work.memory
        for pool in work.pools:
            misses = self._misses.get(pool)
            if misses is None or misses.covers(need):
                continue
            for block in self._blocks[pool]:
                if block.misses.covers(need):
                    continue
                for room in block.rooms:
                    if (devices := room.take(work)) is not None:
                        return TakenRoom(work, room, devices, block)
                if not work.models and not work.session:
                    block.misses.add(need)
            if not work.models and not work.session:  # else another model, or a machine for jobs only, may have room
                misses.add(need)
        return None

    def take_of(self, machine: str, work: PendingWork) -> TakenRoom | None:
        """Take the room of one worker on a machine, None where there is none."""
        room, block = self._by_machine.get(machine, (None, None))
        if room is None or block is None or (devices := room.take(work)) is None:
            return None
        return TakenRoom(work, room, devices, block)

    def take_on(self, room: MachineRoom, work: PendingWork) -> TakenRoom | None:
        """Add a room and take that of one worker, where it fits; else add nothing."""
        devices = room.take(work)
        return None if devices is None else TakenRoom(work, room, devices, self.add(room))

    def misses(self, pools: Iterable[str]) -> dict[str, tuple[Need, ...]]:
        """Return what is known to find no room in some pools, for `undo`."""
        return {pool: self._misses[pool].needs for pool in pools if pool in self._misses}

    def undo(self, taken: Iterable[TakenRoom], added: int, misses: dict[str, tuple[Need, ...]]) -> None:
        """Undo what was taken, and remove so many rooms that were added, since `misses` was returned."""
        for one in taken:
            one.room.give_back(one.work, one.devices)
            one.block.misses.needs = ()
        for _ in range(added):
            room = self.all.pop()
            blocks = self._blocks[room.pool]
            blocks[-1].rooms.pop()
            if not blocks[-1].rooms:
                blocks.pop()
        for pool, needs in misses.items():
            self._misses[pool].needs = needs
