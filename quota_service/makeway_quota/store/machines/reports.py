"""Keep the newest report of the agent on each machine, and which boot of it has joined.

Any replica takes reports; all of them read those that changed after a serial, as they do reports of workers. A report
goes with the commit that ends its machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sqlalchemy import Connection, bindparam, insert, select, update

from ...autoscale.machine import Machine
from .. import rows
from ..database.database import Database
from ..reports.worker_reports import next_serial
from ..statements import MAX_KEYS, BulkStatement
from ..tables import machine_reports
from .machines import machine_of

R = machine_reports.c
HEARD = BulkStatement(update(machine_reports).where(R.machine == bindparam("one")))
KINDS: Mapping[str, tuple[type, Any]] = {
    **dict.fromkeys(("machine", "boot", "report"), (str, "")),
    **dict.fromkeys(("number", "serial"), (int, 0)),
    **dict.fromkeys(("joined_at", "heard_at"), (float, 0.0)),
}
"""The type of each column, and what it is read as where it is damaged"""
JoinOutcome = Literal["joined", "again", "other", "over"]


class MachineReport(NamedTuple):
    """The newest report of one machine. `serial` grows with every change of any; `number` counts those of its agent."""

    machine: str
    boot: str
    number: int
    serial: int
    joined_at: float
    heard_at: float
    facts: Mapping[str, Any]
    damaged: str = ""
    """why its row cannot be read, which then has no facts"""


@dataclass(frozen=True, slots=True)
class Join:
    """What became of a join: the boot has joined now, or `again`, or `other` did, or the machine is `over`."""

    outcome: JoinOutcome
    machine: Machine | None = None
    report: MachineReport | None = None


class MachineReports:
    """The reports of machines that are not over. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def join(self, machine: str, boot: str, facts: Mapping[str, Any], now: float) -> Join:
        """Bind a machine to the boot that joins first: no other one ever joins.

        `over`: there is no such machine, or it is being ended.
        """
        with self._database.write(quiet=True, durable=True) as connection:
            row = machine_of(connection, machine)
            if row is None or row.finished or row.state == "terminating":
                return Join("over", row)
            known = _report_of(connection, row.id)
            joined = row.boot if known is None else known.boot
            if joined not in (None, boot):
                return Join("other", row, known)
            if known is not None:
                return Join("again", row, known)
            report = MachineReport(row.id, boot, 0, _next(connection), now, now, facts)
            connection.execute(insert(machine_reports), _values(report))
            return Join("joined" if joined is None else "again", row, report)

    def report(self, machine: str, boot: str, facts: Mapping[str, Any], now: float, number: int = 0) -> int | None:
        """Replace the facts of a machine and return the serial; None where this boot has not joined, or it is over.

        Nothing is written for facts that are known, nor for a report whose `number` is below the newest: it was on its
        way for long.
        """
        with self._database.read() as connection:
            known = _report_of(connection, machine)
        if known is None or known.boot != boot:
            return None
        if number < known.number or (not known.damaged and _same(known.facts, facts)):
            return known.serial
        with self._database.write(quiet=True) as connection:
            known = _report_of(connection, machine)
            if known is None or known.boot != boot:
                return None
            if number < known.number:
                return known.serial
            heard = known._replace(number=number, serial=_next(connection), heard_at=now, facts=facts, damaged="")
            connection.execute(update(machine_reports).where(R.machine == heard.machine).values(_values(heard)))
            return heard.serial

    def heard(self, times: Mapping[str, float]) -> None:
        """Write when machines were heard of, without another change; each part of them is a transaction of its own."""
        heard = sorted(times.items())
        for begin in range(0, len(heard), MAX_KEYS):
            with self._database.write(quiet=True) as connection:
                serial = _next(connection)
                HEARD.run(
                    connection,
                    [{"heard_at": at, "serial": serial, "one": id} for id, at in heard[begin : begin + MAX_KEYS]],
                )

    def after(self, serial: int) -> list[MachineReport]:
        """Return the reports that changed after a serial, in the order of their changes."""
        query = select(machine_reports).where(R.serial > serial).order_by(R.serial)
        with self._database.read() as connection:
            return [_report(row) for row in connection.execute(query)]

    def of(self, machine: str) -> MachineReport | None:
        """Return the newest report of a machine; None where none has joined, or it is over."""
        with self._database.read() as connection:
            return _report_of(connection, machine)


def _same(known: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    return rows.to_json(known) == rows.to_json(facts)


def _report_of(connection: Connection, machine: str) -> MachineReport | None:
    row = connection.execute(select(machine_reports).where(R.machine == rows.clean(machine))).first()
    return None if row is None else _report(row)


def _report(row: Any) -> MachineReport:
    """Return a report; one that is damaged hides no other, and ends when its machine reports again."""
    kinds = {name: kind for name, kind in KINDS.items() if type(row._mapping[name]) is not kind[0]}
    known = {name: kinds[name][1] if name in kinds else value for name, value in row._mapping.items()}
    text = known.pop("report")
    try:
        facts = json.loads(text)
        if not isinstance(facts, dict) or kinds:
            raise ValueError("it is no object of JSON, or a column has another type")
    except Exception as error:
        return MachineReport(**known, facts={}, damaged=f"its report is damaged ({type(error).__name__})")
    return MachineReport(**known, facts=facts)


def _values(report: MachineReport) -> dict[str, Any]:
    result = {**report._asdict(), "report": rows.to_json(report.facts)}
    del result["facts"], result["damaged"]
    return {name: rows.clean(value) for name, value in result.items()}


def _next(connection: Connection) -> int:
    return next_serial(connection, machine_reports.name)
