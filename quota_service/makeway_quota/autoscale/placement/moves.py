"""Decide when the jobs of a machine are moved to others, so that it can be given back. Pure; called by `step`.

The machine drains first, so that nothing starts there any more. Its jobs get their notice in a later cycle, if they can
still be moved then; until that, work that comes back ends the drain. A job moves at most once within `every`, as one
that runs for less stays where it is, also under a new leader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..demand import MachineDemand, PendingWork, PlacedWork
from ..deployment import Deployment, MoveRules
from ..machine import Machine
from .releases import room_without
from .rooms import GPU, UNLIMITED, MachineRoom

MOVE_SECONDS = 120.0
"""Seconds of work that a move costs a job besides what it has not saved: it saves, waits and loads"""
CANDIDATES = 8
"""Machines whose jobs are tried in one step, the least used ones"""


class _Targets(NamedTuple):
    """The other machines with work that take jobs, and their free room.

    Where the CPU of a machine is not known, it has none for a job without GPUs.
    """

    rooms: list[MachineRoom]

    def take(self, jobs: Iterable[PlacedWork], rules: MoveRules) -> bool:
        """Whether all jobs fit, each on the fullest machine with room, and the headroom stays free."""
        for job in sorted(jobs, key=lambda one: (-_milli(one), one.workload)):
            asked = PendingWork(job.workload, (), gpus=_milli(job), cpu=job.cpu, memory=job.memory)
            self.rooms.sort(key=lambda room: (sum(room.free), room.machine or ""))
            known = (room for room in self.rooms if job.devices or room.cpu < UNLIMITED)
            if not any(room.take(asked) is not None for room in known):
                return False
        return sum(device == GPU for room in self.rooms for device in room.free) >= rules.headroom


def find_move(
    deployment: Deployment, machines: Iterable[Machine], demand: MachineDemand, now: float, last: float | None
) -> Machine | None:
    """Return the machine whose jobs are to be moved now, None for none. `last`: when one was found last."""
    rules = deployment.moves
    if rules is None or deployment.paused or last is None or now - last < rules.every:
        return None
    rows = [machine for machine in machines if not machine.over]
    if any(row.drain == "move" for row in rows):
        return None
    by_machine = _by_machine(demand)
    tried = sorted(
        (row for row in rows if row.accepts_work and _may_empty(row, by_machine.get(row.id, ()), rules, demand, now)),
        key=lambda row: (sum(map(_milli, by_machine[row.id])), len(by_machine[row.id]), -(row.price or 0), row.id),
    )
    for row in tried[:CANDIDATES]:
        if _pays(deployment, row, by_machine[row.id], now) and can_be_moved(deployment, row, rows, demand):
            return row
    return None


def can_be_moved(deployment: Deployment, machine: Machine, machines: Iterable[Machine], demand: MachineDemand) -> bool:
    """Whether all that runs on a machine fits on other ready machines with work, and nothing waits or boots."""
    rules = deployment.moves
    rows = [row for row in machines if not row.over and row.pool == machine.pool]
    by_machine = _by_machine(demand)
    jobs = by_machine.get(machine.id, [])
    quiet = not demand.waits_for(machine.pool) and not any(row.starting or row.state == "lost" for row in rows)
    if rules is None or not quiet or machine.id in demand.nominated:
        return False
    if len(jobs) > rules.most or not all(job.movable and not job.noticed for job in jobs):
        return False
    kind = deployment.type(machine.type)
    targets = [
        _room(deployment, row, by_machine[row.id], demand)
        for row in rows
        if row.id != machine.id and row.accepts_work and row.id in demand.nodes and row.id in by_machine
        if row.id not in demand.nominated and not any(one.noticed for one in by_machine[row.id])
    ]
    alike = [room for room in targets if room is not None and kind is not None and room.model == kind.model]
    return _Targets(alike).take(jobs, rules)


def _by_machine(demand: MachineDemand) -> dict[str, list[PlacedWork]]:
    result: dict[str, list[PlacedWork]] = {}
    for one in demand.placed:
        result.setdefault(one.machine, []).append(one)
    return result


def _may_empty(
    machine: Machine, jobs: Sequence[PlacedWork], rules: MoveRules, demand: MachineDemand, now: float
) -> bool:
    """Whether a machine has jobs, no more than are moved at once, which all can be moved and run for long enough."""
    if not 0 < len(jobs) <= rules.most or machine.id not in demand.nodes:
        return False
    return all(job.movable and not job.noticed and now - job.since >= rules.every for job in jobs)


def _pays(deployment: Deployment, machine: Machine, jobs: Sequence[PlacedWork], now: float) -> bool:
    """Whether what the machine would still cost is more than the work that is lost, at the machine's own price.

    Where nothing is known of a job, it runs as long again as it has run. Without a price any will do.
    """
    kind = deployment.type(machine.type)
    price = machine.price or 1
    seconds = max(now - job.since if job.remaining is None else job.remaining for job in jobs)
    saved = price * (seconds + (kind.idle_timeout if kind is not None else 0.0))
    whole = machine.gpus * GPU
    lost = sum(price * (_milli(job) / whole if whole else 1.0) * (job.lost + MOVE_SECONDS) for job in jobs)
    return saved > lost


def _room(
    deployment: Deployment, machine: Machine, placed: Iterable[PlacedWork], demand: MachineDemand
) -> MachineRoom | None:
    """Return the free room of a machine; None for one of a type that the document does not name any more."""
    kind = deployment.type(machine.type)
    if kind is None:
        return None
    room = MachineRoom.of(kind, machine)
    cpu, memory = demand.sizes.get(machine.id, (0, 0))
    room.cpu, room.memory = min(room.cpu, cpu or room.cpu), min(room.memory, memory or room.memory)
    return room_without(room, placed)


def _milli(job: PlacedWork) -> int:
    return len(job.devices) * job.milli
