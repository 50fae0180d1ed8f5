"""Keep what happened to machines, and what their consoles and init scripts wrote.

An event for each change of a state or of its cause is written in the transaction of the change.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, delete, func, insert, select

from ...autoscale.machine import Machine
from .. import rows
from ..database.database import Database
from ..pages import bounded
from ..statements import MAX_KEYS, BulkStatement
from ..tables import LIVE_MACHINE, machine_events, machine_outputs, machines
from .rows import repaired

E = machine_events.c
OUTPUT = machine_outputs.c
ADD_EVENTS = BulkStatement(insert(machine_events))
MAX_OUTPUT = 64 * 1024
"""Characters of an output that are kept: half from its beginning, half from its end"""
JOIN_CODE = r"\.[A-Za-z0-9_-]{43}"
"""What follows the id of a machine in its join token, which programs print with the rest of the user data"""
EVENT_KINDS: Mapping[str, tuple[type, Any]] = {
    "at": (float, 0.0),
    **dict.fromkeys(("deployment", "machine", "state", "reason", "message"), (str, "")),
}
STATE_KINDS = {name: EVENT_KINDS[name] for name in ("at", "machine", "state")}
OUTPUT_KINDS: Mapping[str, tuple[type, Any]] = {
    **dict.fromkeys(("machine", "kind"), (str, None)),
    "at": (float, 0.0),
    "text": (str, ""),
    "omitted": (int, 0),
}
MAX_CHANGES = 2000
"""Changes of states that a history has: the newest ones"""
FEW_CHANGES = 200
"""Changes that are read first: enough for most histories, however long the log is"""
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


@dataclass(frozen=True, slots=True)
class StateHistory:
    """The states of a deployment's machines since a time. `earlier`: the last ones before, by machine."""

    since: float
    earlier: Mapping[str, str]
    changes: Sequence[tuple[float, str, str]]
    """when, which machine, to which state; in order"""


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

    def states(self, deployment: str, since: float) -> StateHistory:
        """Return the states of a deployment's machines since a time, or since MAX_CHANGES changes ago if that is later.

        A machine without a change since then is in `earlier` only if it is among the changes that were read.
        """
        query = select(E.id, E.at, E.machine, E.state).where(E.deployment == rows.clean(deployment), E.state != "")
        with self._database.read() as connection:
            for limit in (FEW_CHANGES, MAX_CHANGES):
                result = connection.execute(query.order_by(E.id.desc()).limit(limit)).all()
                if len(result) < limit or (repaired(result[-1], STATE_KINDS) or {"at": since})["at"] < since:
                    break
            known = [(row.id, values) for row in reversed(result) if (values := repaired(row, STATE_KINDS))]
            if len(result) == MAX_CHANGES and known:
                since = max(since, known[0][1]["at"])
            earlier = {values["machine"]: values["state"] for _, values in known if values["at"] < since}
            recent = [(id, values) for id, values in known if values["at"] >= since]
            changed = {values["machine"] for _, values in recent} - earlier.keys()
            if recent:
                earlier |= _states_before(connection, sorted(changed), recent[0][0])
        return StateHistory(since, earlier, [(one["at"], one["machine"], one["state"]) for _, one in recent])

    def mark(self) -> Hashable:
        """Return a value that is another one after each line of the log, and where machines run other work."""
        with self._database.read() as connection:
            newest = connection.execute(select(func.max(E.id))).scalar()
            live = connection.execute(select(machines.c.id, machines.c.state, machines.c.attempts).where(LIVE_MACHINE))
            return newest, frozenset(map(tuple, live))

    def add(self, deployment: str, machine: str, reason: str, message: str, now: float) -> None:
        """Write an event that is no change of a state, such as what a provider said."""
        with self._database.write() as connection:
            add_events(connection, [event_of(deployment, machine, "", reason, message, now)])

    def write_output(self, machine: str, kind: OutputKind, text: str, exit_code: int | None, now: float) -> bool:
        """Replace an output of a machine, without its join token; False where there is no such machine (any more)."""
        text = re.sub(re.escape(machine) + JOIN_CODE, lambda _: f"{machine}.…", str(rows.clean(text)))
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


def _states_before(connection: Connection, ids: Sequence[str], event: int) -> dict[str, str]:
    """Return the state of each of some machines before an event; those that had none yet are left out."""
    result: dict[str, str] = {}
    for begin in range(0, len(ids), MAX_KEYS):
        some = E.machine.in_(ids[begin : begin + MAX_KEYS])
        last = select(func.max(E.id)).where(some, E.state != "", E.id < event).group_by(E.machine)
        for row in connection.execute(select(E.at, E.machine, E.state).where(E.id.in_(last.scalar_subquery()))):
            if (known := repaired(row, STATE_KINDS)) is not None:
                result[known["machine"]] = known["state"]
    return result


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
            at = one.state_since if was is None or was[0] != one.state else now
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
