"""Decide which machines drain, which drains are cancelled, and which machines that boot are not needed any more.

Idle time runs from the last use, and for a machine that was never used from the moment it was ready. A machine with
work is never drained for idleness; for a pause or the budget it gets a deadline, and its work gets notices. Pure;
called by `step`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple
from zoneinfo import ZoneInfo

from .budget import Money, month_used_up, over_the_hour
from .demand import MachineDemand
from .deployment import Deployment
from .machine import DrainReason, Machine, MachineEvent
from .placement.moves import can_be_moved

MachineAndEvent = tuple[Machine, MachineEvent]


class StepTime(NamedTuple):
    """The time of a step, and the time from which on its leader has had agents' reports and the demand."""

    now: float
    observing_since: float


def enforce(deployment: Deployment, machines: Iterable[Machine], money: Money, now: float) -> Iterator[MachineAndEvent]:
    """Yield what follows from the deployment alone, whatever runs: a pause, budgets, limits, `max_age`, or a type
    that is removed or has another pool or number of GPUs now.

    A starting machine is withdrawn, but not for its age; a ready one drains, with a deadline if a pause or the month's
    budget ends all. Beyond the document's limits, launches that were not called yet are withdrawn, newest first.
    """
    rows = [machine for machine in machines if not machine.finished]
    forced = _forced(deployment, money)
    deadline = now + deployment.drain_timeout if forced else None
    kept = []
    for machine in rows:
        drain = forced or _outdated(deployment, machine, now)
        if machine.starting and drain and drain != "age":
            yield machine, MachineEvent("withdrawn", reason=drain)
        else:
            kept.append(machine)
            if drain and (machine.state == "ready" or (forced and machine.state == "draining")):
                yield machine, MachineEvent("drain", drain=drain, deadline=deadline)
    if not forced:
        yield from _over_the_limits(deployment, kept, money)


def _over_the_limits(deployment: Deployment, rows: list[Machine], money: Money) -> Iterator[MachineAndEvent]:
    """Yield the launches that the document would not allow any more, where nothing was called for them yet."""
    uncalled = [row for row in rows if row.state == "requested" and not row.launch_calls]
    if not uncalled:
        return
    total, of_type = len(rows), Counter(row.type for row in rows)
    for row in sorted(uncalled, key=lambda one: (-one.requested_at, one.id)):
        machine_type = deployment.type(row.type)
        too_many = total > deployment.max_machines or (
            machine_type is not None and of_type[row.type] > machine_type.max_machines
        )
        if reason := "max_machines" if too_many else over_the_hour(deployment, money, row.price):
            yield row, MachineEvent("withdrawn", reason=reason)
            total, of_type[row.type] = total - 1, of_type[row.type] - 1
            money = replace(money, hourly_cost=money.hourly_cost - (row.price or 0))


def retire(
    deployment: Deployment,
    machines: Iterable[Machine],
    demand: MachineDemand,
    needed: frozenset[str],
    moment: StepTime,
) -> Iterator[MachineAndEvent]:
    """Yield what the work decides about each machine: needed, unneeded, drain, or vacant.

    `needed`: machines that waiting work takes room on.
    """
    now, listening_since = moment
    idle_to_keep = _idle_to_keep(deployment, now)
    rows = [machine for machine in machines if not machine.finished]
    for machine in sorted(rows, key=lambda row: (-_used_at(row, moment), row.id)):  # the last used one is kept
        used = demand.has_work(machine.id)
        if used and machine.state == "draining" and machine.drain == "move":
            yield machine, MachineEvent("moving" if _goes_on(deployment, machine, rows, demand) else "needed")
            continue
        wanted = used or machine.id in needed
        if machine.starting:
            yield machine, MachineEvent("needed" if wanted else "unneeded", at=listening_since)
        elif wanted and machine.state in ("ready", "draining"):
            yield machine, MachineEvent("needed")
        elif machine.state == "ready":
            if idle_to_keep.get(machine.type, 0) > 0:
                idle_to_keep[machine.type] -= 1
            elif _idle_too_long(deployment, machine, moment):
                yield machine, MachineEvent("drain", drain="idle")
        if machine.state == "draining" and not used:
            yield machine, MachineEvent("vacant")


def _goes_on(deployment: Deployment, machine: Machine, rows: list[Machine], demand: MachineDemand) -> bool:
    """Whether the jobs of a machine still move: they have their notices, or still fit elsewhere while nothing waits."""
    leave = any(job.is_leaving for job in demand.placed_on(machine.id))
    return leave or can_be_moved(deployment, machine, rows, demand)


def _forced(deployment: Deployment, money: Money) -> DrainReason | None:
    """Return why all machines have to be ended, None if they have not."""
    if deployment.paused:
        return "pause"
    return "budget" if month_used_up(deployment, money) else None


def _idle_to_keep(deployment: Deployment, now: float) -> dict[str, int]:
    zone = ZoneInfo(deployment.timezone)
    return {machine_type.name: machine_type.idle_machines(now, zone) for machine_type in deployment.types}


def _used_at(machine: Machine, moment: StepTime) -> float:
    """Return when a machine was used last; after the clock was set back, `listening_since` for a time in the future."""
    return machine.needed_at if machine.needed_at <= moment.now else moment.observing_since


def _outdated(deployment: Deployment, machine: Machine, now: float) -> DrainReason | None:
    machine_type = deployment.type(machine.type)
    if machine_type is None or machine_type.pool != machine.pool:
        return "removed"
    if machine_type.gpus != machine.gpus and not machine.starting:  # a launch goes on, or one need had two machines
        return "removed"
    old = (
        machine_type.max_age is not None and now - (machine.launched_at or machine.requested_at) > machine_type.max_age
    )
    return "age" if old else None


def _idle_too_long(deployment: Deployment, machine: Machine, moment: StepTime) -> bool:
    machine_type = deployment.type(machine.type)
    return machine_type is not None and moment.now - _used_at(machine, moment) > machine_type.idle_timeout
