"""Decide which machines drain, which drains are cancelled, and which machines that boot are not needed any more.

Idle time runs from the last use, and for a machine that was never used from the moment it was ready. A machine with
work is never drained for idleness; for a pause or the budget it gets a deadline, and its work gets notices. Pure;
called by `step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from zoneinfo import ZoneInfo

from .budget import Money, month_used_up
from .demand import MachineDemand
from .deployment import Deployment
from .machine import DrainReason, Machine, MachineObservation

Observed = tuple[Machine, MachineObservation]


def retire(
    deployment: Deployment,
    machines: Iterable[Machine],
    demand: MachineDemand,
    needed: frozenset[str],
    held: Money,
    listening: float,
    now: float,
) -> Iterator[Observed]:
    """Yield what is decided about each machine: needed, unneeded, drain, or vacant.

    `needed`: machines that waiting work takes room on; `listening`: since when this leader has known the demand.
    """
    spare = _spare(deployment, now)
    rows = [machine for machine in machines if not machine.over]
    forced = _forced(deployment, held)
    for machine in sorted(rows, key=lambda row: (-_used_at(row, now, listening), row.id)):  # the last used one is kept
        used = demand.used(machine.id)
        if machine.starting:
            wanted = (used or machine.id in needed) and not forced
            yield machine, MachineObservation("needed" if wanted else "unneeded", at=listening)
        elif machine.state == "ready":
            if drain := forced or _outdated(deployment, machine, now):
                deadline = now + deployment.drain_timeout if forced else None
                yield machine, MachineObservation("drain", drain=drain, deadline=deadline)
            elif used or machine.id in needed:
                yield machine, MachineObservation("needed")
            elif spare.get(machine.type, 0) > 0:
                spare[machine.type] -= 1
            elif _idle_too_long(deployment, machine, listening, now):
                yield machine, MachineObservation("drain", drain="idle")
        elif machine.state == "draining":
            if forced:
                yield machine, MachineObservation("drain", drain=forced, deadline=now + deployment.drain_timeout)
            elif used or machine.id in needed:
                yield machine, MachineObservation("needed")
            if not used:
                yield machine, MachineObservation("vacant")


def _forced(deployment: Deployment, held: Money) -> DrainReason | None:
    """Return why all machines have to be ended, None if they have not."""
    if deployment.paused:
        return "pause"
    return "budget" if month_used_up(deployment, held) else None


def _spare(deployment: Deployment, now: float) -> dict[str, int]:
    zone = ZoneInfo(deployment.timezone)
    return {kind.name: kind.idle_machines(now, zone) for kind in deployment.types}


def _used_at(machine: Machine, now: float, listening: float) -> float:
    """Return when a machine was used last; a time of before the clock was set back counts as `listening`."""
    return machine.needed_at if machine.needed_at <= now else listening


def _outdated(deployment: Deployment, machine: Machine, now: float) -> DrainReason | None:
    kind = deployment.type(machine.type)
    if kind is None:
        return "removed"
    old = kind.max_age is not None and now - (machine.launched_at or machine.requested_at) > kind.max_age
    return "age" if old else None


def _idle_too_long(deployment: Deployment, machine: Machine, listening: float, now: float) -> bool:
    kind = deployment.type(machine.type)
    return kind is not None and now - _used_at(machine, now, listening) > kind.idle_timeout
