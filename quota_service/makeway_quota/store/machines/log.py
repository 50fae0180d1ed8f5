"""Keep what happened to machines, and what their consoles and init scripts wrote.

An event for each change of a state or of its cause is written in the transaction of the change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, delete, insert, select

from ...autoscale.machine import Machine
from .. import rows
from ..database.database import Database
from ..pages import bounded
from ..statements import Many
from ..tables import machine_events, machine_outputs, machines
from .rows import repaired

E = machine_events.c
OUTPUT = machine_outputs.c
ADD_EVENTS = Many(insert(machine_events))
MAX_OUTPUT = 64 * 1024
"""Characters of an output that are kept: half from its beginning, half from its end"""
EVENT_KINDS: Mapping[str, tuple[type, Any]] = {
    "at": (float, 0.0),
    **dict.fromkeys(("deployment", "machine", "state", "reason", "message"), (str, "")),
}
OUTPUT_KINDS: Mapping[str, tuple[type, Any]] = {
    **dict.fromkeys(("machine", "kind"), (str, None)),
    "at": (float, 0.0),
    "text": (str, ""),
    "omitted": (int, 0),
}
OutputKind = Literal["console", "init"]


@dataclass(frozen=True, slots=True)
class MachineLogEvent:
    """One line of the log of machines. `machine` and `state` are empty where it is about the whole deployment."""

    id: int
    at: float
    deployment: str
    machine: str
    state: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class MachineOutput:
    """The newest output of one kind; `omitted` counts the characters in its middle that were not kept."""

    machine: str
    kind: str
    at: float
    exit_code: int | None
    text: str
    omitted: int = 0


class MachineLog:
    """Events and outputs of machines. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def events(
        self,
        deployment: str | None = None,
        machine: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[MachineLogEvent]:
        """Return events, newest first; `before` is the last id of the page before."""
        query = select(machine_events).order_by(E.id.desc()).limit(bounded(limit))
        for column, value in ((E.deployment, deployment), (E.machine, machine)):
            query = query if value is None else query.where(column == rows.clean(value))
        if before is not None:
            query = query.where(E.id < rows.clean(before))
        with self._database.read() as connection:
            result = [repaired(row, EVENT_KINDS) for row in connection.execute(query)]
        return [MachineLogEvent(**known) for known in result if known is not None]

    def add(self, deployment: str, machine: str, reason: str, message: str, now: float) -> None:
        """Write an event that is no change of a state, such as what a provider said."""
        with self._database.write() as connection:
            add_events(connection, [event_of(deployment, machine, "", reason, message, now)])

    def write_output(self, machine: str, kind: OutputKind, text: str, exit_code: int | None, now: float) -> bool:
        """Replace an output of a machine; False where there is no such machine (any more)."""
        text = str(rows.clean(text))
        half = MAX_OUTPUT // 2
        omitted = max(0, len(text) - 2 * half)
        kept = text if not omitted else text[:half] + text[-half:]
        values = {"machine": machine, "kind": kind, "at": now, "exit_code": rows.clean(exit_code), "text": kept}
        with self._database.write() as connection:
            if connection.execute(select(machines.c.id).where(machines.c.id == rows.clean(machine))).first() is None:
                return False
            connection.execute(delete(machine_outputs).where(OUTPUT.machine == machine, OUTPUT.kind == kind))
            connection.execute(insert(machine_outputs), {**values, "omitted": omitted})
        return True

    def outputs(self, machine: str) -> list[MachineOutput]:
        """Return the outputs of a machine, the console's first."""
        query = select(machine_outputs).where(OUTPUT.machine == rows.clean(machine)).order_by(OUTPUT.kind)
        with self._database.read() as connection:
            result = [repaired(row, OUTPUT_KINDS) for row in connection.execute(query)]
        return [MachineOutput(**known) for known in result if known is not None]


def event_of(deployment: str, machine: str, state: str, reason: str, message: str, now: float) -> dict[str, Any]:
    """Return the columns of an event."""
    texts = {"deployment": deployment, "machine": machine, "state": state, "reason": reason}
    return {
        "at": now,
        **{k: rows.clean(v) for k, v in texts.items()},
        "message": rows.clean(rows.shorten_message(message)),
    }


def changed_events(after: Iterable[Machine], before: Mapping[str, tuple[str, str]], now: float) -> list[dict[str, Any]]:
    """Return the events of machines whose state or its cause is another than before, by state and reason."""
    result = []
    for one in after:
        was = before.get(one.id)
        if was != (one.state, one.reason):
            at = one.since if was is None or was[0] != one.state else now
            result.append(event_of(one.deployment, one.id, one.state, one.reason, _facts(one), at))
    return result


def _facts(machine: Machine) -> str:
    """Return what is known of a machine in its new state, for people who look for it at the provider."""
    if machine.state in ("requested", "failed"):
        return f"{machine.type}, {machine.zone or 'any zone'}, {machine.market.replace('_', ' ')}"
    return f"instance {machine.instance}" if machine.instance else ""


def add_events(connection: Connection, events: Sequence[Mapping[str, Any]]) -> None:
    """Write events."""
    ADD_EVENTS.run(connection, events)
