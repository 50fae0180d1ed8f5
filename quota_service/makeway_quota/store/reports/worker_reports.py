"""Keep the newest report of each worker that is no process of the service.

A report says which launcher runs the worker, how far it is, and how it ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from .. import rows
from ..database.database import Database
from ..statements import MAX_KEYS, BulkStatement
from ..tables import outputs, serials, worker_reports

R = worker_reports.c
NAME = worker_reports.name
HEARD = BulkStatement(
    update(worker_reports).where(
        R.workload == bindparam("one"), R.attempt == bindparam("number"), R.worker == bindparam("rank")
    )
)
WorkerKey = tuple[str, int, int]
"""A workload, the number of one of its attempts, and the number of one of its workers."""


class AlreadyClaimed(Exception):
    """Another launcher runs this worker."""

    def __init__(self, key: WorkerKey) -> None:
        super().__init__(f"worker {key[2]} of attempt {key[1]} of {key[0]} has another launcher already")


class WorkerReport(NamedTuple):
    """The newest report of one worker. `serial` grows with every change of any report."""

    workload: str
    attempt: int
    worker: int
    instance: str
    serial: int
    heard_at: float
    report: Mapping[str, Any]
    damaged: str = ""
    """why its row cannot be read, which then has an empty report"""

    @property
    def key(self) -> WorkerKey:
        """Return which worker it is about."""
        return self.workload, self.attempt, self.worker


class WorkerReports:
    """The reports of live attempts, until `forget`. Each method is one transaction; readers see all by `serial`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, key: WorkerKey, instance: str, at: float) -> WorkerReport:
        """Return the report of a worker, made if there is none; AlreadyClaimed by another launcher than `instance`."""
        with self._database.write(quiet=True) as connection:
            result = _report_of(connection, key)
            if result is None:
                result = WorkerReport(*key, instance, _next(connection), at, {})
                connection.execute(insert(worker_reports), _values(result))
            elif result.instance != instance:
                raise AlreadyClaimed(key)
        return result

    def write(self, key: WorkerKey, report: Mapping[str, Any], at: float) -> WorkerReport | None:
        """Replace a worker's report and return it; None where the worker was never claimed, or is forgotten.

        An end stays: a report without one may have been on its way for long. With it goes a result that did not come
        whole, so that a part of it is never taken for the whole.
        """
        with self._database.write(quiet=True) as connection:
            result = _report_of(connection, key)
            if result is None:
                return None
            if result.report.get("exit") and not report.get("exit"):
                return result
            result = result._replace(serial=_next(connection), heard_at=at, report=report, damaged="")
            connection.execute(update(worker_reports).where(*_is(key)).values(_values(result)))
            if (report.get("exit") or {}).get("result_unsent"):
                connection.execute(delete(outputs).where(*_result_of(key)))
        return result

    def heard(self, times: Mapping[WorkerKey, float]) -> None:
        """Write when workers were heard of, without another change; each part of them is a transaction of its own."""
        heard = sorted(times.items())
        for begin in range(0, len(heard), MAX_KEYS):
            with self._database.write(quiet=True) as connection:
                serial = _next(connection)
                HEARD.run(
                    connection,
                    [
                        {"heard_at": at, "serial": serial, "one": key[0], "number": key[1], "rank": key[2]}
                        for key, at in heard[begin : begin + MAX_KEYS]
                    ],
                )

    def after(self, serial: int) -> list[WorkerReport]:
        """Return the reports that changed after a serial, in the order of their changes."""
        query = select(worker_reports).where(R.serial > serial).order_by(R.serial)
        with self._database.read() as connection:
            return [_report(row) for row in connection.execute(query)]

    def forget(self, workload: str, attempt: int) -> None:
        """Remove the reports of an attempt whose end is recorded."""
        with self._database.write(quiet=True) as connection:
            connection.execute(delete(worker_reports).where(R.workload == workload, R.attempt == attempt))


def _is(key: WorkerKey) -> Iterable[Any]:
    return R.workload == rows.clean(key[0]), R.attempt == key[1], R.worker == key[2]


def _result_of(key: WorkerKey) -> Iterable[Any]:
    o = outputs.c
    return o.workload == rows.clean(key[0]), o.attempt == key[1], o.worker == key[2], o.kind == "result"


def _report_of(connection: Connection, key: WorkerKey) -> WorkerReport | None:
    row = connection.execute(select(worker_reports).where(*_is(key))).first()
    return None if row is None else _report(row)


def _report(row: Any) -> WorkerReport:
    """Return a report; one that is damaged hides no other, and ends when its worker reports again."""
    try:
        report = json.loads(row.report)
        if not isinstance(report, dict):
            raise ValueError("it is no object of JSON")
    except Exception as error:
        why = f"its report is damaged ({type(error).__name__})"
        return WorkerReport(**{**row._mapping, "report": {}, "damaged": why})
    return WorkerReport(**{**row._mapping, "report": report})


def _values(report: WorkerReport) -> dict[str, Any]:
    values = {**report._asdict(), "report": rows.to_json(report.report)}
    del values["damaged"]
    return values


def _next(connection: Connection) -> int:
    return next_serial(connection, NAME)


def next_serial(connection: Connection, table: str) -> int:
    """Return the next serial of a table, which no row of it ever had; writers are one at a time."""
    counted = update(serials).where(serials.c.name == table).values(value=serials.c.value + 1)
    result = connection.execute(counted.returning(serials.c.value)).scalar_one_or_none()
    if result is None:
        connection.execute(insert(serials), {"name": table, "value": 1})
    return int(result or 1)
