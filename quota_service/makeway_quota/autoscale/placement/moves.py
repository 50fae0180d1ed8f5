"""Decide when the jobs of a machine are moved to others, so that it can be given back. Pure; called by `step`.

The engine is asked first whether all of the jobs would start elsewhere at once (`engine.restarts`), as only it knows
every rule: no machine is emptied without that. The machine drains, so that nothing starts there any more. Its jobs get
their notice in a later cycle, if they can still be moved then; until that, work that comes back ends the drain. A job
moves at most once within `interval`, as one that runs for less stays where it is, also under a new leader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..demand import MachineDemand, PendingWork, PlacedWork
from ..deployment import Deployment, MoveRules
from ..machine import Machine
from .releases import room_without
from .rooms import GPU, UNLIMITED, Devices, MachineRoom

MOVE_SECONDS = 120.0
"""Seconds of work that a move costs a job besides what it has not saved: it saves, waits and loads"""
CANDIDATES = 8
"""Machines whose jobs are tried in one step, the least used ones"""


class _Targets(NamedTuple):
    """The other machines with work that take jobs, and their free room.

    Where the CPU of a machine is not known, it has none for a job without GPUs.
    """

    rooms: list[MachineRoom]

    def take(self, jobs: Sequence[PlacedWork], rules: MoveRules) -> bool:
        """Whether all jobs fit, each whole on the fullest machine with room, and the headroom stays free."""
        workers: dict[str, list[PlacedWork]] = {}
        for one in sorted(jobs, key=lambda one: (-_milli_gpus(one), one.workload)):
            workers.setdefault(one.workload, []).append(one)
        for job in workers.values():
            self.rooms.sort(key=lambda room: (sum(room.free), room.machine or ""))
            known = (room for room in self.rooms if job[0].devices or room.cpu < UNLIMITED)
            if not any(_take(room, job) for room in known):
                return False
        return sum(device == GPU for room in self.rooms for device in room.free) >= rules.free_gpus


def _take(room: MachineRoom, workers: Iterable[PlacedWork]) -> bool:
    """Take the room of all workers of a job on one machine; take none where they do not fit."""
    taken: list[tuple[PendingWork, Devices]] = []
    for one in workers:
        asked = PendingWork(one.workload, (), gpus=_milli_gpus(one), cpu=one.cpu, memory=one.memory)
        devices = room.take(asked)
        if devices is None:
            for before in taken:
                room.give_back(*before)
            return False
        taken.append((asked, devices))
    return True


def find_move(
    deployment: Deployment, machines: Iterable[Machine], demand: MachineDemand, now: float, last: float | None
) -> Machine | None:
    """Return the machine whose jobs are to be moved now, None for none. `last`: when one was found last."""
    if not demand.restartable:
        return None
    found = candidates(deployment, machines, demand, now, last)
    return next((row for row in found if row.id in demand.restartable and row.drain != "move"), None)


def candidates(
    deployment: Deployment, machines: Iterable[Machine], demand: MachineDemand, now: float, last: float | None
) -> list[Machine]:
    """Return the machines for which the engine is to be asked whether their jobs start elsewhere, the best first.

    It is that which drains for a move, as long as its jobs have no notice; else, after `interval`, those whose jobs
    have room on other machines, and whose move pays.
    """
    rules = deployment.moves
    if rules is None:
        return []
    rows = [machine for machine in machines if not machine.finished]
    by_machine = demand.placed_by_machine
    if moving := [row for row in rows if row.drain == "move"]:
        without = [row for row in moving if not any(job.is_leaving for job in by_machine.get(row.id, ()))]
        return [row for row in without if _fits(deployment, row, rows, demand)]
    if deployment.paused or last is None or now - last < rules.interval:
        return []
    tried = sorted(
        (row for row in rows if row.accepts_work and _may_empty(row, by_machine.get(row.id, ()), rules, demand, now)),
        key=lambda row: (sum(map(_milli_gpus, by_machine[row.id])), len(by_machine[row.id]), -(row.price or 0), row.id),
    )[:CANDIDATES]
    paying = [row for row in tried if _pays(deployment, row, by_machine[row.id], now)]
    return [row for row in paying if _fits(deployment, row, rows, demand)]


def can_be_moved(deployment: Deployment, machine: Machine, machines: Iterable[Machine], demand: MachineDemand) -> bool:
    """Whether all that runs on a machine starts elsewhere at once, on other machines with work, and nothing waits."""
    if machine.id not in demand.restartable:
        return False
    return _fits(deployment, machine, [row for row in machines if not row.finished], demand)


def _fits(deployment: Deployment, machine: Machine, machines: Iterable[Machine], demand: MachineDemand) -> bool:
    """Whether all that runs on a machine has room on other ready machines with work, and nothing waits or boots."""
    rules = deployment.moves
    rows = [row for row in machines if row.pool == machine.pool]
    by_machine = demand.placed_by_machine
    jobs = by_machine.get(machine.id, ())
    quiet = not demand.has_pending_for(machine.pool) and not any(row.starting or row.state == "lost" for row in rows)
    if rules is None or not quiet or machine.id in demand.nominated:
        return False
    if _count(jobs) > rules.max_jobs or not all(job.movable and not job.notice for job in jobs):
        return False
    machine_type = deployment.type(machine.type)
    targets = [
        _room(deployment, row, by_machine[row.id], demand)
        for row in rows
        if row.id != machine.id and row.accepts_work and row.id in demand.nodes and row.id in by_machine
        if row.id not in demand.nominated and not any(one.notice for one in by_machine[row.id])
        if demand.devices is None or row.id in demand.devices
    ]
    alike = [
        room for room in targets if room is not None and machine_type is not None and room.model == machine_type.model
    ]
    return _Targets(alike).take(jobs, rules)


def _count(jobs: Iterable[PlacedWork]) -> int:
    """Return the number of jobs, each of which may have several workers."""
    return len({job.workload for job in jobs})


def _may_empty(
    machine: Machine, jobs: Sequence[PlacedWork], rules: MoveRules, demand: MachineDemand, now: float
) -> bool:
    """Whether a machine has jobs, no more than are moved at once, which all can be moved and run for long enough.

    None of them may lose more than `interval` seconds of work.
    """
    if not 0 < _count(jobs) <= rules.max_jobs or machine.id not in demand.nodes:
        return False
    long = all(now - job.attempt_started_at >= rules.interval and job.lost_seconds <= rules.interval for job in jobs)
    return long and all(job.movable and not job.notice for job in jobs)


def _pays(deployment: Deployment, machine: Machine, jobs: Sequence[PlacedWork], now: float) -> bool:
    """Whether what the machine would still cost is more than the work that is lost, at the machine's own price.

    Where nothing is known of a job, it runs as long again as it has run. Without a price any will do.
    """
    machine_type = deployment.type(machine.type)
    price = machine.price or 1
    seconds = max(
        now - job.attempt_started_at if job.remaining_seconds is None else job.remaining_seconds for job in jobs
    )
    saved = price * (seconds + (machine_type.idle_timeout if machine_type is not None else 0.0))
    whole = machine.gpus * GPU
    lost = sum(price * (_milli_gpus(job) / whole if whole else 1.0) * (job.lost_seconds + MOVE_SECONDS) for job in jobs)
    return saved > lost


def _room(
    deployment: Deployment, machine: Machine, placed: Iterable[PlacedWork], demand: MachineDemand
) -> MachineRoom | None:
    """Return the free room of a machine; None for one of a type that the document does not name any more."""
    machine_type = deployment.type(machine.type)
    if machine_type is None:
        return None
    room = MachineRoom.of(machine_type, machine)
    if demand.devices is not None:
        whole = demand.devices.get(machine.id, {})
        room.free = [min(free, whole.get(device, 0)) for device, free in enumerate(room.free)]
    cpu, memory = demand.sizes.get(machine.id, (0, 0))
    room.cpu, room.memory = min(room.cpu, cpu or room.cpu), min(room.memory, memory or room.memory)
    return room_without(room, placed)


def _milli_gpus(job: PlacedWork) -> int:
    return len(job.devices) * job.milli_gpus
