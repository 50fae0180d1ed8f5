"""Read and commit the machines of deployments: the store that the steps of `autoscale` need.

A commit is one transaction under the leader's term. It writes everything or nothing: nothing where the term is over,
a machine has another version than the one that was read, or the document of the deployment has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any
from zoneinfo import ZoneInfo

from sqlalchemy import Connection, bindparam, delete, func, insert, select, tuple_, update

from ...autoscale.backoff import DELAYS, LaunchBackoff
from ...autoscale.budget import spent_by_month
from ...autoscale.machine import Machine, MachineState
from ...autoscale.step import MachineChanges, MachineRows
from .. import writes
from ..database.database import Database
from ..errors import LeadershipLost
from ..pages import bounded
from ..rows import clean
from ..statements import MAX_KEYS, BulkStatement, KeyLookup
from ..tables import (
    FINISHED_MACHINE,
    LIVE_MACHINE,
    deployments,
    launch_backoffs,
    machine_reports,
    machine_requests,
    machines,
    sealed_secrets,
    spend_months,
    unknown_instances,
)
from .live import MACHINES, LiveMachines
from .log import add_events, changed_events
from .rows import machine, readable, repaired, row_of
from .rows import machines as machines_of

M = machines.c
CURRENT_STATES = KeyLookup(M.id, M.id, M.deployment, M.version, M.state, M.reason)
EXISTING_IDS = KeyLookup(M.id, M.id)
ADD_MACHINES = BulkStatement(insert(machines))
ADD_REQUESTS = BulkStatement(insert(machine_requests))
SET_MACHINES = BulkStatement(update(machines).where(M.id == bindparam("one")))
ADD_BACKOFFS = BulkStatement(insert(launch_backoffs))
BACKOFF_FIELDS = tuple(field.name for field in fields(LaunchBackoff))
BACKOFF_KINDS: Mapping[str, tuple[type, Any]] = {
    **dict.fromkeys(("type", "zone", "market", "failure"), (str, None)),
    "failures": (int, 1),
    **dict.fromkeys(("since", "until"), (float, None)),
}
UTC = ZoneInfo("UTC")
MAX_NAMED = 100
"""Machines that one event of the live stream names"""


class StoredMachines:
    """The rows of the machines, as `autoscale.step.MachineStore`. Each method is one transaction."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self._damaged: dict[str, dict[str, Sequence[str]]] = {}
        self._live = LiveMachines()

    @property
    def damaged(self) -> dict[str, Sequence[str]]:
        """The fields of machines that are not over that could not be read the last time, by id."""
        return {id: names for result in self._damaged.values() for id, names in result.items()}

    def read(self, deployment: str) -> MachineRows:
        """Return the rows of a deployment as they are committed: machines that are not over, by id."""
        name = clean(deployment)
        damaged: dict[str, Sequence[str]] = {}
        backoffs = select(launch_backoffs).where(launch_backoffs.c.deployment == name)
        with self._database.read() as connection:
            result = tuple(self._live.read(connection, name, damaged))
            parsed = [_backoff(row) for row in connection.execute(backoffs.order_by(*launch_backoffs.primary_key))]
            closed = _closed_spend(connection, name)
            first_seen = _first_seen(connection, name)
        self._damaged[deployment] = damaged
        return MachineRows(result, tuple(backoff for backoff in parsed if backoff is not None), closed, first_seen)

    def commit(self, deployment: str, term: int, changes: MachineChanges) -> bool:
        """Write all changes or none; False if the term is over, or a row or the document has changed meanwhile."""
        try:
            with self._database.write(durable=True) as connection:
                writes.require_term(connection, term)
                name = str(clean(deployment))
                states_before = _states_before(connection, name, changes)
                if states_before is not None:
                    self._write(connection, name, changes, states_before)
                return states_before is not None
        except LeadershipLost:
            return False

    def _write(
        self, connection: Connection, deployment: str, changes: MachineChanges, states_before: Mapping[str, Any]
    ) -> None:
        new = [replace(machine, version=machine.version + 1) for machine in changes.launched]
        changed = [replace(machine, version=machine.version + 1) for machine in changes.changed]
        ADD_MACHINES.run(connection, [row_of(machine) for machine in new])
        ADD_REQUESTS.run(connection, [{"machine": machine.id, "request": clean(machine.request)} for machine in new])
        SET_MACHINES.run(connection, [{"one": machine.id, **row_of(machine)} for machine in changed])
        over = [machine.id for machine in changed if machine.finished]
        for begin in range(0, len(over), MAX_KEYS):
            gone = machine_reports.c.machine.in_(over[begin : begin + MAX_KEYS])
            connection.execute(delete(machine_reports).where(gone))
        _replace_backoffs(connection, deployment, changes.backoffs)
        _replace_first_seen(connection, deployment, changes.first_seen)
        _add_spend(connection, deployment, changes.spent)
        now = self._clock()
        events = changed_events((*new, *changed), states_before, now)
        add_events(connection, events)
        if events:
            named = [event["machine"] for event in events[:MAX_NAMED]]
            writes.add_event(connection, "machines", None, None, {"deployment": deployment, "machines": named}, now)

    def live(self) -> list[Machine]:
        """Return the machines of all deployments that are not over, by deployment and id."""
        with self._database.read() as connection:
            return self._live.read(connection)

    def machine(self, id: str) -> Machine | None:
        """Return one machine, also one that is over; None if there is none of this id, or it was removed."""
        with self._database.read() as connection:
            return machine_of(connection, id)

    def machines(
        self,
        deployment: str | None = None,
        states: Sequence[MachineState] | None = None,
        limit: int = 100,
        after: tuple[float, str] | None = None,
    ) -> list[Machine]:
        """Return one page of machines, those that are over too, the newest request first.

        `after`: `requested_at` and `id` of the last one of the page before.
        """
        query = MACHINES.order_by(M.requested_at.desc(), M.id.desc()).limit(bounded(limit))
        if deployment is not None:
            query = query.where(M.deployment == clean(deployment))
        if states is not None:
            query = query.where(M.state.in_(states))
        if after is not None:
            at, id = after
            query = query.where(tuple_(M.requested_at, M.id) < tuple_(at, clean(id)))
        with self._database.read() as connection:
            return machines_of(connection.execute(query))

    def counts(self) -> dict[str, dict[str, int]]:
        """Return how many machines that are not over each deployment has, by state."""
        query = select(M.deployment, M.state, func.count()).where(LIVE_MACHINE).group_by(M.deployment, M.state)
        result: dict[str, dict[str, int]] = {}
        with self._database.read() as connection:
            for deployment, state, count in connection.execute(query):
                result.setdefault(deployment, {})[state] = int(count)
        return result

    def spend(self, deployment: str) -> dict[str, int]:
        """Return what the machines of a deployment that are over have cost, by month, in millionths."""
        with self._database.read() as connection:
            return _closed_spend(connection, clean(deployment))

    def backoffs(self, deployment: str) -> list[LaunchBackoff]:
        """Return what holds back launches of a deployment, or did."""
        query = select(launch_backoffs).where(launch_backoffs.c.deployment == clean(deployment))
        with self._database.read() as connection:
            result = [_backoff(row) for row in connection.execute(query.order_by(*launch_backoffs.primary_key))]
        return [one for one in result if one is not None]


def machine_of(connection: Connection, id: str) -> Machine | None:
    """Return one machine, also one that is over, or None."""
    row = connection.execute(MACHINES.where(M.id == clean(id))).first()
    return None if row is None else machine(row)


def _states_before(
    connection: Connection, deployment: str, changes: MachineChanges
) -> dict[str, tuple[str, str]] | None:
    """Return state and reason of each changed machine before, by id; None where something was changed meanwhile."""
    query = select(deployments.c.version, deployments.c.deleting).where(
        deployments.c.name == deployment, deployments.c.deleted_at.is_(None)
    )
    document = connection.execute(query).first()
    revision, deleting = (0, False) if document is None else document
    revision = revision if type(revision) is int else 0
    if changes.revision not in (None, revision) or (changes.launched and deleting):
        return None
    if changes.launched and changes.credential_set_at != _credential_set_at(connection, deployment):
        return None  # its provider logs in with what was replaced or deleted
    if any(True for _ in EXISTING_IDS.run(connection, [one.id for one in changes.launched])):
        return None
    known = {row[0]: row[1:] for row in CURRENT_STATES.run(connection, [one.id for one in changes.changed])}
    result = {}
    for one in changes.changed:
        owner, version, state, reason = known.get(one.id, (None, None, "", ""))
        version = version if readable("version", version) else 0
        if owner != deployment or version != one.version:
            return None
        result[one.id] = (str(state), str(reason))
    return result


def _credential_set_at(connection: Connection, deployment: str) -> float | None:
    """Return when the credential was set that the provider of a deployment logs in with; None without one."""
    its = (sealed_secrets.c.name == deployment, sealed_secrets.c.team == "", sealed_secrets.c.kind == "cloud")
    at: float | None = connection.execute(select(sealed_secrets.c.updated_at).where(*its)).scalar()
    return at


def _backoff(row: Any) -> LaunchBackoff | None:
    """Return a back-off; None for one that cannot be read: the next failure writes it anew."""
    known = repaired(row, BACKOFF_KINDS)
    if known is None or known["failure"] not in DELAYS:
        return None
    return LaunchBackoff(**{name: known[name] for name in BACKOFF_FIELDS})


def _replace_backoffs(connection: Connection, deployment: str, backoffs: Iterable[LaunchBackoff] | None) -> None:
    if backoffs is None:
        return
    connection.execute(delete(launch_backoffs).where(launch_backoffs.c.deployment == deployment))
    given = [{name: clean(getattr(one, name)) for name in BACKOFF_FIELDS} for one in backoffs]
    ADD_BACKOFFS.run(connection, [{"deployment": deployment, **one} for one in given])


def _first_seen(connection: Connection, name: object) -> dict[str, float]:
    result = unknown_instances.c
    query = select(result.instance, result.first_seen).where(result.deployment == name).order_by(result.instance)
    return {instance: at for instance, at in connection.execute(query) if type(at) is float}


def _replace_first_seen(connection: Connection, deployment: str, first_seen: Mapping[str, float] | None) -> None:
    if first_seen is None:
        return
    connection.execute(delete(unknown_instances).where(unknown_instances.c.deployment == deployment))
    given = {clean(instance): at for instance, at in first_seen.items()}
    if given:
        connection.execute(
            insert(unknown_instances),
            [{"deployment": deployment, "instance": instance, "first_seen": at} for instance, at in given.items()],
        )


def _closed_spend(connection: Connection, name: object) -> dict[str, int]:
    """Return the closed spend by month; an amount that cannot be read is added up again, as unknown is never zero."""
    query = select(spend_months.c.month, spend_months.c.amount).where(spend_months.c.deployment == name)
    result = connection.execute(query.order_by(spend_months.c.month)).all()
    return {
        row.month: row.amount if type(row.amount) is int else _spent_in(connection, name, row.month) for row in result
    }


def _spent_in(connection: Connection, name: object, month: str) -> int:
    """Return what the machines that are over have cost in a month of UTC."""
    over = MACHINES.where(M.deployment == name, FINISHED_MACHINE)
    gone = [one for one in machines_of(connection.execute(over)) if one.state == "gone"]
    return sum(spent_by_month(one, one.state_since, UTC).get(month, 0) for one in gone)


def _add_spend(connection: Connection, deployment: str, spent: Mapping[str, int]) -> None:
    known = _closed_spend(connection, deployment) if spent else {}
    for month, amount in spent.items():
        mine = {"deployment": deployment, "month": month}
        if month in known:
            where = (spend_months.c.deployment == deployment, spend_months.c.month == month)
            connection.execute(update(spend_months).where(*where).values(amount=known[month] + amount))
        else:
            connection.execute(insert(spend_months), {**mine, "amount": amount})
